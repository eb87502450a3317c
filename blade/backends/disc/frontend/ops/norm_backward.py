# SPDX-License-Identifier: Apache-2.0
"""Rows of normalization in training: gradients, and batch norm by the batch's own statistics.

With x' = (x - mean) * rstd over n elements, weight w and gradient g of the result:

    dx = rstd * (g*w - mean(g*w) - x' * mean(g*w * x'))      dw = sum(g * x')      db = sum(g)

Everything is pointwise and `reduce`: one kernel reduces rows for dx, another columns for dw and db.
"""

from collections.abc import Sequence
from typing import Any

import sympy
import torch

from blade.backends.disc.frontend.ops.group_moments import group_moments
from blade.backends.disc.frontend.ops.norm import (
    each_channel,
    each_pixel,
    normalized,
    some_pixels,
)
from blade.backends.disc.frontend.ops.reduction import count_of, inverse_deviation, wide
from blade.backends.disc.frontend.ops.table import Lowering, lowers
from blade.backends.disc.ir.graph import (
    Shape,
    Value,
    numel,
    plain,
)
from blade.backends.disc.ir.kernel import Dim

aten = torch.ops.aten
Gradients = list[Value | None]


def _mul(lo: Lowering, a: Value, b: Value) -> Value:
    return lo.b.pointwise("mul", a, b)


def _normalized(lo: Lowering, x: Value, mean: Value, rstd: Value) -> Value:
    """(x - mean) * rstd; ``mean`` and ``rstd`` have the shape of ``x``."""
    return _mul(lo, lo.b.pointwise("sub", x, mean), rstd)


def _over_count(lo: Lowering, total: Value, count: Any) -> Value:
    return lo.b.pointwise("div", total, lo.number(count, total))


def _to_input(lo: Lowering, weighted: Value, parts: tuple[Value, ...]) -> Value:
    """dx from ``weighted`` (g*w) and ``parts``: x', rstd and the means of g*w and of g*w*x', all at
    one shape.
    """
    normal, rstd, average, slope = parts
    rest = lo.b.pointwise("sub", weighted, average)
    return _mul(lo, lo.b.pointwise("sub", rest, _mul(lo, normal, slope)), rstd)


@lowers(aten.native_layer_norm_backward.default)
def layer_norm_backward(
    lo: Lowering,
    grad: Value,
    x: Value,
    normalized_shape: Sequence[Any],
    mean: Value,
    rstd: Value,
    weight: Value | None,
    bias: Value | None,
    wanted: Sequence[bool],
) -> Gradients:
    rank = len(x.shape)
    axes = tuple(range(rank - len(normalized_shape), rank))
    outer = tuple(range(axes[0]))
    g, x32, mean, rstd = (lo.value(v, wide(x.dtype), x.shape) for v in (grad, x, mean, rstd))
    normal = _normalized(lo, x32, mean, rstd)
    weighted = g if weight is None else _mul(lo, g, lo.value(weight, g.dtype, x.shape))
    means = [
        lo.b.broadcast(_over_count(lo, lo.b.reduce("sum", v, axes), count_of(x, axes)), x.shape)
        for v in (weighted, _mul(lo, weighted, normal))
    ]
    found: Gradients = [None, None, None]
    if wanted[0]:
        found[0] = _to_input(lo, weighted, (normal, rstd, means[0], means[1]))
    for k, v in enumerate((_mul(lo, g, normal), g), 1):
        if wanted[k]:
            found[k] = _summed(lo, v, outer, x.shape[axes[0] :])
    return [None if v is None else lo.b.cast(v, x.dtype) for v in found]


def _summed(lo: Lowering, x: Value, axes: Sequence[int], shape: Shape) -> Value:
    return lo.b.reshape(lo.b.reduce("sum", x, axes) if axes else x, shape)


# --- group norm: [N, C, pixels], statistics per sample and group of channels ---


def _check(lo: Lowering, x: Value, channels: Dim, groups: int) -> None:
    if not isinstance(channels, int) or channels % groups or len(x.shape) < 2:
        raise lo.otherwise()
    for size in x.shape[2:]:
        lo.at_least(size, 1, "statistics of at least one pixel")


