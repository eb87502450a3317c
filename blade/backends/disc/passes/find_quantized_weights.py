# SPDX-License-Identifier: Apache-2.0
"""Finds weights that a model dequantizes itself, group by group, and says so.

    %2 f32[128, 4, 32] = cast %1          %7 i8[128, 128] = reshape %1
    %4 f32[128, 4, 32] = broadcast %3     %8 f32[128, 128] = dequantize %7 %3 {group}
    %5 f32[128, 4, 32] = mul %2 %4   ->
    %6 f32[128, 128] = reshape %5

``%1`` is a constant of int8 and ``%3`` one of [128, 4]. A zero point per group may be subtracted before the product.
Scales and zero points of other dtypes become constants of float32.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from blade.backends.disc.ir.graph import Graph, IrBuilder, Value, contiguous_strides
from blade.backends.disc.ir.rewrite import rewrite_values

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_POINTS = (*_FLOATS, torch.int8, torch.int16, torch.int32)
_GROUPS = (0, 1)  # the axes of a scale that is spread over its group


@dataclass(frozen=True)
class _Found:
    """Constants: ``values`` [rows, groups, size], ``scales`` and ``zeros`` [rows, groups]."""

    values: Value
    scales: Value
    zeros: Value | None


def find_quantized_weights(graph: Graph) -> Graph:
    """``graph`` with a `dequantize` for each weight of that form."""
    if not any(v.op == "const" and v.dtype == torch.int8 for v in graph.values):
        return graph
    constants = list(graph.constants)
    made: dict[int, Value] = {}

    def floats(b: IrBuilder, v: Value) -> Value:
        """The constant ``v`` [rows, groups, 1] as float32 [rows, groups]."""
        if v.id not in made:
            tensor = graph.constants[v.attrs["index"]].squeeze(-1).float().contiguous()
            attrs = {**v.attrs, "index": len(constants)}
            strides = contiguous_strides(tensor.shape)
            made[v.id] = b.make("const", (), tensor.shape, tensor.dtype, strides, **attrs)
            constants.append(tensor)
        return made[v.id]

    def step(b: IrBuilder, v: Value, args: list[Value]) -> Value | None:
        found = _found(v) if v.op == "reshape" else None
        if found is None:
            return None
        parameters = (found.scales, *([] if found.zeros is None else [found.zeros]))
        held = graph.constants[found.values.attrs["index"]]
        attrs: dict[str, Any] = {"kind": "group", "low": int(held.min()), "high": int(held.max())}
        values = b.reshape(
            b.make(
                "const",
                (),
                found.values.shape,
                found.values.dtype,
                found.values.strides,
                **found.values.attrs,
            ),
            v.shape,
        )
        operands = (values, *(floats(b, one) for one in parameters))
        return b.make("dequantize", operands, v.shape, v.dtype, **attrs)

    rewritten = rewrite_values(graph, step)
    return replace(rewritten, constants=tuple(constants))


def _found(v: Value) -> _Found | None:
    """The constants of ``v``, a reshape, if it is a weight that is dequantized."""
    product = v.args[0]
    if product.op != "mul" or v.dtype != torch.float32 or len(product.shape) != 3:
        return None
    rows, _, size = product.shape
    if len(v.shape) != 2 or v.shape[0] != rows or not isinstance(size, int):
        return None
    for wide, spread in (product.args, reversed(product.args)):
        scales, zeros = _of_groups(spread, _FLOATS), None
        if wide.op == "sub":
            zeros = _of_groups(wide.args[1], _POINTS)
            if zeros is None:
                continue
            wide = wide.args[0]
        values = wide.args[0] if wide.op == "cast" else wide
        if scales is not None and values.op == "const" and values.dtype == torch.int8:
            return _Found(values, scales, zeros)
    return None


def _of_groups(v: Value, dtypes: tuple[torch.dtype, ...]) -> Value | None:
    """The constant [rows, groups, 1] that ``v`` spreads over [rows, groups, size]."""
    if v.op != "broadcast" or v.attrs["axes"] != _GROUPS:
        return None
    shape, v = (*v.shape[:2], 1), v.args[0]
    while v.op in ("reshape", "cast"):
        v = v.args[0]
    is_it = v.op == "const" and v.dtype in dtypes and v.shape == shape
    return v if is_it else None
