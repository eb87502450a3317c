# SPDX-License-Identifier: Apache-2.0
"""Resampling of images as gathers in one kernel: sixteen for cubic, four for linear interpolation.

ATen's bicubic kernel for GPUs has a thread per pixel, which walks through all channels: position embeddings of a few
hundred pixels leave nearly all of a GPU idle. Its bilinear one reads each pixel of channels-last images alone. Other
resampling is one call on channels-last data (``pooling``).

Source (formulas): Keys, "Cubic convolution interpolation for digital image processing", 1981, with a = -0.75, as torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import sympy
import torch

from blade.backends.disc.frontend.ops.reduction import wide
from blade.backends.disc.frontend.ops.table import Lowering, ResultType, lowers
from blade.backends.disc.ir.convolution import to_channels_first, to_channels_last
from blade.backends.disc.ir.graph import Value, contiguous_strides, numel

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
    _expect_images(lo, x, scales_h, scales_w)
    rows, columns = (
        _Taps.cubic(lo, axis, x.shape[axis], corners, scale)
        for axis, scale in ((2, scales_h), (3, scales_w))
    )
    flat = lo.b.reshape(x, (*x.shape[:2], numel(x.shape[2:])))
    return _resampled(lo, flat, rows, columns, x.shape[3], (0, 1, None))


def bilinear(
    lo: Lowering, x: Value, corners: bool, scales_h: float | None, scales_w: float | None
) -> Value | None:
    """Linear interpolation of ``x`` [batch, channels, height, width], in channels-last memory.

    ``None``: the target has no kernel for it.
    """
    if x.dtype not in lo.forms.bilinear:
        return None
    _expect_images(lo, x, scales_h, scales_w)
    if scales_h or scales_w:  # ATen copies images of the same size, whatever the scales
        resized = [sympy.Ne(a, b) for a, b in zip(x.shape[2:], lo.shape[2:], strict=True)]
        lo.b.require(sympy.Or(*resized), "resampling to another size")
    shape = tuple(lo.shape[k] for k in to_channels_last(4))
    last = replace(lo, results=(ResultType(shape, lo.dtype, contiguous_strides(shape)),))
    rows, columns = (
        _Taps.linear(last, axis, x.shape[axis + 1], corners, scale)
        for axis, scale in ((1, scales_h), (2, scales_w))
    )
    images = lo.b.permute(x, to_channels_last(4))
    flat = lo.b.reshape(images, (x.shape[0], numel(x.shape[2:]), x.shape[1]))
    made = _resampled(last, flat, rows, columns, x.shape[3], (0, None, 3))
    return lo.b.permute(made, to_channels_first(4))


def _expect_images(lo: Lowering, x: Value, *scales: float | None) -> None:
    """Floats of one batch of images, whose scales are known; all images have pixels."""
    known = all(s is None or isinstance(s, (int, float)) for s in scales)
    if not known or len(x.shape) != 4 or not x.dtype.is_floating_point:
        raise lo.otherwise()
    for axis in (2, 3):
        lo.at_least(x.shape[axis], 1, "resampling of at least one pixel")
        lo.at_least(lo.shape[axis], 1, "resampling to at least one pixel")


@dataclass(frozen=True)
class _Taps:
    """The pixels along one axis that each result reads, and their weights, at every point of the result."""

    places: Sequence[Value]
    weights: Sequence[Value]

    @classmethod
    def cubic(
        cls, lo: Lowering, axis: int, size: Any, corners: bool, scale: float | None
    ) -> "_Taps":
        b = lo.b
        first, after, last = _before(lo, _at(lo, axis, size, corners, scale), size)
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

    @classmethod
    def linear(
        cls, lo: Lowering, axis: int, size: Any, corners: bool, scale: float | None
    ) -> "_Taps":
        b, at = lo.b, _at(lo, axis, size, corners, scale)
        first, after, last = _before(lo, b.pointwise("maximum", at, lo.number(0, at)), size)
        places = [
            b.pointwise("minimum", place, last)
            for place in (first, b.pointwise("add", first, lo.number(1, first)))
        ]
        return cls(places, [b.pointwise("sub", lo.number(1, after), after), after])


def _at(lo: Lowering, axis: int, size: Any, corners: bool, scale: float | None) -> Value:
    """Where each point of the result lies along ``axis`` of the source, in pixels."""
    b = lo.b
    own = b.cast(b.make("iota", (), lo.shape, torch.int64, axis=axis), wide(lo.dtype))
    step = _step(lo, size, lo.shape[axis], corners, scale)
    if corners:
        return b.pointwise("mul", own, step)
    middle = b.pointwise("add", own, lo.number(0.5, own))  # centers of pixels
    return b.pointwise("sub", b.pointwise("mul", middle, step), lo.number(0.5, own))


def _before(lo: Lowering, at: Value, size: Any) -> tuple[Value, Value, Value]:
    """The pixel before ``at``, how far ``at`` lies after it, and the last of ``size`` pixels."""
    below = lo.b.pointwise("floor", at)
    first = lo.b.cast(below, torch.int64)
    return first, lo.b.pointwise("sub", at, below), lo.number(sympy.sympify(size) - 1, first)


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


def _resampled(
    lo: Lowering, flat: Value, rows: _Taps, columns: _Taps, width: Any, axes: tuple[int | None, ...]
) -> Value:
    """The weighted sum of the pixels at ``rows`` and ``columns``.

    ``flat``: images, ``width`` pixels a row, along the axis that is ``None`` in ``axes``; its others are the result's.
    """

    def pixel(row: Value, column: Value) -> Value:
        line = lo.b.pointwise("mul", row, lo.number(width, row))
        place, axis = lo.b.pointwise("add", line, column), axes.index(None)
        found = lo.b.make("gather", (flat, place), lo.shape, flat.dtype, axis=axis, axes=axes)
        return lo.b.cast(found, wide(lo.dtype))

    lines = [
        _weighted(lo, [pixel(row, column) for column in columns.places], columns)
        for row in rows.places
    ]
    return lo.b.cast(_weighted(lo, lines, rows), lo.dtype)


def _weighted(lo: Lowering, values: Sequence[Value], taps: _Taps) -> Value:
    """The sum of ``values`` times weights."""
    pairs = [lo.b.pointwise("mul", v, w) for v, w in zip(values, taps.weights, strict=True)]
    return reduce(lambda a, b: lo.b.pointwise("add", a, b), pairs)
