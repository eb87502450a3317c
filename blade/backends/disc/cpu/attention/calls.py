# SPDX-License-Identifier: Apache-2.0
"""Calls from the IR's attention ops to the generated kernels: strides, sizes, scratch, units."""

import math
import struct

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv

from blade.backends.disc.cpu.attention import gradient, kernel
from blade.backends.disc.cpu.attention.block import BLOCK_KEYS
from blade.backends.disc.cpu.attention.tiles import key_rows
from blade.backends.disc.cpu.emit.bf16_dot import PAIR
from blade.backends.disc.cpu.emit.element_types import MEMORY
from blade.backends.disc.cpu.emit.matrix_tiles import STEP
from blade.backends.disc.ir.attention import bias_and_sink
from blade.backends.disc.ir.graph import (
    Shape,
    Value,
    numel,
    plain,
)
from blade.backends.disc.ir.kernel import Dim
from blade.backends.disc.ir.views import view_of
from blade.backends.disc.program.instructions import NativeCall
from blade.backends.disc.target.cpu import CpuTarget


def attention_call(value: Value, target: CpuTarget) -> NativeCall:
    """The call that computes ``value``, an ``attention`` or ``flash_attention``.

    The operands are addressable and their rows are contiguous.
    """
    q, k, v = value.args[:3]
    bias, sink = bias_and_sink(value)
    lead, queries, depth = q.shape[:-2], q.shape[-2], q.shape[-1]
    keys, columns = v.shape[-2:]
    q_lead, k_lead, v_lead = (_strides(x)[:-2] for x in (q, k, v))
    nothing = (0,) * len(q.shape)
    bias_strides = nothing if bias is None else _strides(bias)
    sink_strides = nothing if sink is None else _strides(sink)
    fill = value.attrs.get("fill")
    logs = value.op == "flash_attention"
    out, out_row = _packed_strides(value) if logs else _result_strides(value)
    numbers: dict[str, Dim] = {
        "queries": queries,
        "keys": keys,
        "depth": depth,
        "columns": columns,
        "causal": int(value.attrs["causal"]),
        "undefined": int(value.attrs.get("undefined", False)),
        "scale": _bits(value.attrs["scale"]),
        "cap": _bits(value.attrs.get("cap", 0.0)),
        "has_bias": int(bias is not None),
        "fill": _bits(math.nan if fill is None else fill),
        "has_sink": int(sink is not None),
        "q_row": _strides(q)[-2],
        "k_row": _strides(k)[-2],
        "v_row": _strides(v)[-2],
        "o_row": out_row,
        "bias_query": bias_strides[-2],
        "bias_key": bias_strides[-1],
    }
    named = {"q": q_lead, "k": k_lead, "v": v_lead, "bias": bias_strides[:-2], "o": out}
    named["sink"] = sink_strides[:-2]
    numbers |= _padded("n", lead, 1)
    for name, strides in named.items():
        numbers |= _padded(f"{name}_", strides, 0)
    size = kernel.block_queries(target)
    work = sympy.Min(queries, size) * keys * (sympy.sympify(depth) + columns)
    names = kernel.ARGUMENTS
    if logs:
        names = (*names, kernel.LOGS_AT)
        numbers[kernel.LOGS_AT] = numel((*lead, queries, columns))
    is_narrow = q.dtype == torch.bfloat16
    name = kernel.bf16_name(MEMORY[value.dtype]) if is_narrow else kernel.NAME
    room = _narrow_scratch if is_narrow else _scratch
    return NativeCall(
        kernel.NAME_WITH_LOGS if logs else name,
        plain(numel(lead) * FloorDiv(sympy.sympify(queries) + size - 1, size)),
        plain(FloorDiv(work, 16) + 1),
        room(queries, keys, depth, columns, target),
        (q, k, v, q if bias is None else bias, q if sink is None else sink, value),
        tuple(numbers[name] for name in names),
    )


