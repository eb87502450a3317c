# SPDX-License-Identifier: Apache-2.0
"""Rows of gradients of convolutions and of resampling.

The gradient with respect to the input is a convolution. The one with respect to the weight is a matrix
product if the convolution covers all pixels and channels, and the one with respect to the bias is a sum.
For nearest-neighbour resampling, a pixel's gradient is the sum over its copies.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import product
from typing import Any

import sympy
import torch

from blade.backends.disc.frontend.ops.assemble import constant_pad
from blade.backends.disc.frontend.ops.convolution import on_images
from blade.backends.disc.frontend.ops.pooling import factor
from blade.backends.disc.frontend.ops.table import Lowering, lowers
from blade.backends.disc.ir.convolution import to_channels_first, to_channels_last
from blade.backends.disc.ir.graph import Value, contiguous_strides, numel, plain
from blade.core.dtypes import HALVES

aten = torch.ops.aten


@lowers(aten.convolution_backward.default)
def convolution_backward(
    lo: Lowering,
    grad: Value,
    x: Value,
    weight: Value,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[Any],
    padding: Sequence[Any],
    dilation: Sequence[Any],
    transposed: bool,
    output_padding: Sequence[Any],
    groups: int,
    wanted: Sequence[bool],
) -> list[Value | None]:
    how = _SpatialParameters(tuple(stride), tuple(padding), tuple(dilation), groups)
    known = _is_known(how, grad, x, weight)
    generated = known and not transposed and x.dtype in lo.forms.gradients
    images = known and x.dtype in lo.forms.image_gradients
    found: list[Value | None] = [None, None, None]
    left = [*wanted[:2], False]
    if wanted[2]:
        if grad.dtype not in (torch.float32, torch.float64) and not images:
            raise lo.otherwise()
        found[2] = _to_bias(lo, grad)
    if left[0] and (generated or images):
        found[0], left[0] = _to_input(lo, grad, x, weight, how, not transposed), False
    if left[1] and generated and how.is_dense and len(x.shape) == 4:
        found[1], left[1] = _to_weight(lo, grad, x, weight, how), False
    if left[1] and images:
        extra = tuple(map(plain, output_padding))
        found[1], left[1] = _on_images(lo, grad, x, weight, how, transposed, extra), False
    if any(left):
        rest = (stride, padding, dilation, transposed, output_padding, groups, tuple(left))
        called = lo.call(aten.convolution_backward.default, (grad, x, weight, bias_sizes, *rest))
        for k in range(2):
            found[k] = called[k] if left[k] else found[k]
    return found


@dataclass(frozen=True)
class _SpatialParameters:
    """Stride, padding and dilation of a convolution per spatial axis."""

    stride: tuple[Any, ...]
    padding: tuple[Any, ...]
    dilation: tuple[Any, ...]
    groups: int

    @property
    def is_dense(self) -> bool:
        """Whether every pixel meets every channel of its neighbours: stride 1, no dilation, one group."""
        return self.groups == 1 and {*self.stride, *self.dilation} == {1}


def _is_known(how: _SpatialParameters, grad: Value, x: Value, weight: Value) -> bool:
    """Whether the parameters are known for every spatial axis, and the operands have one dtype."""
    spatial = len(weight.shape) - 2
    lists = (how.stride, how.padding, how.dilation)
    if any(len(v) != spatial or not all(isinstance(n, int) for n in v) for v in lists):
        return False
    sizes = (*weight.shape, x.shape[1], grad.shape[1])
    if len(x.shape) != spatial + 2 or not all(isinstance(d, int) and d > 0 for d in sizes):
        return False
    return {x.dtype} == {grad.dtype, weight.dtype}


def _to_bias(lo: Lowering, grad: Value) -> Value:
    """The sum of the gradient over all pixels; of 16 bits in float32, rounded once."""
    wide = lo.b.cast(grad, torch.float32) if grad.dtype in HALVES else grad
    total = lo.b.reduce("sum", wide, (0, *range(2, len(grad.shape))))
    return lo.b.cast(lo.b.reshape(total, (grad.shape[1],)), grad.dtype)


def as_images_lie(lo: Lowering, made: Value) -> Value:
    """A call's result with channels last, as torch computes it where the images it reads have channels last."""
    rank = len(made.shape)
    dense = contiguous_strides([made.shape[k] for k in to_channels_last(rank)])
    strides = tuple(dense[k] for k in to_channels_first(rank))
    return lo.b.make("item", made.args, made.shape, made.dtype, strides, **made.attrs)


def _to_input(
    lo: Lowering, grad: Value, x: Value, weight: Value, how: _SpatialParameters, transposed: bool
) -> Value:
    """The convolution of the gradient with the same kernel; ``transposed``: the gradient is that of a plain one."""
    return on_images(lo, [grad, weight], x.shape, transposed=transposed, **vars(how))


