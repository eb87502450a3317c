# SPDX-License-Identifier: Apache-2.0
"""Rows of softmax and normalization: written out in pointwise ops and `reduce`."""

import math
from collections.abc import Sequence
from typing import Any

import sympy
import torch

from blade.backends.disc.frontend.ops.group_moments import group_moments
from blade.backends.disc.frontend.ops.reduction import (
    axes_of,
    count_of,
    inverse_deviation,
    moments,
    sum_by_axis,
    wide,
)
from blade.backends.disc.frontend.ops.table import Lowering, float_dtype, lowers
from blade.backends.disc.ir.graph import Value, numel, plain

aten = torch.ops.aten


@lowers(aten.softmax.int, aten._softmax.default)
def softmax(lo: Lowering, x: Value, dim: int, *_: Any) -> Value:
    exps, total = _exponentials(lo, x, dim)
    return lo.b.pointwise("div", exps, lo.b.broadcast(total, exps.shape))


def _exponentials(lo: Lowering, x: Value, dim: int) -> tuple[Value, Value]:
    shifted = _shifted(lo, x, dim)
    exps = lo.b.pointwise("exp", shifted)
    return exps, lo.b.reduce("sum", exps, axes_of(x, dim))


def _shifted(lo: Lowering, x: Value, dim: int) -> Value:
    x = lo.b.cast(x, lo.dtype)
    top = lo.b.reduce("max", x, axes_of(x, dim)) if x.shape else x
    return lo.b.pointwise("sub", x, lo.b.broadcast(top, x.shape))


@lowers(aten.log_softmax.int, aten._log_softmax.default)
def log_softmax(lo: Lowering, x: Value, dim: int, *_: Any) -> Value:
    shifted = _shifted(lo, x, dim)
    total = lo.b.reduce("sum", lo.b.pointwise("exp", shifted), axes_of(x, dim))
    log = lo.b.broadcast(lo.b.pointwise("log", total), shifted.shape)
    return lo.b.pointwise("sub", shifted, log)


