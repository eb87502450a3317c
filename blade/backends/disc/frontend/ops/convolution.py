# SPDX-License-Identifier: Apache-2.0
"""Rows of convolutions: `conv` on channels-last data, between two permutations.

The permutations are views; those between two convolutions meet and cancel. Convolutions of dtypes that
the target does not implement (``forms``) stay calls, as do transposed ones in groups or with computed weights.
"""

from collections.abc import Sequence
from typing import Any

import sympy
import torch

from blade.backends.disc.frontend.ops.assemble import constant_pad
from blade.backends.disc.frontend.ops.conv_phases import conv_by_phases
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
    steps, pads, gaps = (_each(lo, v, spatial) for v in (stride, padding, dilation))
    batched = len(x.shape) == spatial + 2
    images = x if batched else lo.b.reshape(x, (1, *x.shape))
    shape = lo.shape if batched else (1, *lo.shape)
    for size, kernel, pad, gap in zip(images.shape[2:], weight.shape[2:], pads, gaps, strict=True):
        _fits(lo, size, kernel, pad, gap)
    if not isinstance(images.shape[1], int):
        lo.b.require(
            sympy.Eq(images.shape[1], weight.shape[1] * groups), "channels of a convolution"
        )
    operands = [lo.b.permute(images, to_channels_last(len(shape))), weight]
    last = lo.b.make(
        "conv",
        operands if bias is None else [*operands, bias],
        [shape[k] for k in to_channels_last(len(shape))],
        lo.dtype,
        stride=steps,
        padding=pads,
        dilation=gaps,
        groups=groups,
        activation=None,
        transposed=False,
    )
    return lo.b.reshape(lo.b.permute(last, to_channels_first(len(shape))), lo.shape)


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
    gaps = _each(lo, dilation, spatial)
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
    given = (stride, padding, output_padding, dilation)
    return conv_by_phases(lo, x, weight, bias, [_each(lo, v, len(weight.shape) - 2) for v in given])


def _is_served(lo: Lowering, *tensors: Value | None) -> bool:
    return lo.dtype in lo.forms.convolution and all(
        t is None or t.dtype == lo.dtype for t in tensors
    )


def _each(lo: Lowering, given: Any, spatial: int) -> tuple[int, ...]:
    """One number per spatial axis."""
    values = tuple(given) if isinstance(given, (list, tuple)) else (given,)
    if not all(isinstance(v, int) for v in values):
        raise lo.otherwise()
    return values * spatial if len(values) == 1 else values


def _fits(lo: Lowering, size: Dim, kernel: Dim, pad: int, gap: int) -> None:
    """Rely on the kernel fitting into a padded input that is not empty; torch raises otherwise."""
    reach = plain(sympy.sympify(kernel) - 1) * gap + 1
    lo.at_least(size, max(1, int(reach) - 2 * pad), "a kernel no larger than its input")
