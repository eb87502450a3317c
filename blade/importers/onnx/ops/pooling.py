# SPDX-License-Identifier: Apache-2.0
"""Pooling."""

from __future__ import annotations

import torch

from blade.importers.onnx.emit.emitter import Emitter
from blade.importers.onnx.emit.errors import NotImported
from blade.importers.onnx.emit.table import NodeView, row
from blade.importers.onnx.emit.values import TensorValue, Value
from blade.importers.onnx.ops.convolution import kernel_of, pads_of


def _window(
    e: Emitter, node: NodeView, x: Value
) -> tuple[list[int], list[int], list[int], list[int], list[int]]:
    """Kernel, strides, dilations, and the padding before and behind."""
    kernel = kernel_of(e, node, None)
    strides = node.ints("strides") or [1] * len(kernel)
    dilations = node.ints("dilations") or [1] * len(kernel)
    before, after = pads_of(e, node, x, kernel, strides, dilations)
    flat = [*before, *after]
    if not all(isinstance(one, int) for one in flat):
        raise NotImported("The padding depends on sizes that are not known.")
    known = [int(one) for one in flat if isinstance(one, int)]
    return kernel, strides, dilations, known[: len(kernel)], known[len(kernel) :]


def _lead(e: Emitter, x: Value, rank: int) -> tuple[int | None, ...]:
    dims = e.dims(x) or (None, None)
    return (*dims[:2], *[None] * rank)


@row("MaxPool")
def max_pool(e: Emitter, node: NodeView, x: Value) -> tuple[TensorValue, ...]:
    kernel, strides, dilations, before, after = _window(e, node, x)
    rank, dtype, ceil = len(kernel), e.dtype(x), bool(node.int("ceil_mode", 0))
    text = e.tensor(x)
    if not dtype.is_floating_point:
        text = f"{text}.to(torch.float32)"
    is_even = before == after and all(2 * p <= k for p, k in zip(before, kernel))
    if is_even and rank <= 3 and not node.wants(1):
        given = f"{kernel}, {strides}, {before}, {dilations}, {ceil}"
        made = f"torch.max_pool{rank}d({text}, {given})"
        if not dtype.is_floating_point:
            made += f".to({dtype})"
        return (TensorValue(made, dtype, _lead(e, x, rank)),)
    by_column = bool(node.int("storage_order", 0))
    names = e.name("pooled"), e.name("places")
    window = f"{kernel}, {strides}, {dilations}, {before}, {after}, {ceil}, {by_column}"
    e.line(f"{names[0]}, {names[1]} = run.max_pool({text}, {window})")
    first = names[0] if dtype.is_floating_point else f"{names[0]}.to({dtype})"
    results = (
        TensorValue(first, dtype, _lead(e, x, rank)),
        TensorValue(names[1], torch.int64, _lead(e, x, rank)),
    )
    return results[: len(node.outputs)]


@row("AveragePool")
def average_pool(e: Emitter, node: NodeView, x: Value) -> TensorValue:
    kernel, strides, dilations, before, after = _window(e, node, x)
    rank, ceil = len(kernel), bool(node.int("ceil_mode", 0))
    counts = bool(node.int("count_include_pad", 0))
    is_even = before == after and all(2 * p <= k for p, k in zip(before, kernel))
    if is_even and rank <= 3 and set(dilations) == {1}:
        given = f"{kernel}, {strides}, {before}, {ceil}, {counts}"
        made = f"torch.ops.aten.avg_pool{rank}d({e.tensor(x)}, {given})"
    else:
        window = f"{kernel}, {strides}, {dilations}, {before}, {after}, {ceil}, {counts}"
        made = f"run.average_pool({e.tensor(x)}, {window})"
    return TensorValue(made, e.dtype(x), _lead(e, x, rank))


@row("LpPool")
def lp_pool(e: Emitter, node: NodeView, x: Value) -> TensorValue:
    kernel, strides, dilations, before, after = _window(e, node, x)
    ceil, p = bool(node.int("ceil_mode", 0)), node.int("p", 2)
    window = f"{kernel}, {strides}, {dilations}, {before}, {after}, {ceil}"
    made = f"run.lp_pool({e.tensor(x)}, {window}, {p})"
    return TensorValue(made, e.dtype(x), _lead(e, x, len(kernel)))


@row("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
def global_pool(e: Emitter, node: NodeView, x: Value) -> TensorValue:
    rank = e.rank(x)
    axes, text = list(range(2, rank)), e.tensor(x)
    if node.op == "GlobalAveragePool":
        made = f"torch.mean({text}, {axes}, True)"
    elif node.op == "GlobalMaxPool":
        made = f"torch.amax({text}, {axes}, True)"
    else:
        p = float(node.int("p", 2))
        made = f"torch.pow(torch.sum(torch.pow(torch.abs({text}), {p}), {axes}, True), 1.0 / {p})"
    sizes = e.sizes(x) or ()
    return TensorValue(made, e.dtype(x), (*sizes[:2], *[1] * (rank - 2)))


@row("MaxUnpool")
def max_unpool(
    e: Emitter, node: NodeView, x: Value, places: Value, shape: Value | None = None
) -> TensorValue:
    kernel = kernel_of(e, node, None)
    strides = node.ints("strides") or [1] * len(kernel)
    pads = node.ints("pads") or [0] * (2 * len(kernel))
    wanted = e.no_ints() if shape is None else e.ints(shape)
    given = f"{e.tensor(x)}, {e.tensor(places)}, {kernel}, {strides}, {pads}, {wanted}"
    return TensorValue(f"run.max_unpool({given})", e.dtype(x), (None,) * e.rank(x))