def gradient_call(value: Value, target: CpuTarget) -> NativeCall:
    """The call that computes ``value``, a ``flash_attention_gradient``."""
    g, q, k, v, logs, delta = value.args[:6]
    bias = value.args[6] if len(value.args) == 7 else None
    batch, heads, queries, depth = q.shape
    keys, columns = v.shape[-2:]
    strides = {name: _strides(x) for name, x in zip("gqkv", (g, q, k, v), strict=True)}
    strides["bias"] = (0, 0, 0, 0) if bias is None else _strides(bias)
    numbers: dict[str, Dim] = {
        "batch": batch,
        "heads": heads,
        "queries": queries,
        "keys": keys,
        "depth": depth,
        "columns": columns,
        "causal": int(value.attrs["causal"]),
        "scale": _bits(value.attrs["scale"]),
        "has_bias": int(bias is not None),
        **{f"{name}_batch": s[0] for name, s in strides.items()},
        **{f"{name}_head": s[1] for name, s in strides.items()},
        **{f"{name}_row": s[2] for name, s in strides.items() if name != "bias"},
        "bias_query": strides["bias"][2],
        "bias_key": strides["bias"][3],
    }
    size = gradient.lanes_of_unit(target)
    blocks = sum(FloorDiv(sympy.sympify(n) + size - 1, size) for n in (queries, keys))
    work = 2 * size * sympy.Max(queries, keys) * (sympy.sympify(depth) + columns)
    padded = sum(_in_vectors(n, target) for n in (depth, columns))
    return NativeCall(
        gradient.NAME,
        plain(sympy.sympify(batch) * heads * blocks),
        plain(FloorDiv(work, 16) + 1),
        plain(4 * gradient.scratch_floats(target, depth, columns, padded)),
        (g, q, k, v, g if bias is None else bias, logs, delta, value),
        tuple(numbers[name] for name in gradient.ARGUMENTS),
    )


def _bits(number: float) -> int:
    """The bit pattern of a float."""
    return int(struct.unpack("<i", struct.pack("<f", number))[0])


def _strides(x: Value) -> Shape:
    view = view_of(x)
    assert view is not None, x
    return tuple(0 if d == 1 else s for d, s in zip(x.shape, view.strides, strict=True))


def _result_strides(value: Value) -> tuple[Shape, Dim]:
    """Strides of the leading axes, in the operands' order, and of a query, whose row holds all heads."""
    strides, heads = _strides(value)[:-1], value.attrs["heads"]
    place = len(strides) - 1 - heads
    return (*strides[:place], *strides[place + 1 :]), strides[place]


def _packed_strides(value: Value) -> tuple[Shape, Dim]:
    """``_result_strides`` for results [B, L, H, E]."""
    _, heads, queries, _ = value.args[0].shape
    columns = value.args[2].shape[-1]
    row = plain(sympy.sympify(heads) * columns)
    return (plain(sympy.sympify(queries) * row), columns), row


def _padded(name: str, dims: Shape, missing: int) -> dict[str, Dim]:
    full = (*[missing] * (kernel.LEAD - len(dims)), *dims)
    return {f"{name}{k}": d for k, d in enumerate(full)}


def _in_vectors(floats: Dim, target: CpuTarget) -> sympy.Expr:
    """``floats`` rounded up to a multiple of the lanes."""
    return FloorDiv(sympy.sympify(floats) + target.lanes - 1, target.lanes) * target.lanes


def _scratch(queries: Dim, keys: Dim, depth: Dim, columns: Dim, target: CpuTarget) -> Dim:
    """Bytes for both algorithms: blocks of scores, sums and queries, or one row of scores."""
    width = kernel.block_queries(target)
    rows = sympy.Min(keys, BLOCK_KEYS) + key_rows(target)[0]
    padded = _in_vectors(columns, target)
    block = (rows + depth + padded + 4) * width
    # keys and values of a head are copied only if it has a second block of queries
    again = sympy.Min(1, FloorDiv(sympy.sympify(queries) + width - 1, width) - 1)
    copied = sympy.Min(keys, kernel.PACKED_KEYS[1]) * (depth + columns) * sympy.Max(0, again)
    return plain(4 * sympy.Max(block + copied, sympy.sympify(keys) + 2 * target.lanes + 16))


def _narrow_scratch(queries: Dim, keys: Dim, depth: Dim, columns: Dim, target: CpuTarget) -> Dim:
    """Bytes for bfloat16: blocks of scores, sums, pairs of queries and of values, or one row of scores."""
    width = kernel.block_queries(target)
    seen = sympy.Min(keys, BLOCK_KEYS)
    padded = _in_vectors(columns, target)
    pairs = FloorDiv(sympy.sympify(depth) + 1, PAIR)
    block = (seen + key_rows(target)[0] + pairs + padded + 3) * width
    values = FloorDiv(seen + 1, PAIR) * padded
    if target.has_bf16_tiles:  # whole steps of pairs, of values and of weights
        values = FloorDiv(FloorDiv(seen + 1, PAIR) + STEP - 1, STEP) * STEP * (padded + width)
    return plain(4 * sympy.Max(block + values, sympy.sympify(keys) + 2 * target.lanes + 16))