@lowers(aten.native_group_norm.default)
def native_group_norm(
    lo: Lowering,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    batch: Dim,
    channels: Dim,
    pixels: Dim,
    groups: int,
    eps: float,
) -> list[Value]:
    _check(lo, x, channels, groups)
    some_pixels(lo, x)
    moments = group_moments(lo, x, groups, eps)
    y = lo.b.cast(x, wide(x.dtype))
    if moments is not None:
        y = normalized(lo, y, *moments, weight, bias)
        each = int(channels) // groups
        statistics = (lo.b.slice(m, 1, 0, each, groups) for m in moments)
        return [lo.b.cast(v, r.dtype) for v, r in zip((y, *statistics), lo.results, strict=True)]
    count = plain(sympy.sympify(numel(x.shape[2:])) * (channels // groups))
    mean = _over_count(lo, _by_group(lo, _by_channel(lo, y), groups), count)
    centred = lo.b.pointwise("sub", y, each_pixel(lo, mean, y))
    spread = _by_group(lo, _by_channel(lo, _mul(lo, centred, centred)), groups)
    spread = _over_count(lo, spread, count)
    rstd = inverse_deviation(lo, spread, eps)
    scale = each_channel(lo, rstd, channels)
    if weight is not None:
        scale = _mul(lo, scale, lo.value(weight, y.dtype, scale.shape))
    y = _mul(lo, centred, lo.b.make("broadcast", (scale,), y.shape, y.dtype, axes=(0, 1)))
    if bias is not None:
        shift = lo.b.cast(bias, y.dtype)
        shift = lo.b.make("broadcast", (shift,), y.shape, y.dtype, axes=(1,))
        y = lo.b.pointwise("add", y, shift)
    found = (y, lo.b.reshape(mean, (batch, groups)), lo.b.reshape(rstd, (batch, groups)))
    return [lo.b.cast(v, r.dtype) for v, r in zip(found, lo.results, strict=True)]


@lowers(aten.native_group_norm_backward.default)
def group_norm_backward(
    lo: Lowering,
    grad: Value,
    x: Value,
    mean: Value,
    rstd: Value,
    weight: Value | None,
    batch: Dim,
    channels: Dim,
    pixels: Dim,
    groups: int,
    wanted: Sequence[bool],
) -> Gradients:
    _check(lo, x, channels, groups)
    g, x32, mean, rstd = (lo.b.cast(v, wide(x.dtype)) for v in (grad, x, mean, rstd))
    each_rstd = each_pixel(lo, rstd, x32)
    normal = _normalized(lo, x32, each_pixel(lo, mean, x32), each_rstd)
    sums = [_by_channel(lo, v) for v in (_mul(lo, g, normal), g)]  # [N, C]
    found: Gradients = [None, None, None]
    if wanted[0]:
        found[0] = _group_norm_input(lo, g, normal, each_rstd, sums, weight, groups)
    for k, total in enumerate(sums, 1):
        if wanted[k]:
            found[k] = _summed(lo, total, (0,), (channels,))
    return [None if v is None else lo.b.cast(v, x.dtype) for v in found]


def _group_norm_input(
    lo: Lowering,
    g: Value,
    normal: Value,
    rstd: Value,
    sums: Sequence[Value],
    weight: Value | None,
    groups: int,
) -> Value:
    count = plain(sympy.sympify(numel(g.shape[2:])) * (int(g.shape[1]) // groups))
    if weight is not None:
        w = lo.b.cast(weight, g.dtype)
        sums = [_mul(lo, s, lo.b.broadcast(w, s.shape)) for s in sums]
        g = _mul(lo, g, lo.b.make("broadcast", (w,), g.shape, g.dtype, axes=(1,)))
    slope, average = (
        each_pixel(lo, _over_count(lo, _by_group(lo, s, groups), count), g) for s in sums
    )
    return _to_input(lo, g, (normal, rstd, average, slope))


def _by_channel(lo: Lowering, x: Value) -> Value:
    """[N, C, ...] -> [N, C]: the sum over pixels."""
    pixels = tuple(range(2, len(x.shape)))
    return lo.b.reshape(lo.b.reduce("sum", x, pixels) if pixels else x, x.shape[:2])


def _by_group(lo: Lowering, x: Value, groups: int) -> Value:
    """[N, C] -> [N, groups]"""
    batch, channels = x.shape
    if groups == channels:
        return x
    shape = (batch, groups, int(channels) // groups)
    return lo.b.reshape(lo.b.reduce("sum", lo.b.reshape(x, shape), (2,)), (batch, groups))
