# SPDX-License-Identifier: Apache-2.0
"""Rows of pooling and resampling of images: `spatial` on channels-last data, between two permutations.

Averages over whole images are reductions, and upsampling by integer factors is layout. For the rest, ATen
has kernels for channels-last memory.
"""

from collections.abc import Sequence
from typing import Any

import sympy
import torch

from blade.backends.disc.frontend.ops.reduction import sum_by_axis
from blade.backends.disc.frontend.ops.resample import bilinear
from blade.backends.disc.frontend.ops.table import Lowering, OperandSlot, lowers
from blade.backends.disc.ir.convolution import to_channels_first, to_channels_last
from blade.backends.disc.ir.graph import Value, numel
from blade.backends.disc.ir.views import equal

aten = torch.ops.aten


@lowers(aten.max_pool2d.default)
def max_pool2d(
    lo: Lowering,
    x: Value,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> Value:
    args = (kernel, stride, padding, dilation, ceil_mode)
    return _spatial(lo, aten.max_pool2d.default, x, args)


@lowers(aten.avg_pool2d.default)
def avg_pool2d(
    lo: Lowering,
    x: Value,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Value:
    args = (kernel, stride, padding, ceil_mode, count_include_pad, divisor_override)
    return _spatial(lo, aten.avg_pool2d.default, x, args)


@lowers(
    aten.adaptive_avg_pool1d.default,
    aten.adaptive_avg_pool2d.default,
    aten._adaptive_avg_pool2d.default,
    aten.adaptive_avg_pool3d.default,
)
def adaptive_avg_pool(lo: Lowering, x: Value, size: Any) -> Value:
    """Pooling to one pixel is the mean: NaN for empty images."""
    sizes = list(size) if isinstance(size, (list, tuple)) else [size]
    if x.dtype not in (torch.float32, torch.float64):
        raise lo.otherwise()
    axes = tuple(range(len(x.shape) - len(sizes), len(x.shape)))
    if any(s != 1 for s in sizes):
        if len(sizes) != 2:
            raise lo.otherwise()
        return _spatial(lo, aten.adaptive_avg_pool2d.default, x, (size,))
    total = sum_by_axis(lo, x, axes)
    count = lo.number(numel([x.shape[a] for a in axes]), total)
    return lo.b.pointwise("div", total, count)


@lowers(aten.upsample_nearest2d.vec)
def upsample_nearest2d(lo: Lowering, x: Value, size: Any, scales: Any) -> Value:
    return _nearest(lo, x) or _spatial(lo, aten.upsample_nearest2d.vec, x, (size, scales))


@lowers(aten.upsample_nearest2d.default)
def upsample_nearest2d_scaled(
    lo: Lowering, x: Value, size: Any, scales_h: float | None = None, scales_w: float | None = None
) -> Value:
    args = (size, scales_h, scales_w)
    return _nearest(lo, x) or _spatial(lo, aten.upsample_nearest2d.default, x, args)


@lowers(aten.upsample_bilinear2d.vec)
def upsample_bilinear2d(lo: Lowering, x: Value, size: Any, corners: bool, scales: Any) -> Value:
    made = bilinear(lo, x, corners, *(scales or (None, None)))
    return made or _spatial(lo, aten.upsample_bilinear2d.vec, x, (size, corners, scales))


@lowers(aten.upsample_bilinear2d.default)
def upsample_bilinear2d_scaled(
    lo: Lowering,
    x: Value,
    size: Any,
    corners: bool,
    scales_h: float | None = None,
    scales_w: float | None = None,
) -> Value:
    args = (size, corners, scales_h, scales_w)
    made = bilinear(lo, x, corners, scales_h, scales_w)
    return made or _spatial(lo, aten.upsample_bilinear2d.default, x, args)


def _spatial(lo: Lowering, target: torch._ops.OpOverload, x: Value, args: Sequence[Any]) -> Value:
    """``target`` on one batch of images and plain arguments, in channels-last memory."""
    known = (torch.float32, torch.float64, *lo.forms.convolution)
    if len(x.shape) != 4 or x.dtype not in known:
        raise lo.otherwise()
    order = to_channels_last(4)
    types = [str(a.type) for a in target._schema.arguments[1:]]
    template = (OperandSlot(0), *(_argument(a, t) for a, t in zip(args, types, strict=True)))
    last = lo.b.make(
        "spatial",
        [lo.b.permute(x, order)],
        [lo.shape[k] for k in order],
        lo.dtype,
        target=target,
        template=template,
    )
    return lo.b.permute(last, to_channels_first(4))


def _argument(given: Any, kind: str) -> Any:
    """A plain argument of schema type ``kind``; a single number applies to both axes."""
    if isinstance(given, (list, tuple)):
        return tuple(given)
    return (given, given) if given is not None and "List" in kind else given


def _nearest(lo: Lowering, x: Value) -> Value | None:
    """Every pixel repeated along height and width, if both grow by integer factors."""
    if len(x.shape) != 4:
        return None
    factors = [factor(a, b) for a, b in zip(x.shape[2:], lo.shape[2:], strict=True)]
    if any(f is None for f in factors):
        return None
    for size in x.shape[1:]:
        lo.at_least(size, 1, "pixels to repeat")
    batch, channels, height, width = x.shape
    wide = (batch, channels, height, factors[0], width, factors[1])
    repeated = lo.b.make("broadcast", (x,), wide, x.dtype, axes=(0, 1, 2, 4))
    return lo.b.reshape(repeated, lo.shape)


def factor(size: Any, wide: Any) -> int | None:
    """The integer f up to 8 with ``wide == f * size``, if known."""
    return next((f for f in range(1, 9) if equal(f * sympy.sympify(size), wide)), None)
