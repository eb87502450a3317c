# SPDX-License-Identifier: Apache-2.0
"""Rows of loss functions and their gradients."""

from typing import Any

import torch

from blade.backends.disc.frontend.ops.activation import log_sigmoid
from blade.backends.disc.frontend.ops.gather import select_with_check
from blade.backends.disc.frontend.ops.reduction import wide
from blade.backends.disc.frontend.ops.table import Lowering, lowers
from blade.backends.disc.ir.graph import Shape, Value, numel

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2
"""Values of ``reduction``."""


def _op(lo: Lowering, name: str, a: Value, b: Value | float) -> Value:
    return lo.b.pointwise(name, a, b if isinstance(b, Value) else lo.number(b, a))


def _test(lo: Lowering, name: str, a: Value, limit: Any) -> Value:
    return lo.b.pointwise(name, a, lo.number(limit, a), dtype=torch.bool)


def _reduced(lo: Lowering, x: Value, reduction: int) -> Value:
    """``x`` itself, its mean or its sum."""
    if reduction == NONE:
        return x
    total = _sum_of_all(lo, lo.b.cast(x, wide(x.dtype)))
    if reduction != SUM:
        total = _op(lo, "div", total, lo.number(numel(x.shape), total))
    return lo.b.cast(total, x.dtype)


def _sum_of_all(lo: Lowering, x: Value) -> Value:
    axes = range(len(x.shape))
    return lo.b.reshape(lo.b.reduce("sum", x, axes), ()) if x.shape else x


def _same_shape(lo: Lowering, x: Value, y: Value) -> tuple[Value, Value]:
    """Both operands of an elementwise loss, broadcast to a common shape."""
    rank = max(len(x.shape), len(y.shape))
    tall, wide = ((1,) * (rank - len(v.shape)) + v.shape for v in (x, y))
    shape = [b if a == 1 else a for a, b in zip(tall, wide, strict=True)]
    return lo.value(x, lo.dtype, shape), lo.value(y, lo.dtype, shape)


def _share(lo: Lowering, grad: Value, shape: Shape, reduction: int) -> Value:
    """The part of ``grad`` that each element receives."""
    g = lo.b.cast(grad, lo.dtype)
    if reduction == MEAN:
        g = _op(lo, "div", g, lo.number(numel(shape), g))
    return lo.b.broadcast(g, shape)


@lowers(aten.mse_loss.default)
def mse_loss(lo: Lowering, x: Value, y: Value, reduction: int = MEAN) -> Value:
    gap = _op(lo, "sub", *_same_shape(lo, x, y))
    return _reduced(lo, _op(lo, "mul", gap, gap), reduction)


@lowers(aten.mse_loss_backward.default)
def mse_loss_backward(lo: Lowering, grad: Value, x: Value, y: Value, reduction: int) -> Value:
    gap = _op(lo, "sub", *_same_shape(lo, x, y))
    share = _share(lo, _op(lo, "mul", grad, 2.0), gap.shape, reduction)
    return _op(lo, "mul", gap, share)


@lowers(aten.smooth_l1_loss.default)
def smooth_l1_loss(
    lo: Lowering, x: Value, y: Value, reduction: int = MEAN, beta: float = 1.0
) -> Value:
    far = lo.b.pointwise("abs", _op(lo, "sub", *_same_shape(lo, x, y)))
    if beta == 0:
        return _reduced(lo, far, reduction)
    near = _op(lo, "div", _op(lo, "mul", _op(lo, "mul", far, 0.5), far), beta)
    past = _op(lo, "sub", far, 0.5 * beta)
    loss = lo.b.pointwise("where", _test(lo, "lt", far, beta), near, past)
    return _reduced(lo, loss, reduction)


@lowers(aten.smooth_l1_loss_backward.default)
def smooth_l1_loss_backward(
    lo: Lowering, grad: Value, x: Value, y: Value, reduction: int, beta: float
) -> Value:
    gap = _op(lo, "sub", *_same_shape(lo, x, y))
    share = _share(lo, grad, gap.shape, reduction)
    near = gap if beta == 0 else _op(lo, "div", gap, beta)
    return _clipped(lo, gap, beta, (near, 1.0), share)


@lowers(aten.huber_loss.default)
def huber_loss(
    lo: Lowering, x: Value, y: Value, reduction: int = MEAN, delta: float = 1.0
) -> Value:
    far = lo.b.pointwise("abs", _op(lo, "sub", *_same_shape(lo, x, y)))
    near = _op(lo, "mul", _op(lo, "mul", far, 0.5), far)
    past = _op(lo, "mul", _op(lo, "sub", far, 0.5 * delta), delta)
    loss = lo.b.pointwise("where", _test(lo, "le", far, delta), near, past)
    return _reduced(lo, loss, reduction)


@lowers(aten.huber_loss_backward.default)
def huber_loss_backward(
    lo: Lowering, grad: Value, x: Value, y: Value, reduction: int, delta: float
) -> Value:
    gap = _op(lo, "sub", *_same_shape(lo, x, y))
    share = _share(lo, grad, gap.shape, reduction)
    return _clipped(lo, gap, delta, (gap, delta), share)