@lowers(aten.layer_norm.default)
def layer_norm(
    lo: Lowering,
    x: Value,
    normalized_shape: Sequence[Any],
    weight: Value | None = None,
    bias: Value | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Value:
    axes = tuple(range(len(x.shape) - len(normalized_shape), len(x.shape)))
    if (
        len(axes) > 1
    ):  # one axis: sums stay in registers, in float32; sums over several may be stored
        x = lo.b.cast(x, wide(x.dtype))
    dtype = float_dtype(x.dtype)
    centred, spread = moments(lo, x, axes)
    y = _scaled(lo, centred, spread, count_of(x, axes), weight, bias, eps, dtype)
    return lo.b.cast(y, lo.dtype)


def _scaled(
    lo: Lowering,
    centred: Value,
    spread: Value,
    count: Any,
    weight: Value | None,
    bias: Value | None,
    eps: float,
    dtype: torch.dtype,
) -> Value:
    variance = lo.b.pointwise("div", spread, lo.number(count, spread))
    scale = inverse_deviation(lo, variance, eps)
    y = lo.b.pointwise("mul", centred, lo.b.broadcast(scale, centred.shape))
    if weight is None:
        return y if bias is None else lo.b.pointwise("add", y, lo.value(bias, dtype))
    w = lo.value(weight, dtype)
    return (
        lo.b.pointwise("mul", y, w)
        if bias is None
        else lo.b.pointwise("fma", y, w, lo.value(bias, dtype))
    )


@lowers(aten.rms_norm.default)
def rms_norm(
    lo: Lowering, x: Value, normalized_shape: Sequence[Any], weight: Any = None, eps: Any = None
) -> Value:
    axes = tuple(range(len(x.shape) - len(normalized_shape), len(x.shape)))
    x = lo.b.cast(x, wide(x.dtype))  # the square of 256 overflows float16
    squares = lo.b.reduce("sum", lo.b.pointwise("mul", x, x), axes)
    eps = torch.finfo(x.dtype).eps if eps is None else eps  # epsilon of the dtype torch computes in
    y = _scaled(lo, x, squares, count_of(x, axes), weight, None, eps, x.dtype)
    return lo.b.cast(y, lo.dtype)


@lowers(aten._safe_softmax.default)
def safe_softmax(lo: Lowering, x: Value, dim: int, dtype: Any = None) -> Value:
    x = lo.b.cast(x, lo.dtype)
    top = lo.b.reduce("max", x, axes_of(x, dim))
    empty = lo.b.pointwise("eq", top, lo.number(-math.inf, top), dtype=torch.bool)
    y = softmax(lo, x, dim)
    return lo.b.pointwise("where", lo.b.broadcast(empty, x.shape), lo.number(0, y), y)


@lowers(aten.native_layer_norm.default)
def native_layer_norm(
    lo: Lowering, x: Value, normalized_shape: Sequence[Any], weight: Any, bias: Any, eps: float
) -> list[Value]:
    """Mean and deviation of 16-bit inputs may be float32; then all but the result is."""
    computed = lo.results[-1].dtype
    same = all(r.dtype == computed for r in lo.results[1:]) and lo.dtype == x.dtype
    if not same or computed not in (x.dtype, wide(x.dtype)):
        raise lo.otherwise()
    x = lo.b.cast(x, computed)
    axes = tuple(range(len(x.shape) - len(normalized_shape), len(x.shape)))
    total = lo.b.reduce("sum", x, axes)
    count = lo.number(count_of(x, axes), total)
    _, spread = moments(lo, x, axes)
    variance = lo.b.pointwise("div", spread, count)
    y = lo.b.cast(layer_norm(lo, x, normalized_shape, weight, bias, eps), lo.dtype)
    return [y, lo.b.pointwise("div", total, count), inverse_deviation(lo, variance, eps)]


@lowers(aten.group_norm.default)
def group_norm(
    lo: Lowering,
    x: Value,
    groups: int,
    weight: Value | None = None,
    bias: Value | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Value:
    some_pixels(lo, x)
    return _by_groups(lo, x, groups, weight, bias, eps)


def _by_groups(
    lo: Lowering, x: Value, groups: int, weight: Value | None, bias: Value | None, eps: float
) -> Value:
    channels = x.shape[1]
    if not isinstance(channels, int) or channels % groups:
        raise lo.otherwise()
    found = group_moments(lo, x, groups, eps)
    x = lo.b.cast(x, wide(x.dtype))
    if found is not None:
        return lo.b.cast(normalized(lo, x, *found, weight, bias), lo.dtype)
    total = _over_groups(lo, x, groups)
    count = lo.number(plain(sympy.sympify(numel(x.shape[2:])) * (channels // groups)), total)
    centred = lo.b.pointwise("sub", x, each_pixel(lo, lo.b.pointwise("div", total, count), x))
    squares = _over_groups(lo, lo.b.pointwise("mul", centred, centred), groups)
    variance = lo.b.pointwise("div", squares, count)
    scale = each_channel(lo, inverse_deviation(lo, variance, eps), channels)
    if weight is not None:
        scale = lo.b.pointwise("mul", scale, lo.value(weight, x.dtype, scale.shape))
    scale = lo.b.make("broadcast", (scale,), x.shape, x.dtype, axes=(0, 1))
    if bias is None:
        return lo.b.cast(lo.b.pointwise("mul", centred, scale), lo.dtype)
    shift = lo.b.cast(bias, x.dtype)
    shift = lo.b.make("broadcast", (shift,), x.shape, x.dtype, axes=(1,))
    return lo.b.cast(lo.b.pointwise("fma", centred, scale, shift), lo.dtype)


def some_pixels(lo: Lowering, x: Value) -> None:
    """Rely on an ``x`` with pixels: torch 2.15 raises without, and older versions answer."""
    for size in x.shape[2:]:
        lo.at_least(size, 1, "group norm of at least one pixel")


def normalized(
    lo: Lowering, x: Value, mean: Value, rstd: Value, weight: Value | None, bias: Value | None
) -> Value:
    """(x - mean) * rstd * weight + bias at every point of ``x``, from values per channel."""

    def spread(per_channel: Value) -> Value:
        axes = tuple(range(2 - len(per_channel.shape), 2))
        core = lo.b.cast(per_channel, x.dtype)
        return lo.b.make("broadcast", (core,), x.shape, x.dtype, axes=axes)

    y = lo.b.pointwise("mul", lo.b.pointwise("sub", x, spread(mean)), spread(rstd))
    if weight is not None and bias is not None:
        return lo.b.pointwise("fma", y, spread(weight), spread(bias))
    y = y if weight is None else lo.b.pointwise("mul", y, spread(weight))
    return y if bias is None else lo.b.pointwise("add", y, spread(bias))


def _over_groups(lo: Lowering, x: Value, groups: int) -> Value:
    """The sum of each group of channels, [N, groups]: first over pixels, in any memory order."""
    batch, channels = x.shape[:2]
    pixels = range(2, len(x.shape))
    total = lo.b.reshape(sum_by_axis(lo, x, pixels), (batch, channels))
    if groups == channels:
        return total
    assert isinstance(channels, int), x
    total = lo.b.reshape(total, (batch, groups, channels // groups))
    return lo.b.reshape(lo.b.reduce("sum", total, (2,)), (batch, groups))


def each_pixel(lo: Lowering, per_group: Value, x: Value) -> Value:
    """[N, groups] -> the shape of ``x``, [N, C, pixels]"""
    per_channel = each_channel(lo, per_group, x.shape[1])
    return lo.b.make("broadcast", (per_channel,), x.shape, x.dtype, axes=(0, 1))


def each_channel(lo: Lowering, per_group: Value, channels: Any) -> Value:
    """[N, groups] -> [N, channels]"""
    batch, groups = per_group.shape
    if groups == channels:
        return per_group
    shape = (batch, groups, channels // groups)
    repeated = lo.b.make("broadcast", (per_group,), shape, per_group.dtype, axes=(0, 1))
    return lo.b.reshape(repeated, (batch, channels))


def _per_channel(lo: Lowering, y: Value, weight: Value | None, bias: Value | None) -> Value:
    ones = (1,) * (len(y.shape) - 2)
    w, b = (
        None if p is None else lo.value(lo.b.reshape(p, (*p.shape, *ones)), y.dtype, y.shape)
        for p in (weight, bias)
    )
    if w is not None and b is not None:
        return lo.b.pointwise("fma", y, w, b)
    y = y if w is None else lo.b.pointwise("mul", y, w)
    return y if b is None else lo.b.pointwise("add", y, b)


@lowers(aten.instance_norm.default)
def instance_norm(
    lo: Lowering,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value | None,
    running_var: Value | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    *_: Any,
) -> Value:
    if not use_input_stats or running_mean is not None or not isinstance(x.shape[1], int):
        raise lo.otherwise()
    lo.at_least(x.shape[0], 1, "instance_norm of at least one sample")
    return _by_groups(lo, x, x.shape[1], weight, bias, eps)


@lowers(aten.batch_norm.default)
def batch_norm(
    lo: Lowering,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value | None,
    var: Value | None,
    training: bool,
    momentum: float,
    eps: float,
    *_: Any,
) -> Value:
    if training or mean is None or var is None:
        raise lo.otherwise()
    # Values per channel are not rounded to 16 bits.
    scale = inverse_deviation(lo, lo.b.cast(var, wide(var.dtype)), eps)
    if weight is not None:
        scale = lo.b.pointwise("mul", scale, lo.b.cast(weight, scale.dtype))
    shift = lo.b.pointwise("neg", lo.b.pointwise("mul", lo.b.cast(mean, scale.dtype), scale))
    if bias is not None:
        shift = lo.b.pointwise("add", shift, lo.b.cast(bias, shift.dtype))
    return lo.b.cast(_per_channel(lo, lo.b.cast(x, scale.dtype), scale, shift), lo.dtype)


@lowers(aten._native_batch_norm_legit_no_training.default)
def native_batch_norm(
    lo: Lowering,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value,
    var: Value,
    momentum: float,
    eps: float,
) -> list[Value]:
    y = batch_norm(lo, x, weight, bias, mean, var, False, momentum, eps)
    if any(r.shape != (0,) for r in lo.results[1:]):
        raise lo.otherwise()
    return [y, *(lo.b.fill(0, r.shape, r.dtype) for r in lo.results[1:])]
