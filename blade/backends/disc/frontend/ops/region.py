# SPDX-License-Identifier: Apache-2.0
"""Rows of ops that put a tensor into a part of another: gradients of slices, and functional slice writes.

The part and the rest (zeros or the other tensor) are concatenated: every element is written once, and the
kernel that computes the part stores it in place.
"""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import sympy
import torch

from blade.backends.disc.frontend.ops.layout import clamped
from blade.backends.disc.frontend.ops.table import Lowering, lowers
from blade.backends.disc.ir.graph import Value, plain
from blade.backends.disc.ir.kernel import Dim

aten = torch.ops.aten

_MOST_PARTS = 128


def _placed(lo: Lowering, part: Value, axis: int, start: Dim, around: Value) -> Value:
    """``around`` with ``part`` in place of its elements from ``start`` along ``axis``."""
    length = part.shape[axis]
    end = plain(sympy.sympify(start) + length)
    rest = plain(sympy.sympify(around.shape[axis]) - end)
    pieces = [
        *_parts(lo, around, axis, 0, start),
        part,
        *_parts(lo, around, axis, end, rest),
    ]
    pieces = [p for p in pieces if p.shape[axis] != 0]
    if not pieces:
        return around
    if len(pieces) == 1:
        return pieces[0]
    return lo.b.make("concat", pieces, around.shape, part.dtype, axis=axis)


def _parts(lo: Lowering, x: Value, axis: int, start: Dim, size: Dim) -> list[Value]:
    """The elements ``start`` .. ``start + size`` along ``axis``: operands of ``x`` if it is a concatenation.

    So the writes to one place after another are one concatenation, and what is overwritten is not computed.
    """
    whole = [lo.b.slice(x, axis, start, 1, size)]
    if x.op != "concat" or x.attrs["axis"] != axis or len(x.args) > _MOST_PARTS:
        return whole
    end = plain(sympy.sympify(start) + size)
    to_end = end == x.shape[axis]
    known = (start, *(a.shape[axis] for a in x.args[:-1]), *(() if to_end else (size,)))
    if not all(isinstance(n, int) for n in known):
        return whole
    return list(_between(lo, x, axis, int(start), None if to_end else int(end)))


def _between(lo: Lowering, x: Value, axis: int, start: int, end: int | None) -> Iterator[Value]:
    """The parts of a concatenation's operands from ``start`` to ``end``; the last one's size may be unknown."""
    offset = 0
    for part in x.args:
        length = part.shape[axis]
        first = max(start - offset, 0)
        last: Dim = length if end is None else end - offset
        if isinstance(length, int):
            last = min(int(last), length)
            offset += length
        size = plain(sympy.sympify(last) - first)
        if not isinstance(size, int) or size > 0:
            yield lo.b.slice(part, axis, first, 1, size)


def _zeros(lo: Lowering) -> Value:
    return lo.b.fill(0, lo.shape, lo.dtype)


@lowers(aten.slice_backward.default)
def slice_backward(
    lo: Lowering,
    grad: Value,
    sizes: Sequence[Any],
    dim: int,
    start: Any,
    end: Any,
    step: int,
) -> Value:
    return _into_slice(lo, _zeros(lo), grad, dim, start, end, step)


@lowers(aten.slice_scatter.default)
def slice_scatter(
    lo: Lowering,
    x: Value,
    source: Value,
    dim: int = 0,
    start: Any = None,
    end: Any = None,
    step: int = 1,
) -> Value:
    return _into_slice(lo, x, lo.b.cast(source, lo.dtype), dim, start, end, step)


def _into_slice(
    lo: Lowering, around: Value, part: Value, dim: int, start: Any, end: Any, step: int
) -> Value:
    if step != 1:
        raise lo.otherwise()
    axis = dim % len(lo.shape)
    size = lo.shape[axis]
    first = clamped(start if start is not None else 0, size)
    last = size if end is None or end == sys.maxsize else clamped(end, size)
    length = sympy.Max(0, sympy.sympify(last) - sympy.sympify(first))
    _require_shape(
        lo, part, tuple(plain(length) if k == axis else d for k, d in enumerate(lo.shape))
    )
    lo.at_least(part.shape[axis], 0, "slice within bounds")
    return _placed(lo, part, axis, first, around)


def _require_shape(lo: Lowering, part: Value, shape: Sequence[Dim]) -> None:
    """Rely on ``part`` having the size of its region; torch raises otherwise, a kernel would overrun it."""
    if len(part.shape) != len(shape):
        raise lo.otherwise()
    for mine, place in zip(part.shape, shape, strict=True):
        if mine == place:
            continue
        if isinstance(mine, int) and isinstance(place, int):
            raise lo.otherwise()
        lo.b.require(sympy.Eq(mine, place, evaluate=False), "the part is as large as its place")


@lowers(aten.select_backward.default)
def select_backward(lo: Lowering, grad: Value, sizes: Sequence[Any], dim: int, index: Any) -> Value:
    return _into_place(lo, _zeros(lo), grad, dim, index)


@lowers(aten.select_scatter.default)
def select_scatter(lo: Lowering, x: Value, source: Value, dim: int, index: Any) -> Value:
    return _into_place(lo, x, lo.b.cast(source, lo.dtype), dim, index)


def _into_place(lo: Lowering, around: Value, part: Value, dim: int, index: Any) -> Value:
    if not isinstance(index, int):
        raise lo.otherwise()
    axis = dim % len(lo.shape)
    size = lo.shape[axis]
    lo.at_least(size, index + 1 if index >= 0 else -index, "index within bounds")
    first = index if index >= 0 else plain(sympy.sympify(size) + index)
    _require_shape(lo, part, tuple(d for k, d in enumerate(lo.shape) if k != axis))
    shape = tuple(1 if k == axis else d for k, d in enumerate(lo.shape))
    return _placed(lo, lo.b.reshape(part, shape), axis, first, around)
