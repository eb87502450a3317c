# SPDX-License-Identifier: Apache-2.0
"""Rows of ops that select elements by an index tensor: `gather`, which kernels compute in place.

A kernel trusts its indices. So a check runs first, a reduction over the indices and an assertion: if an
index is out of bounds the engine raises, and the fallback then raises torch's error.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch

from blade.backends.disc.frontend.ops.table import (
    Lowering,
    OperandSlot,
    ResultType,
    lowers,
)
from blade.backends.disc.ir.graph import IrBuilder, Shape, Value, contiguous_strides, numel
from blade.backends.disc.ir.kernel import Dim

aten = torch.ops.aten
INDICES = (torch.int64, torch.int32)
_ASSERT = aten._functional_assert_async.msg


@lowers(aten.embedding.default)
def embedding(lo: Lowering, weight: Value, indices: Value, *_: Any, **__: Any) -> Value:
    return _select(lo, weight, 0, indices, wraps=False)


@lowers(aten.index_select.default)
def index_select(lo: Lowering, x: Value, dim: int, index: Value) -> Value:
    if not x.shape or len(index.shape) != 1:
        raise lo.otherwise()
    return _select(lo, x, dim % len(x.shape), index, wraps=False)


@lowers(aten.gather.default)
def gather(lo: Lowering, x: Value, dim: int, index: Value, sparse_grad: bool = False) -> Value:
    rank = len(x.shape)
    if not rank or len(index.shape) != rank:
        raise lo.otherwise()
    axis = dim % rank
    for k, (have, want) in enumerate(zip(x.shape, index.shape, strict=True)):
        if k != axis and have != want:
            lo.b.require(sympy.Le(want, have, evaluate=False), "gather within bounds")
    axes = tuple(None if k == axis else k for k in range(rank))
    return _gather(lo, x, axis, index, index, axes)


def index_along(lo: Lowering, x: Value, indices: Sequence[Value | None]) -> Value:
    """`x[:, i]` and `x[:, i, j]`: integer indices of adjacent axes, which may count from the end."""
    found = adjacent_indices(indices)
    if found is None:
        raise lo.otherwise()
    first, given = found
    if len(given) == 1:
        return _select(lo, x, first, given[0], wraps=True)
    rank, end = max(len(index.shape) for index in given), first + len(given)
    joined = join_indices(lo.b, x.shape[first:end], given, lo.shape[first : first + rank])
    flat = lo.b.reshape(x, joined_shape(x.shape, first, end))
    return _select(lo, flat, first, joined, wraps=False)


def adjacent_indices(indices: Sequence[Value | None]) -> tuple[int, list[Value]] | None:
    """The first axis of integer indices of adjacent axes, and the indices; ``None`` for any others."""
    axes = [axis for axis, index in enumerate(indices) if index is not None]
    given = [index for index in indices if index is not None]
    if not given or axes[-1] - axes[0] + 1 != len(given):
        return None
    return (axes[0], given) if all(index.dtype in INDICES for index in given) else None


def joined_shape(shape: Shape, first: int, end: int) -> Shape:
    """``shape`` with its axes from ``first`` up to ``end`` as one."""
    return (*shape[:first], numel(shape[first:end]), *shape[end:])


def join_indices(b: IrBuilder, sizes: Shape, indices: Sequence[Value], shape: Shape) -> Value:
    """One index, of ``shape``, into all elements of axes of ``sizes``.

    ``indices`` may count from the end. Where one is out of bounds, so is the result.
    """
    place = inside = None
    for size, given in zip(sizes, indices, strict=True):
        index = _from_start(b, b.broadcast(b.cast(given, torch.int64), shape), size)
        fits = _is_within(b, index, 0, size)
        if place is None or inside is None:
            place, inside = index, fits
        else:
            rows = b.pointwise("mul", place, b.fill(size, shape, torch.int64))
            place = b.pointwise("add", rows, index)
            inside = b.pointwise("bitwise_and", inside, fits)
    assert place is not None and inside is not None, sizes
    return b.pointwise("where", inside, place, b.fill(numel(sizes), shape, torch.int64))


def _from_start(b: IrBuilder, index: Value, size: Dim) -> Value:
    """``index`` along an axis of ``size``, counted from the start where it counts from the end."""
    zero, end = (b.fill(n, index.shape, index.dtype) for n in (0, size))
    below = b.pointwise("lt", index, zero, dtype=torch.bool)
    return b.pointwise("where", below, b.pointwise("add", index, end), index)


def _is_within(b: IrBuilder, index: Value, low: Any, high: Dim) -> Value:
    """Whether ``low <= index < high``."""
    least, end = (b.fill(n, index.shape, index.dtype) for n in (low, high))
    above = b.pointwise("ge", index, least, dtype=torch.bool)
    return b.pointwise("bitwise_and", above, b.pointwise("lt", index, end, dtype=torch.bool))


def _select(lo: Lowering, x: Value, axis: int, index: Value, wraps: bool) -> Value:
    """Select along ``axis``; result axes: those of ``x`` before ``axis``, the index's, those after."""
    rank = len(index.shape)
    axes = tuple(
        None if k == axis else k if k < axis else k - 1 + rank for k in range(len(x.shape))
    )
    if index.op == "fill":
        return _one(lo, x, axis, int(index.attrs["value"]), axes)
    found = _from_start(lo.b, index, x.shape[axis]) if wraps else index
    places = tuple(range(axis, axis + rank))
    whole = lo.b.make("broadcast", (found,), lo.shape, index.dtype, axes=places)
    return _gather(lo, x, axis, index, whole, axes, wraps)