def _clipped(
    lo: Lowering, gap: Value, limit: float, slopes: tuple[Value, float], share: Value
) -> Value:
    """``share`` times the slope: the first one within ``limit`` of zero, else plus or minus the second."""
    near, far = slopes
    up, down = (_op(lo, "mul", share, s) for s in (far, -far))
    middle = _op(lo, "mul", near, share)
    low = lo.b.pointwise("where", _test(lo, "le", gap, -limit), down, middle)
    return lo.b.pointwise("where", _test(lo, "ge", gap, limit), up, low)


@lowers(aten.binary_cross_entropy.default)
def binary_cross_entropy(
    lo: Lowering, x: Value, y: Value, weight: Value | None = None, reduction: int = MEAN
) -> Value:
    """Logarithms are clamped to at least -100, as in torch."""
    x, y = _same_shape(lo, x, y)
    inverse = lo.b.pointwise("log1p", lo.b.pointwise("neg", x))
    no, yes = (_op(lo, "maximum", v, -100.0) for v in (inverse, lo.b.pointwise("log", x)))
    loss = _op(lo, "sub", _op(lo, "mul", _op(lo, "sub", y, 1.0), no), _op(lo, "mul", y, yes))
    if weight is not None:
        loss = _op(lo, "mul", loss, lo.value(weight, lo.dtype, loss.shape))
    return _reduced(lo, loss, reduction)


@lowers(aten.binary_cross_entropy_backward.default)
def binary_cross_entropy_backward(
    lo: Lowering,
    grad: Value,
    x: Value,
    y: Value,
    weight: Value | None = None,
    reduction: int = MEAN,
) -> Value:
    x, y = _same_shape(lo, x, y)
    slope = _op(lo, "mul", _op(lo, "sub", lo.number(1, x), x), x)
    slope = _op(lo, "maximum", slope, 1e-12)
    result = _op(lo, "mul", _share(lo, grad, x.shape, reduction), _op(lo, "sub", x, y))
    result = _op(lo, "div", result, slope)
    if weight is not None:
        result = _op(lo, "mul", result, lo.value(weight, lo.dtype, x.shape))
    return result


@lowers(aten.binary_cross_entropy_with_logits.default)
def binary_cross_entropy_with_logits(
    lo: Lowering,
    x: Value,
    y: Value,
    weight: Value | None = None,
    positive: Value | None = None,
    reduction: int = MEAN,
) -> Value:
    x, y = _same_shape(lo, x, y)
    log = log_sigmoid(lo, x)
    if positive is not None:
        more = _op(lo, "sub", lo.value(positive, lo.dtype, x.shape), 1.0)
        log = _op(lo, "mul", log, _op(lo, "add", _op(lo, "mul", more, y), 1.0))
    loss = _op(lo, "sub", _op(lo, "mul", _op(lo, "sub", lo.number(1, y), y), x), log)
    if weight is not None:
        loss = _op(lo, "mul", loss, lo.value(weight, lo.dtype, x.shape))
    return _reduced(lo, loss, reduction)


# --- negative log likelihood: [N, C, ...] and the class of each of [N, ...] ---


@lowers(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss_forward(
    lo: Lowering, x: Value, target: Value, weight: Value | None, reduction: int, ignored: int
) -> list[Value]:
    if len(x.shape) < 2 or target.dtype != torch.int64:
        raise lo.otherwise()
    known = _test(lo, "ne", target, ignored)
    safe = lo.b.pointwise("where", known, target, lo.number(0, target))
    zero = lo.b.fill(0, target.shape, x.dtype)
    kept = (0, None, *range(1, len(target.shape)))
    loss = lo.b.pointwise("neg", select_with_check(lo, x, 1, safe, kept))
    share = lo.b.fill(1, target.shape, x.dtype)
    if weight is not None:
        share = select_with_check(lo, weight, 0, safe, (None,))
        loss = _op(lo, "mul", loss, share)
    loss = lo.b.pointwise("where", known, loss, zero)
    if reduction == NONE:
        return [loss, lo.b.fill(0, (), x.dtype)]
    count = _sum_of_all(lo, lo.b.pointwise("where", known, share, zero))
    total = _sum_of_all(lo, loss)
    return [_op(lo, "div", total, count) if reduction == MEAN else total, count]


@lowers(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def nll_loss_backward(
    lo: Lowering,
    grad: Value,
    x: Value,
    target: Value,
    weight: Value | None,
    reduction: int,
    ignored: int,
    count: Value,
) -> Value:
    """Nonzero only at the target class; the loss itself has checked that the target is a class."""
    if len(x.shape) < 2 or target.dtype != torch.int64:
        raise lo.otherwise()
    axes = (0, *range(2, len(x.shape)))
    share = lo.b.cast(grad, lo.dtype)
    if reduction == MEAN:
        share = _op(lo, "div", share, lo.b.cast(count, lo.dtype))
    share = lo.b.broadcast(lo.b.pointwise("neg", share), target.shape)
    known = _test(lo, "ne", target, ignored)
    share = lo.b.pointwise("where", known, share, lo.number(0, share))
    share, wanted = (
        lo.b.make("broadcast", (v,), x.shape, v.dtype, axes=axes) for v in (share, target)
    )
    if weight is not None:
        each = lo.b.make("broadcast", (weight,), x.shape, weight.dtype, axes=(1,))
        share = _op(lo, "mul", share, each)
    own = lo.b.make("iota", (), x.shape, torch.int64, axis=1)
    hit = lo.b.pointwise("eq", own, wanted, dtype=torch.bool)
    return lo.b.pointwise("where", hit, share, lo.number(0, share))
