# SPDX-License-Identifier: Apache-2.0
"""Rows of convolutions: `conv` on channels-last data, between two permutations.

The permutations are views; those between two convolutions meet and cancel. Convolutions of dtypes that the target
does not implement (``forms``) stay calls, as do transposed ones in groups, and in phases if the weights are computed.
"""

from collections.abc import Sequence
from typing import Any

import sympy
import torch

from blade.backends.disc.frontend.ops.assemble import constant_pad
from blade.backends.disc.frontend.ops.conv_phases import conv_by_phases, least_sizes
from blade.backends.disc.frontend.ops.table import Lowering, lowers
from blade.backends.disc.ir.convolution import to_channels_first, to_channels_last
from blade.backends.disc.ir.graph import Value, plain
from blade.backends.disc.ir.kernel import Dim

aten = torch.ops.aten


@lowers(aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)
def conv(
    lo: Lowering,
    x: Value,
    weight: Value,
    bias: Value | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Value:
    spatial = len(weight.shape) - 2
    known = all(isinstance(d, int) and d > 0 for d in weight.shape)
    if not known or not _is_served(lo, x, weight, bias):
        raise lo.otherwise()
    steps, pads, gaps = (each(lo, v, spatial) for v in (stride, padding, dilation))
    batched = len(x.shape) == spatial + 2
    images = x if batched else lo.b.reshape(x, (1, *x.shape))
    shape = lo.shape if batched else (1, *lo.shape)
    for size, kernel, pad, gap in zip(images.shape[2:], weight.shape[2:], pads, gaps, strict=True):
        _fits(lo, size, kernel, pad, gap)
    if not isinstance(images.shape[1], int):
        lo.b.require(
            sympy.Eq(images.shape[1], weight.shape[1] * groups), "channels of a convolution"
        )
    how = {"stride": steps, "padding": pads, "dilation": gaps, "groups": groups}
    tensors = [images, weight] if bias is None else [images, weight, bias]
    return lo.b.reshape(on_images(lo, tensors, shape, transposed=False, **how), lo.shape)


def on_images(lo: Lowering, tensors: Sequence[Value], shape: Sequence[Dim], **how: Any) -> Value:
    """A `conv` of the image, weight and bias in ``tensors``, of a result of ``shape`` [N, C, *spatial]."""
    last = to_channels_last(len(shape))
    image = lo.b.permute(tensors[0], last)
    sizes = [shape[k] for k in last]
    made = lo.b.make("conv", [image, *tensors[1:]], sizes, image.dtype, activation=None, **how)
    return lo.b.permute(made, to_channels_first(len(shape)))


@lowers(
    aten.conv1d.padding,
    aten.conv2d.padding,
    aten.conv3d.padding,
    aten._convolution_mode.default,
)
def conv_padded_by_name(
    lo: Lowering,
    x: Value,
    weight: Value,
    bias: Value | None = None,
    stride: Any = 1,
    padding: str = "valid",
    dilation: Any = 1,
    groups: int = 1,
) -> Value:
    """ "same" pads half of the kernel's extent on each side; an odd extra element goes to the end."""
    spatial = len(weight.shape) - 2
    if padding == "valid":
        return conv(lo, x, weight, bias, stride, 0, dilation, groups)
    if not all(isinstance(k, int) for k in weight.shape[2:]):
        raise lo.otherwise()
    gaps = each(lo, dilation, spatial)
    reach = [g * (int(k) - 1) for g, k in zip(gaps, weight.shape[2:], strict=True)]
    if any(r % 2 for r in reach):
        x = constant_pad(lo, x, [p for r in reversed(reach) for p in (0, r % 2)])
    return conv(lo, x, weight, bias, stride, [r // 2 for r in reach], gaps, groups)


@lowers(aten.convolution.default, aten._convolution.default, aten._convolution.deprecated)
def convolution(
    lo: Lowering,
    x: Value,
    weight: Value,
    bias: Value | None,
    stride: Sequence[Any],
    padding: Sequence[Any],
    dilation: Sequence[Any],
    transposed: bool,
    output_padding: Sequence[Any],
    groups: int,
    *_: Any,
) -> Value:
    if len(x.shape) != len(weight.shape):
        raise lo.otherwise()
    if transposed:
        how = (stride, padding, output_padding, groups, dilation)
        return conv_transpose(lo, x, weight, bias, *how)
    return conv(lo, x, weight, bias, stride, padding, dilation, groups)


@lowers(aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input)
def conv_transpose(
    lo: Lowering,
    x: Value,
    weight: Value,
    bias: Value | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Value:
    if groups != 1:
        raise lo.otherwise()
    given = [
        each(lo, v, len(weight.shape) - 2) for v in (stride, padding, output_padding, dilation)
    ]
    if lo.dtype not in lo.forms.image_gradients or len(weight.shape) == 3:
        return conv_by_phases(lo, x, weight, bias, given)
    return _conv_transpose_as_gradient(lo, x, weight, bias, given)


def _conv_transpose_as_gradient(
    lo: Lowering, x: Value, weight: Value, bias: Value | None, given: Sequence[tuple[int, ...]]
) -> Value:
    """As the gradient of a convolution's input is computed. ``given``: as for ``conv_by_phases``."""
    spatial = len(weight.shape) - 2
    tensors = [t for t in (x, weight, bias) if t is not None]
    sizes = (*weight.shape, x.shape[-spatial - 1])
    if any(t.dtype != lo.dtype for t in tensors) or not all(isinstance(d, int) for d in sizes):
        raise lo.otherwise()
    for size, least in zip(x.shape[-spatial:], least_sizes(weight, given), strict=True):
        lo.at_least(size, least, "a result that is not empty")
    is_batched = len(x.shape) == spatial + 2
    tensors[0] = x if is_batched else lo.b.reshape(x, (1, *x.shape))
    stride, padding, _, dilation = given
    how = {"stride": stride, "padding": padding, "dilation": dilation, "groups": 1}
    shape = lo.shape if is_batched else (1, *lo.shape)
    return lo.b.reshape(on_images(lo, tensors, shape, transposed=True, **how), lo.shape)


def _is_served(lo: Lowering, *tensors: Value | None) -> bool:
    return lo.dtype in lo.forms.convolution and all(
        t is None or t.dtype == lo.dtype for t in tensors
    )


def each(lo: Lowering, given: Any, spatial: int) -> tuple[int, ...]:
    """One number per spatial axis."""
    values = tuple(given) if isinstance(given, (list, tuple)) else (given,)
    if not all(isinstance(v, int) for v in values):
        raise lo.otherwise()
    return values * spatial if len(values) == 1 else values


def _fits(lo: Lowering, size: Dim, kernel: Dim, pad: int, gap: int) -> None:
    """Rely on the kernel fitting into a padded input that is not empty; torch raises otherwise."""
    reach = plain(sympy.sympify(kernel) - 1) * gap + 1
    lo.at_least(size, max(1, int(reach) - 2 * pad), "a kernel no larger than its input")
