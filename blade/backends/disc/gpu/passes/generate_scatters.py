# SPDX-License-Identifier: Apache-2.0
"""Sums, maxima and minima over the points that an index sends to one element, as generated code.

    %4 = call index_add %base %index %3            %5 = scatter %index %3 {sum}      with the kernel that makes %3
                                           ->      %6 = add %base %5                 with its readers

The points are never stored: messages between the nodes of a graph are gathered, weighed and added in one kernel.
They are combined in float32, in any order, as ATen's atomics do (but for its gradient of an embedding, which has a
fixed one); 16-bit results are rounded once instead of at each addition. ATen keeps all of them where
``torch.use_deterministic_algorithms`` asks for it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from blade.backends.disc.frontend.ops.gather import (
    INDICES,
    adjacent_indices,
    join_indices,
    joined_shape,
)
from blade.backends.disc.frontend.ops.table import OperandSlot
from blade.backends.disc.ir.graph import Graph, IrBuilder, Shape, Value
from blade.backends.disc.ir.kernel import Dim
from blade.backends.disc.ir.rewrite import rewrite_values

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
JOIN = {"sum": "add", "max": "maximum"}
KINDS = {
    "sum": "sum",
    "amax": "max",
    "amin": "max",
}  # the smallest is the negated maximum of the negated
aten = torch.ops.aten


def generate_scatters(graph: Graph) -> Graph:
    """``graph`` with a `scatter` in place of the calls of ``FORMS``."""
    if torch.are_deterministic_algorithms_enabled():
        return graph

    def step(b: IrBuilder, v: Value, args: list[Value]) -> Value | None:
        form = FORMS.get(v.attrs["target"]) if v.op == "call" else None
        if form is None or v.dtype not in FLOATS or not v.shape:
            return None
        given = [_given(one, args) for one in v.attrs["template"]]
        return form(b, v, *given)

    return rewrite_values(graph, step)


def _given(argument: Any, args: Sequence[Value]) -> Any:
    if isinstance(argument, OperandSlot):
        return args[argument]
    if isinstance(argument, tuple):
        return tuple(_given(one, args) for one in argument)
    return argument


def _index_add(
    b: IrBuilder, v: Value, base: Value, dim: int, index: Value, source: Value, alpha: Any = 1
) -> Value | None:
    if len(index.shape) != 1 or not source.shape or index.dtype not in INDICES:
        return None
    axis = dim % len(v.shape)
    source = b.cast(source, torch.float32)
    if alpha != 1:
        source = b.pointwise("mul", source, b.fill(alpha, source.shape, torch.float32))
    column = [index.shape[0] if k == axis else 1 for k in range(len(v.shape))]
    index = b.broadcast(b.reshape(index, column), source.shape)
    return _joined(b, base, _scatter(b, v.shape, axis, index, source, "sum"), "sum")


def _scatter_reduce(
    b: IrBuilder,
    v: Value,
    base: Value,
    dim: int,
    index: Value,
    source: Value,
    reduce: str,
    include_self: bool = True,
) -> Value | None:
    if reduce not in KINDS or not include_self or not index.shape or index.dtype not in INDICES:
        return None
    for axis, size in enumerate(index.shape):  # the source may be larger
        source = b.slice(source, axis, 0, 1, size)
    if reduce == "amin":
        base, source = b.pointwise("neg", base), b.pointwise("neg", source)
    kind, axis = KINDS[reduce], dim % len(v.shape)
    joined = _joined(b, base, _scatter(b, v.shape, axis, index, source, kind), kind)
    return b.pointwise("neg", joined) if reduce == "amin" else joined


def _index_put(
    b: IrBuilder,
    v: Value,
    base: Value,
    indices: tuple[Value | None, ...],
    values: Value,
    accumulate: bool = False,
    unsafe: bool = False,
) -> Value | None:
    """Of indices of adjacent axes; those from the end are negative."""
    found = adjacent_indices(indices) if accumulate else None
    if found is None:
        return None
    axis, given = found
    end, points = axis + len(given), _broadcast_shape([index.shape for index in given])
    if points is None:
        return None
    rank = len(points)
    index = join_indices(b, v.shape[axis:end], given, points)
    shape = (*v.shape[:axis], *points, *v.shape[end:])
    index = b.reshape(index, (*points, *[1] * (len(v.shape) - end)))
    whole = joined_shape(v.shape, axis, end)
    axes = [None if k == axis else k + (rank - 1) * (k > axis) for k in range(len(whole))]
    source = b.broadcast(values, shape)
    total = _scatter(b, whole, axis, b.broadcast(index, shape), source, "sum", axes)
    return _joined(b, base, b.reshape(total, v.shape), "sum")


def _broadcast_shape(shapes: Sequence[Shape]) -> Shape | None:
    """The shape that all broadcast to; ``None`` where sizes are not known to agree."""
    rank = max(map(len, shapes))
    found: list[Dim] = []
    for dims in zip(*((1,) * (rank - len(s)) + tuple(s) for s in shapes), strict=True):
        sizes = {d for d in dims if d != 1} or {1}
        if len(sizes) > 1:
            return None
        found.append(sizes.pop())
    return tuple(found)


def _embedding_gradient(
    b: IrBuilder,
    v: Value,
    gradient: Value,
    indices: Value,
    words: Any,
    padding: Any,
    scale_by_frequency: bool,
) -> Value | None:
    if scale_by_frequency or indices.dtype not in INDICES:
        return None
    shape = gradient.shape
    index = b.broadcast(b.reshape(indices, (*indices.shape, 1)), shape)
    if isinstance(padding, int) and padding >= 0:
        place = b.fill(padding, shape, index.dtype)
        is_padding = b.pointwise("eq", index, place, dtype=torch.bool)
        gradient = b.pointwise("where", is_padding, b.fill(0.0, shape, gradient.dtype), gradient)
    axes = [None, len(shape) - 1]
    return b.cast(_scatter(b, v.shape, 0, index, gradient, "sum", axes), v.dtype)


def _scatter(
    b: IrBuilder,
    shape: Shape,
    axis: int,
    index: Value,
    source: Value,
    kind: str,
    axes: Sequence[int | None] | None = None,
) -> Value:
    """A float32 tensor of ``shape``. ``axes``: the axis of ``source`` along each of its own but ``axis``."""
    if axes is None:
        axes = [None if k == axis else k for k in range(len(shape))]
    source = b.cast(source, torch.float32)
    attrs: dict[str, Any] = {"axis": axis, "axes": tuple(axes), "kind": kind}
    return b.make("scatter", [index, source], shape, torch.float32, **attrs)


def _joined(b: IrBuilder, base: Value, total: Value, kind: str) -> Value:
    if kind == "sum" and base.op == "fill" and base.attrs["value"] == 0:
        return b.cast(total, base.dtype)
    return b.cast(b.pointwise(JOIN[kind], b.cast(base, torch.float32), total), base.dtype)


FORMS: dict[Any, Callable[..., Value | None]] = {
    aten.index_add.default: _index_add,
    aten.scatter_add.default: partial(_scatter_reduce, reduce="sum"),
    aten.scatter_reduce.two: _scatter_reduce,
    aten.index_put.default: _index_put,
    aten._unsafe_index_put.default: _index_put,
    aten._index_put_impl.default: _index_put,
    aten.embedding_dense_backward.default: _embedding_gradient,
}
