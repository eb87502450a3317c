# SPDX-License-Identifier: Apache-2.0
"""Rows of views that stride through axes in ways that no slice does: windows, diagonals, strides."""

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv

from blade.backends.disc.frontend.ops.assemble import constant_pad
from blade.backends.disc.frontend.ops.table import Lowering, lowers
from blade.backends.disc.ir.graph import (
    Value,
    contiguous_strides,
    numel,
    plain,
)
from blade.backends.disc.ir.kernel import Dim
from blade.core.reason import Code
from blade.errors import Refused

aten = torch.ops.aten
Walk = tuple[tuple[int, Dim], ...]


def _window(lo: Lowering, x: Value, starts: Sequence[Dim], walks: Sequence[Walk]) -> Value:
    return lo.b.make(
        "window", (x,), lo.shape, lo.dtype, starts=tuple(starts), walks=tuple(map(tuple, walks))
    )


@lowers(aten.unfold.default)
def unfold(lo: Lowering, x: Value, dimension: int, size: Any, step: Any) -> Value:
    rank = len(x.shape)
    if not rank:
        return lo.b.reshape(x, lo.shape)
    axis = dimension % rank
    if not isinstance(x.shape[axis], int) or not isinstance(size, int):
        lo.b.require(sympy.Ge(x.shape[axis], size, evaluate=False), "a window within the axis")
    walks = [((k, step if k == axis else 1),) for k in range(rank)]
    return _window(lo, x, (0,) * rank, [*walks, ((axis, 1),)])


@lowers(aten.im2col.default)
def im2col(
    lo: Lowering,
    x: Value,
    kernel: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Value:
    """The columns of windows of images with a border of zeros, channels and taps before places."""
    (rows, columns), (down, across) = kernel, padding
    if not all(isinstance(n, int) for n in (*kernel, *dilation, *padding, *stride)):
        raise lo.otherwise()
    image = x.shape[-3:]
    x = lo.b.reshape(x, (numel(x.shape[:-3]), *image))
    places: list[Dim] = []
    for size, taps, step, edge, by in zip(
        image[1:], kernel, dilation, padding, stride, strict=True
    ):
        room = sympy.sympify(size) + 2 * edge - step * (taps - 1) - 1
        lo.b.require(sympy.Ge(room, 0, evaluate=False), "a window within the image")
        places.append(plain(FloorDiv(room, by) + 1))
    x = constant_pad(lo, x, (across, across, down, down))
    shape = (x.shape[0], image[0], rows, columns, *places)
    walks = [((0, 1),), ((1, 1),)]
    walks += [((axis, step),) for axis, step in zip((2, 3), dilation, strict=True)]
    walks += [((axis, step),) for axis, step in zip((2, 3), stride, strict=True)]
    made = lo.b.make("window", (x,), shape, lo.dtype, starts=(0, 0, 0, 0), walks=tuple(walks))
    return lo.b.reshape(made, lo.shape)


@lowers(aten.diagonal.default, aten.diagonal_copy.default)
def diagonal(lo: Lowering, x: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    rank = len(x.shape)
    first, second = dim1 % rank, dim2 % rank
    starts: list[Dim] = [0] * rank
    axis = second if offset >= 0 else first
    starts[axis] = plain(sympy.Min(abs(offset), x.shape[axis]))
    lo.at_least(lo.shape[-1], 0, "a diagonal within the matrix")
    walks: list[Walk] = [((k, 1),) for k in range(rank) if k not in (first, second)]
    return _window(lo, x, starts, [*walks, ((first, 1), (second, 1))])


@lowers(aten.linalg_diagonal.default)
def linalg_diagonal(
    lo: Lowering, x: Value, *, offset: int = 0, dim1: int = -2, dim2: int = -1
) -> Value:
    return diagonal(lo, x, offset, dim1, dim2)


@lowers(aten.as_strided.default, aten.as_strided_copy.default)
def as_strided(
    lo: Lowering, x: Value, size: Sequence[Any], stride: Sequence[Any], storage_offset: Any = None
) -> Value:
    """Strides over the memory of ``x``; refused unless ``x`` was computed here and is row-major."""
    computed = x.op not in ("input", "const") and not x.is_layout
    if not computed or x.strides not in (None, contiguous_strides(x.shape)):
        detail = "as_strided reads memory whose layout is the caller's."
        raise Refused(Code.UNSUPPORTED_OP, detail)
    start = storage_offset or 0
    last: Any = sympy.sympify(start)
    for d, s in zip(size, stride, strict=True):
        lo.at_least(d, 1, "strides over elements")
        last = last + (sympy.sympify(d) - 1) * s
    within = sympy.Lt(last, numel(x.shape), evaluate=False)
    if not isinstance(plain(last), int) or not isinstance(numel(x.shape), int):
        lo.b.require(within, "strides within the tensor")
    flat = lo.b.reshape(x, (numel(x.shape),))
    return _window(lo, flat, (plain(start),), [((0, plain(s)),) for s in stride])
