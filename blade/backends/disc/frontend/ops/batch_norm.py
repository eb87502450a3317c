# SPDX-License-Identifier: Apache-2.0
"""Rows of batch norm in training, [N, C, ...] by the statistics of each channel, and of its gradient.

New running statistics are results, as in functionalized graphs; nothing is written in place.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import sympy
import torch

from blade.backends.disc.frontend.ops.norm import batch_norm
from blade.backends.disc.frontend.ops.reduction import inverse_deviation, wide
from blade.backends.disc.frontend.ops.table import Lowering, lowers
from blade.backends.disc.ir.graph import Value, numel, plain
from blade.backends.disc.ir.kernel import Dim

aten = torch.ops.aten


@dataclass(frozen=True)
class _TrainingResult:
    """The result in the working dtype and, per channel, the statistics that normalized it."""

    y: Value
    mean: Value
    rstd: Value
    spread: Value  # sum of squared differences from the mean
    count: Dim


def _axes(x: Value) -> tuple[int, ...]:
    return (0, *range(2, len(x.shape)))


def _total(lo: Lowering, x: Value) -> Value:
    """[N, C, ...] -> [C]"""
    return lo.b.reshape(lo.b.reduce("sum", x, _axes(x)), (x.shape[1],))


def _each(lo: Lowering, per_channel: Value, x: Value) -> Value:
    each = lo.b.cast(per_channel, x.dtype)
    return lo.b.make("broadcast", (each,), x.shape, x.dtype, axes=(1,))


def _count(x: Value) -> Dim:
    return plain(sympy.sympify(numel([x.shape[k] for k in _axes(x)])))


def _not_empty(lo: Lowering, x: Value) -> None:
    for size in x.shape:
        lo.at_least(size, 1, "batch norm of at least one element")


def _trained(
    lo: Lowering, x: Value, weight: Value | None, bias: Value | None, eps: float
) -> _TrainingResult:
    if len(x.shape) < 2 or not x.dtype.is_floating_point:
        raise lo.otherwise()
    _not_empty(lo, x)
    x, count = lo.b.cast(x, wide(x.dtype)), _count(x)
    total = _total(lo, x)
    mean = lo.b.pointwise("div", total, lo.number(count, total))
    centred = lo.b.pointwise("sub", x, _each(lo, mean, x))
    spread = _total(lo, lo.b.pointwise("mul", centred, centred))
    variance = lo.b.pointwise("div", spread, lo.number(count, spread))
    rstd = inverse_deviation(lo, variance, eps)
    scale = rstd
    if weight is not None:
        scale = lo.b.pointwise("mul", rstd, lo.b.cast(weight, rstd.dtype))
    y = lo.b.pointwise("mul", centred, _each(lo, scale, x))
    if bias is not None:
        y = lo.b.pointwise("add", y, _each(lo, bias, x))
    return _TrainingResult(y, mean, rstd, spread, count)


def _moved(lo: Lowering, running: Value, now: Value, momentum: float) -> Value:
    """``running`` moved towards ``now`` by the fraction ``momentum``."""
    kept = lo.b.pointwise("mul", running, lo.number(1 - momentum, running))
    now = lo.b.cast(now, running.dtype)
    return lo.b.pointwise("fma", now, lo.number(momentum, now), kept)


def _running(
    lo: Lowering, t: _TrainingResult, mean: Value, var: Value, momentum: float
) -> list[Value]:
    """New running mean and variance; the variance is the unbiased one."""
    unbiased = lo.number(plain(sympy.sympify(t.count) - 1), t.spread)
    unbiased = lo.b.pointwise("div", t.spread, unbiased)
    return [_moved(lo, mean, t.mean, momentum), _moved(lo, var, unbiased, momentum)]


def _as_results(lo: Lowering, found: Sequence[Value]) -> list[Value]:
    return [lo.b.cast(v, r.dtype) for v, r in zip(found, lo.results, strict=True)]


@lowers(aten._native_batch_norm_legit_functional.default)
def legit_functional(
    lo: Lowering,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value,
    var: Value,
    training: bool,
    momentum: float,
    eps: float,
) -> list[Value]:
    if not training:
        y = batch_norm(lo, x, weight, bias, mean, var, False, momentum, eps)
        if any(r.shape != (0,) for r in lo.results[1:3]):
            raise lo.otherwise()
        saved = [lo.b.fill(0, (0,), r.dtype) for r in lo.results[1:3]]
        return _as_results(lo, [y, *saved, mean, var])
    t = _trained(lo, x, weight, bias, eps)
    return _as_results(lo, [t.y, t.mean, t.rstd, *_running(lo, t, mean, var, momentum)])


@lowers(aten._batch_norm_with_update_functional.default)
def with_update_functional(
    lo: Lowering,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value,
    var: Value,
    momentum: float,
    eps: float,
) -> list[Value]:
    """The fourth result is cuDNN's reserve space."""
    if lo.results[3].shape != (0,):
        raise lo.otherwise()
    t = _trained(lo, x, weight, bias, eps)
    reserve = lo.b.fill(0, (0,), lo.results[3].dtype)
    moved = _running(lo, t, mean, var, momentum)
    return _as_results(lo, [t.y, t.mean, t.rstd, reserve, *moved])


