# SPDX-License-Identifier: Apache-2.0
"""Rows of gradients of convolutions and of resampling.

The gradients of a convolution with respect to its input and its weight are ATen's; that of its bias is a
sum, and each pixel's of nearest neighbours the sum of its copies'.
"""

from collections.abc import Sequence
from itertools import product
from typing import Any

import torch

from blade.backends.disc.ir import Value, numel
from blade.backends.disc.ops.pooling import factor
from blade.backends.disc.ops.table import Lowering, lowers

aten = torch.ops.aten


@lowers(aten.convolution_backward.default)
def convolution_backward(
    lo: Lowering,
    grad: Value,
    x: Value,
    weight: Value,
    bias_sizes: Sequence[int] | None,
    *rest: Any,
) -> list[Value | None]:
    *how, wanted = rest
    found: list[Value | None] = [None, None, None]
    if wanted[2]:
        if grad.dtype not in (torch.float32, torch.float64):
            raise lo.otherwise()
        axes = (0, *range(2, len(grad.shape)))
        total = lo.b.reduce("sum", grad, axes)
        found[2] = lo.b.reshape(total, (grad.shape[1],))
    if wanted[0] or wanted[1]:
        mask = (*wanted[:2], False)
        args = (grad, x, weight, bias_sizes, *how, mask)
        called = lo.call(aten.convolution_backward.default, args)
        found[:2] = (*called[:2], None)[:2]
    return found


@lowers(aten._adaptive_avg_pool2d_backward.default)
def adaptive_avg_pool2d_backward(lo: Lowering, grad: Value, x: Value) -> Value:
    """From one pixel every other gets an equal share."""
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
    """By whole factors, the pixels that came from one are summed up."""
    factors = [factor(a, b) for a, b in zip(lo.shape[2:], grad.shape[2:], strict=True)]
    if any(f is None or f > 4 for f in factors) or grad.dtype not in (torch.float32, torch.float64):
        raise lo.otherwise()
    total: Value | None = None
    for starts in product(*(range(int(f or 1)) for f in factors)):
        part = grad
        for axis, (start, step) in enumerate(zip(starts, factors, strict=True), 2):
            part = lo.b.slice(part, axis, start, int(step or 1), lo.shape[axis])
        total = part if total is None else lo.b.pointwise("add", total, part)
    assert total is not None
    return total
