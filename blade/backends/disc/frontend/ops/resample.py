# SPDX-License-Identifier: Apache-2.0
"""Rows of cubic resampling of images: sixteen gathers in one kernel.

Other resampling is one call on channels-last data (``pooling``). ATen's bicubic kernel for GPUs has a thread per pixel,
which walks through all channels: position embeddings of a few hundred pixels leave nearly all of a GPU idle.

Source (formulas): Keys, "Cubic convolution interpolation for digital image processing", 1981, with a = -0.75, as torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import sympy
import torch

from blade.backends.disc.frontend.ops.reduction import wide
from blade.backends.disc.frontend.ops.table import Lowering, lowers
from blade.backends.disc.ir.graph import Value, numel

aten = torch.ops.aten
_A = -0.75
_TAPS = (-1, 0, 1, 2)


@lowers(aten.upsample_bicubic2d.vec)
def upsample_bicubic2d(lo: Lowering, x: Value, size: Any, corners: bool, scales: Any) -> Value:
    return upsample_bicubic2d_scaled(lo, x, size, corners, *(scales or (None, None)))


@lowers(aten.upsample_bicubic2d.default)
def upsample_bicubic2d_scaled(
    lo: Lowering,
    x: Value,
    size: Any,
    corners: bool,
    scales_h: float | None = None,
    scales_w: float | None = None,
) -> Value:
    known = all(s is None or isinstance(s, (int, float)) for s in (scales_h, scales_w))
    if not known or len(x.shape) != 4 or not x.dtype.is_floating_point:
        raise lo.otherwise()
    for axis in (2, 3):
        lo.at_least(x.shape[axis], 1, "resampling of at least one pixel")
        lo.at_least(lo.shape[axis], 1, "resampling to at least one pixel")
    rows, columns = (
        _Taps.along(lo, axis, x.shape[axis], corners, scale)
        for axis, scale in ((2, scales_h), (3, scales_w))
    )
    flat = lo.b.reshape(x, (*x.shape[:2], numel(x.shape[2:])))
    lines = [
        _weighted(lo, [_pixel(lo, flat, row, column, x) for column in columns.places], columns)
        for row in rows.places
    ]
    return lo.b.cast(_weighted(lo, lines, rows), lo.dtype)


@dataclass(frozen=True)
class _Taps:
    """The pixels along one axis that each result reads, and their weights, at every point of the result."""

    places: Sequence[Value]
    weights: Sequence[Value]

    @classmethod
    def along(
        cls, lo: Lowering, axis: int, size: Any, corners: bool, scale: float | None
    ) -> "_Taps":
        b, dtype = lo.b, wide(lo.dtype)
        own = b.make("iota", (), lo.shape, torch.int64, axis=axis)
        at, step = b.cast(own, dtype), _step(lo, size, lo.shape[axis], corners, scale)
        if corners:
            at = b.pointwise("mul", at, step)
        else:  # centers of pixels
            middle = b.pointwise("add", at, lo.number(0.5, at))
            at = b.pointwise("sub", b.pointwise("mul", middle, step), lo.number(0.5, at))
        below = b.pointwise("floor", at)
        after = b.pointwise("sub", at, below)
        first, last = b.cast(below, torch.int64), lo.number(sympy.sympify(size) - 1, own)
        places = []
        for tap in _TAPS:
            place = b.pointwise("add", first, lo.number(tap, first))
            place = b.pointwise("maximum", place, lo.number(0, place))
            places.append(b.pointwise("minimum", place, last))
        before = b.pointwise("sub", lo.number(1, after), after)
        distances = (
            b.pointwise("add", after, lo.number(1, after)),
            after,
            before,
            b.pointwise("add", before, lo.number(1, before)),
        )
        factors = ((_A + 2, -(_A + 3), 0, 1), (_A, -5 * _A, 8 * _A, -4 * _A))
        weights = [_polynomial(lo, d, factors[k in (0, 3)]) for k, d in enumerate(distances)]
        return cls(places, weights)


def _step(lo: Lowering, size: Any, out: Any, corners: bool, scale: float | None) -> Value:
    """The distance between neighbours of the result, in pixels of the source."""
    dtype = wide(lo.dtype)
    if corners:
        wider = sympy.Max(sympy.sympify(out) - 1, 1)
        return lo.b.cast(lo.real((sympy.sympify(size) - 1) / wider, lo.shape), dtype)
    if scale:
        return lo.b.fill(1.0 / scale, lo.shape, dtype)
    return lo.b.cast(lo.real(sympy.sympify(size) / sympy.sympify(out), lo.shape), dtype)


def _polynomial(lo: Lowering, x: Value, factors: Sequence[float]) -> Value:
    """The sum of ``factors``, the highest first, times powers of ``x``."""
    found = lo.number(factors[0], x)
    for factor in factors[1:]:
        found = lo.b.pointwise("fma", found, x, lo.number(factor, x))
    return found


def _pixel(lo: Lowering, flat: Value, row: Value, column: Value, x: Value) -> Value:
    """The pixels at ``row`` and ``column``, which are within the image."""
    width = lo.number(x.shape[3], row)
    place = lo.b.pointwise("add", lo.b.pointwise("mul", row, width), column)
    found = lo.b.make("gather", (flat, place), lo.shape, x.dtype, axis=2, axes=(0, 1, None))
    return lo.b.cast(found, wide(lo.dtype))


def _weighted(lo: Lowering, values: Sequence[Value], taps: _Taps) -> Value:
    """The sum of ``values`` times weights."""
    pairs = [lo.b.pointwise("mul", v, w) for v, w in zip(values, taps.weights, strict=True)]
    return reduce(lambda a, b: lo.b.pointwise("add", a, b), pairs)
