# SPDX-License-Identifier: Apache-2.0
"""Rows of pooling in training, on channels-last images of a GPU.

Maxima of windows that do not overlap are computed from their pixels, with what makes these. A gradient reads, for each
pixel, the windows around it: of maximum pooling those that found their maximum there, of average pooling all.
Other targets have ATen's kernels.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, TypeVar

import sympy
import torch

from blade.backends.disc.frontend.ops.convolution import each
from blade.backends.disc.frontend.ops.convolution_backward import as_images_lie, total
from blade.backends.disc.frontend.ops.table import Lowering, lowers
from blade.backends.disc.ir.convolution import to_channels_first, to_channels_last
from blade.backends.disc.ir.graph import Shape, Value, numel, plain

aten = torch.ops.aten
_LAST, _FIRST = to_channels_last(4), to_channels_first(4)
_MOST_TAPS = 16
_PLACE = torch.int32  # of a pixel in an image
Around = TypeVar("Around")


@dataclass(frozen=True)
class _Windows:
    """Windows along one axis."""

    size: int
    step: int
    padding: int

    @property
    def reach(self) -> int:
        """The most windows that one pixel is in."""
        return -(-self.size // self.step)


@lowers(aten.max_pool2d_with_indices.default)
def max_pool2d_with_indices(
    lo: Lowering,
    x: Value,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> list[Value]:
    rows, columns = _windows(lo, x, kernel, stride, padding, dilation)
    apart = all(w.size == w.step and w.padding == 0 for w in (rows, columns))
    if not apart or ceil_mode or rows.size * columns.size > _MOST_TAPS:
        sizes, steps, pads = zip(
            *((w.size, w.step, w.padding) for w in (rows, columns)), strict=True
        )
        given = (x, sizes, steps, pads, (1, 1), ceil_mode)
        called = lo.call(aten.max_pool2d_with_indices.default, given)
        return [as_images_lie(lo, one) for one in called]
    for size, window in zip(x.shape[2:], (rows, columns), strict=True):
        lo.at_least(size, window.size, "a window no larger than the image")
    return _maxima(lo, x, rows, columns)


def _maxima(lo: Lowering, x: Value, rows: _Windows, columns: _Windows) -> list[Value]:
    """The maxima of windows side by side and where they lie: the first of equal ones, the last NaN."""
    b, image = lo.b, lo.b.permute(x, _LAST)
    _, height, width, _ = shape = tuple(lo.results[0].shape[k] for k in _LAST)
    corner = _pixel(lo, shape, rows.size, columns.size, x.shape[3])
    best = place = None
    for i, j in product(range(rows.size), range(columns.size)):
        part = b.slice(b.slice(image, 1, i, rows.size, height), 2, j, columns.size, width)
        ahead = plain(i * sympy.sympify(x.shape[3]) + j)
        here = b.pointwise("add", corner, lo.number(ahead, corner))
        if best is None or place is None:
            best, place = part, here
            continue
        is_nan, is_more = _flag(lo, "ne", part, part), _flag(lo, "gt", part, best)
        taken = _flag(lo, "logical_or", is_more, is_nan)
        best = b.pointwise("where", taken, part, best)
        place = b.pointwise("where", taken, here, place)
    assert best is not None and place is not None
    return [b.permute(v, _FIRST) for v in (best, b.cast(place, torch.int64))]


@lowers(aten.max_pool2d_with_indices_backward.default)
def max_pool2d_with_indices_backward(
    lo: Lowering,
    grad: Value,
    x: Value,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Any,
    dilation: Any,
    ceil_mode: bool,
    indices: Value,
) -> Value:
    """The sum of the gradients of the windows whose maximum a pixel is."""
    windows = _windows(lo, x, kernel, stride, padding, dilation)
    shape = tuple(x.shape[k] for k in _LAST)
    around = _all_around(lo, shape, windows, grad, _window_around)
    place = _pixel(lo, shape, 1, 1, shape[2])
    flat = [_flattened(lo, v) for v in (indices, grad)]
    read = partial(_gathered, lo, shape, grad.shape[3])
    parts = []
    for row, column in around:
        found, gradient = (read(v, row[0], column[0]) for v in flat)
        is_it = _flag(lo, "eq", lo.b.cast(found, _PLACE), place)
        known = _flag(lo, "logical_and", _flag(lo, "logical_and", row[1], column[1]), is_it)
        parts.append(lo.b.pointwise("where", known, gradient, lo.number(0, gradient)))
    return lo.b.permute(total(lo, parts), _FIRST)


@lowers(aten.avg_pool2d_backward.default)
def avg_pool2d_backward(
    lo: Lowering,
    grad: Value,
    x: Value,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Any,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None = None,
) -> Value:
    """The sum of the gradients of the windows that a pixel is in, each over the number of its pixels.

    ATen's kernel for CUDA took padded windows for others where images have channels last, in torch 2.11 still
    (https://github.com/pytorch/pytorch/issues/188344).
    """
    windows = _windows(lo, x, kernel, stride, padding, 1, single=True)
    if ceil_mode:
        raise lo.otherwise()
    shape = tuple(x.shape[k] for k in _LAST)
    around = _all_around(lo, shape, windows, grad, _share_around)
    counts_all = count_include_pad or all(w.padding == 0 for w in windows)
    whole = divisor_override or (math.prod(w.size for w in windows) if counts_all else None)
    flat = _flattened(lo, grad)
    parts = []
    for row, column in around:
        gradient = lo.b.cast(
            _gathered(lo, shape, grad.shape[3], flat, row.window, column.window), torch.float32
        )
        pixels = lo.b.cast(lo.b.pointwise("mul", row.pixels, column.pixels), gradient.dtype)
        share = lo.b.pointwise("div", gradient, lo.number(whole, gradient) if whole else pixels)
        known = _flag(lo, "logical_and", row.is_around, column.is_around)
        parts.append(lo.b.pointwise("where", known, share, lo.number(0, share)))
    return lo.b.permute(lo.b.cast(total(lo, parts), x.dtype), _FIRST)


def _all_around(
    lo: Lowering, shape: Shape, windows: Sequence[_Windows], grad: Value, one: Callable[..., Around]
) -> list[tuple[Around, Around]]:
    """What ``one`` says of each window around every pixel, along rows and along columns."""
    if math.prod(w.reach for w in windows) > _MOST_TAPS:
        raise lo.otherwise()
    rows, columns = (
        [one(lo, shape, axis, w, before, grad.shape[axis + 1]) for before in range(w.reach)]
        for axis, w in enumerate(windows, 1)
    )
    return list(product(rows, columns))


@dataclass(frozen=True)
class _Share:
    """Along one axis, of each pixel: a window, whether the pixel is in it, and how many pixels of the image are."""

    window: Value
    is_around: Value
    pixels: Value


def _share_around(
    lo: Lowering, shape: Shape, axis: int, windows: _Windows, before: int, count: Any
) -> _Share:
    """The window that begins ``before`` steps ahead of the last around each pixel."""
    b, pixel = lo.b, _along(lo, shape, axis)
    window, exists = _window_around(lo, shape, axis, windows, before, count)
    start = b.pointwise("sub", _scaled(lo, window, windows.step), lo.number(windows.padding, pixel))
    end = b.pointwise("add", start, lo.number(windows.size, start))
    first = b.pointwise("maximum", start, lo.number(0, start))
    last = b.pointwise("minimum", end, lo.number(sympy.sympify(shape[axis]), end))
    is_around = _flag(lo, "logical_and", exists, _flag(lo, "lt", pixel, end))
    return _Share(window, is_around, b.pointwise("sub", last, first))


def _windows(
    lo: Lowering,
    x: Value,
    kernel: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    single: bool = False,
) -> tuple[_Windows, _Windows]:
    """The windows along rows and columns of a batch of images; ``single``: of float32, too."""
    dtypes = lo.forms.image_gradients
    if dtypes and single:
        dtypes = (torch.float32, *dtypes)
    if x.dtype not in dtypes or len(x.shape) != 4:
        raise lo.otherwise()
    sizes, steps, pads, gaps = (
        each(lo, v, 2) for v in (kernel, stride or kernel, padding, dilation)
    )
    if gaps != (1, 1):
        raise lo.otherwise()
    found = [_Windows(*given) for given in zip(sizes, steps, pads, strict=True)]
    return found[0], found[1]


def _pixel(lo: Lowering, shape: Shape, down: int, across: int, width: Any) -> Value:
    """The number of the pixel at every point [N, row * down, column * across, C] of an image so wide."""
    row, column = (_scaled(lo, _along(lo, shape, k), n) for k, n in ((1, down), (2, across)))
    return lo.b.pointwise("add", _scaled(lo, row, width), column)


def _scaled(lo: Lowering, value: Value, by: Any) -> Value:
    return lo.b.pointwise("mul", value, lo.number(by, value))


def _along(lo: Lowering, shape: Shape, axis: int) -> Value:
    return lo.b.make("iota", (), shape, _PLACE, axis=axis)


def _window_around(
    lo: Lowering, shape: Shape, axis: int, windows: _Windows, before: int, count: Any
) -> tuple[Value, Value]:
    """Of each pixel, the window that begins ``before`` steps ahead of the last around it, and whether there is one."""
    b, pixel = lo.b, _along(lo, shape, axis)
    padded = b.pointwise("add", pixel, lo.number(windows.padding, pixel))
    last = b.pointwise("div_floor", padded, lo.number(windows.step, pixel))
    one = b.pointwise("sub", last, lo.number(before, pixel))
    zero, end = lo.number(0, one), lo.number(sympy.sympify(count) - 1, one)
    inside = b.pointwise("minimum", b.pointwise("maximum", one, zero), end)
    return inside, _flag(lo, "eq", inside, one)


def _flag(lo: Lowering, op: str, *operands: Value) -> Value:
    return lo.b.pointwise(op, *operands, dtype=torch.bool)


def _flattened(lo: Lowering, value: Value) -> Value:
    """[N, C, H, W] as [N, H * W, C]."""
    n, c, h, w = value.shape
    return lo.b.reshape(lo.b.permute(value, _LAST), (n, numel((h, w)), c))


def _gathered(
    lo: Lowering, shape: Shape, width: Any, flat: Value, row: Value, column: Value
) -> Value:
    place = lo.b.pointwise("add", _scaled(lo, row, width), column)
    return lo.b.make("gather", (flat, place), shape, flat.dtype, axis=1, axes=(0, None, 3))