def _gather(
    lo: Lowering,
    x: Value,
    axis: int,
    index: Value,
    whole: Value,
    axes: tuple[int | None, ...],
    wraps: bool = False,
) -> Value:
    """A checked `gather`. ``whole``: ``index`` at every point of the result."""
    if x.dtype.is_complex or index.dtype not in INDICES:
        raise lo.otherwise()
    low = -sympy.sympify(x.shape[axis]) if wraps else 0
    check = _check(lo, index, low, x.shape[axis])
    args = (x, whole) if check is None else (x, whole, check)
    return lo.b.make("gather", args, lo.shape, lo.dtype, axis=axis, axes=axes)


def select_with_check(
    lo: Lowering, x: Value, axis: int, index: Value, axes: tuple[int | None, ...]
) -> Value:
    """Element ``index`` along ``axis`` of ``x``; its other axes k are the index's axes[k].

    Raises at run time for an index out of bounds.
    """
    result = ResultType(index.shape, x.dtype, contiguous_strides(index.shape))
    return _gather(replace(lo, results=(result,)), x, axis, index, index, axes)


def _one(lo: Lowering, x: Value, axis: int, index: int, axes: tuple[int | None, ...]) -> Value:
    """The same index everywhere: a slice, broadcast."""
    size = x.shape[axis]
    if isinstance(size, int) and not -size <= index < size:
        raise lo.otherwise()
    if index < 0 or not isinstance(size, int):
        raise lo.otherwise()
    one = lo.b.slice(x, axis, index, 1, 1)
    core = lo.b.reshape(one, [d for k, d in enumerate(x.shape) if k != axis])
    places = tuple(a for a in axes if a is not None)
    return lo.b.make("broadcast", (core,), lo.shape, lo.dtype, axes=places)


def _check(lo: Lowering, index: Value, low: Any, high: Dim) -> Value | None:
    """A value that exists once ``low <= index < high`` has been checked; ``None`` if known to hold."""
    index = lo.b.reshape(index, (numel(index.shape),))  # one row: one kernel compares and reduces
    inside = _is_within(lo.b, index, low, high)
    if inside.op == "fill" and inside.attrs["value"]:
        return None
    fine = lo.b.reshape(lo.b.reduce("all", inside, (0,)), ())
    return lo.b.make(
        "call",
        (fine, fine),
        (),
        torch.bool,
        (),
        target=_ASSERT,
        template=(OperandSlot(0), "index_out_of_range", OperandSlot(1)),
    )