def _on_images(
    lo: Lowering,
    grad: Value,
    x: Value,
    weight: Value,
    how: _SpatialParameters,
    transposed: bool,
    output_padding: tuple[Any, ...],
) -> Value:
    """The gradient of the weight by ATen, from images with channels last."""
    rank, b = len(weight.shape), lo.b
    last = to_channels_last(rank)
    operands = [b.permute(grad, last), b.permute(x, last), weight]
    sizes = [weight.shape[k] for k in last]
    attrs: dict[str, Any] = {
        **vars(how),
        "transposed": transposed,
        "output_padding": output_padding,
    }
    made = b.make("conv_weight_gradient", operands, sizes, weight.dtype, **attrs)
    return b.permute(made, to_channels_first(rank))


def _to_weight(
    lo: Lowering, grad: Value, x: Value, weight: Value, how: _SpatialParameters
) -> Value:
    """Products over all pixels of the gradient with the input shifted by each tap.

    Borders of zeros give both images the same size, so a shift is one distance in memory for every pixel,
    and the taps of a row of the kernel are adjacent. Elements read past the border of a row or of an
    image are multiplied by zeros of the gradient.
    """
    b, (rows, taps) = lo.b, (int(k) for k in weight.shape[2:])
    out, depth = int(weight.shape[0]), int(weight.shape[1])
    for size in (*x.shape[2:], *grad.shape[2:]):
        lo.at_least(size, 1, "a gradient of at least one pixel")
    up, left = how.padding
    images = b.permute(x, to_channels_last(4))
    images = constant_pad(lo, images, (0, 0, left, left, up, up))
    slopes = b.permute(grad, to_channels_last(4))
    slopes = constant_pad(lo, slopes, (0, 0, 0, taps - 1, 0, rows - 1))
    pixels, width = numel(images.shape[:3]), images.shape[2]
    line = plain(sympy.sympify(width) * depth)
    edge = (rows - 1) * sympy.sympify(width) + taps - 1
    count = plain(sympy.Max(0, sympy.sympify(pixels) - edge))  # 0 without images
    slopes = b.reshape(b.permute(slopes, (3, 0, 1, 2)), (out, pixels))
    slopes = b.slice(slopes, 1, 0, 1, count)
    slopes = b.broadcast(b.reshape(slopes, (1, out, count)), (rows, out, count))
    near = b.make(
        "window",
        (b.reshape(images, (numel(images.shape),)),),
        (rows, count, taps * depth),
        x.dtype,
        starts=(0,),
        walks=(((0, line),), ((0, depth),), ((0, 1),)),
    )
    product = b.make("matmul", (slopes, near), (rows, out, taps * depth), x.dtype)
    product = b.reshape(product, (rows, out, taps, depth))
    return b.permute(product, (1, 3, 0, 2))


@lowers(aten._adaptive_avg_pool2d_backward.default)
def adaptive_avg_pool2d_backward(lo: Lowering, grad: Value, x: Value) -> Value:
    """For pooling to one pixel, every pixel gets an equal share."""
    if grad.shape[-2:] != (1, 1) or x.dtype not in (torch.float32, torch.float64):
        raise lo.otherwise()
    for size in x.shape[-2:]:
        lo.at_least(size, 1, "pixels that share")
    share = lo.b.pointwise("div", grad, lo.number(numel(x.shape[-2:]), grad))
    return lo.b.broadcast(share, lo.shape)


@lowers(aten.upsample_nearest2d_backward.default)
def upsample_nearest2d_backward(
    lo: Lowering,
    grad: Value,
    output_size: Sequence[Any],
    input_size: Sequence[Any],
    scales_h: float | None = None,
    scales_w: float | None = None,
) -> Value:
    """For integer factors, the sum over the copies of each pixel."""
    factors = [factor(a, b) for a, b in zip(lo.shape[2:], grad.shape[2:], strict=True)]
    if any(f is None or f > 4 for f in factors) or not grad.dtype.is_floating_point:
        raise lo.otherwise()
    parts = []
    for starts in product(*(range(int(f or 1)) for f in factors)):
        part = grad
        for axis, (start, step) in enumerate(zip(starts, factors, strict=True), 2):
            part = lo.b.slice(part, axis, start, int(step or 1), lo.shape[axis])
        parts.append(part)
    return total(lo, parts)


def total(lo: Lowering, parts: Sequence[Value]) -> Value:
    """The sum of ``parts``; of 16 bits in float32, rounded once."""
    if len(parts) == 1:
        return parts[0]
    wide = [lo.b.cast(p, torch.float32) if p.dtype in HALVES else p for p in parts]
    return lo.b.cast(reduce(partial(lo.b.pointwise, "add"), wide), parts[0].dtype)