@lowers(aten._native_batch_norm_legit.no_stats)
def legit_without_running(
    lo: Lowering,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    training: bool,
    momentum: float,
    eps: float,
) -> list[Value]:
    t = _trained(lo, x, weight, bias, eps)
    return _as_results(lo, [t.y, t.mean, t.rstd])


@lowers(aten.batch_norm_backward.default)
def batch_norm_backward(
    lo: Lowering,
    grad: Value,
    x: Value,
    weight: Value,
    mean: Value | None,
    var: Value | None,
    saved_mean: Value | None,
    saved_rstd: Value | None,
    update: bool,
    eps: float,
    wanted: Sequence[bool],
    reserve: Value,
) -> list[Value | None]:
    saved = (mean, var, saved_mean, saved_rstd)
    return native_batch_norm_backward(lo, grad, x, weight, *saved, update, eps, wanted)


@lowers(aten.native_batch_norm_backward.default)
def native_batch_norm_backward(
    lo: Lowering,
    grad: Value,
    x: Value,
    weight: Value | None,
    mean: Value | None,
    var: Value | None,
    saved_mean: Value | None,
    saved_rstd: Value | None,
    train: bool,
    eps: float,
    wanted: Sequence[bool],
) -> list[Value | None]:
    """As in norm_backward.py; with fixed statistics it is the gradient of a scale and a shift."""
    centre, rstd = (saved_mean, saved_rstd) if train else (mean, var)
    if centre is None or rstd is None or len(x.shape) < 2:
        raise lo.otherwise()
    _not_empty(lo, x)
    dtype = x.dtype
    g, x, centre, rstd = (lo.b.cast(v, wide(dtype)) for v in (grad, x, centre, rstd))
    if not train:
        rstd = inverse_deviation(lo, rstd, eps)
    centred = lo.b.pointwise("sub", x, _each(lo, centre, x))
    slope = lo.b.pointwise("mul", _total(lo, lo.b.pointwise("mul", g, centred)), rstd)
    total = _total(lo, g)
    scale = rstd
    if weight is not None:
        scale = lo.b.pointwise("mul", rstd, lo.b.cast(weight, rstd.dtype))
    to_input = g
    if train:
        count = lo.number(_count(x), total)
        average = lo.b.pointwise("div", total, count)
        tilt = lo.b.pointwise("mul", lo.b.pointwise("div", slope, count), rstd)
        to_input = lo.b.pointwise("sub", g, _each(lo, average, g))
        tilted = lo.b.pointwise("mul", centred, _each(lo, tilt, g))
        to_input = lo.b.pointwise("sub", to_input, tilted)
    to_input = lo.b.pointwise("mul", to_input, _each(lo, scale, g))
    parameters = dtype if weight is None else weight.dtype
    found = ((to_input, dtype), (slope, parameters), (total, parameters))
    return [lo.b.cast(v, d) if w else None for (v, d), w in zip(found, wanted, strict=True)]
