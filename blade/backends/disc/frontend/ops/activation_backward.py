# SPDX-License-Identifier: Apache-2.0
"""Rows of gradients of activations, softmax and dropout: pointwise in the gradient and saved values."""

import math
from typing import Any

import torch

from blade.backends.disc.frontend.ops.activation import log_sigmoid, softplus
from blade.backends.disc.frontend.ops.reduction import axes_of
from blade.backends.disc.frontend.ops.table import Lowering, lowers
from blade.backends.disc.ir.graph import Value

aten = torch.ops.aten


def _both(lo: Lowering, a: Value, b: Value) -> tuple[Value, Value]:
    return lo.value(a, lo.dtype), lo.value(b, lo.dtype)


def _mul(lo: Lowering, a: Value, b: Value | float) -> Value:
    return lo.b.pointwise("mul", a, b if isinstance(b, Value) else lo.number(b, a))


def _add(lo: Lowering, a: Value, b: Value | float) -> Value:
    return lo.b.pointwise("add", a, b if isinstance(b, Value) else lo.number(b, a))


def _one_minus(lo: Lowering, a: Value) -> Value:
    return lo.b.pointwise("sub", lo.number(1, a), a)


def _test(lo: Lowering, op: str, x: Value, limit: Any) -> Value:
    return lo.b.pointwise(op, x, lo.number(limit, x), dtype=torch.bool)


def _where(lo: Lowering, condition: Value, yes: Value | float, no: Value | float) -> Value:
    like = yes if isinstance(yes, Value) else no
    assert isinstance(like, Value), like
    chosen = [v if isinstance(v, Value) else lo.number(v, like) for v in (yes, no)]
    return lo.b.pointwise("where", condition, *chosen)


@lowers(aten.threshold_backward.default)
def threshold_backward(lo: Lowering, grad: Value, x: Value, threshold: Any) -> Value:
    g, x = _both(lo, grad, x)
    return _where(lo, _test(lo, "le", x, threshold), 0.0, g)


@lowers(aten.hardtanh_backward.default)
def hardtanh_backward(lo: Lowering, grad: Value, x: Value, low: Any, high: Any) -> Value:
    g, x = _both(lo, grad, x)
    below, above = _test(lo, "le", x, low), _test(lo, "ge", x, high)
    return _where(lo, lo.b.pointwise("bitwise_or", below, above), 0.0, g)


@lowers(aten.leaky_relu_backward.default)
def leaky_relu_backward(lo: Lowering, grad: Value, x: Value, slope: Any, is_result: bool) -> Value:
    g, x = _both(lo, grad, x)
    return _where(lo, _test(lo, "gt", x, 0), g, _mul(lo, g, slope))


@lowers(aten.sigmoid_backward.default)
def sigmoid_backward(lo: Lowering, grad: Value, y: Value) -> Value:
    g, y = _both(lo, grad, y)
    return _mul(lo, g, _mul(lo, _one_minus(lo, y), y))


@lowers(aten.tanh_backward.default)
def tanh_backward(lo: Lowering, grad: Value, y: Value) -> Value:
    g, y = _both(lo, grad, y)
    return _mul(lo, g, _one_minus(lo, _mul(lo, y, y)))


@lowers(aten.silu_backward.default)
def silu_backward(lo: Lowering, grad: Value, x: Value) -> Value:
    g, x = _both(lo, grad, x)
    s = lo.b.pointwise("sigmoid", x)
    slope = lo.b.pointwise("fma", x, _one_minus(lo, s), lo.number(1, x))
    return _mul(lo, g, _mul(lo, s, slope))


@lowers(aten.gelu_backward.default)
def gelu_backward(lo: Lowering, grad: Value, x: Value, approximate: str = "none") -> Value:
    g, x = _both(lo, grad, x)
    slope = _tanh_gelu_slope(lo, x) if approximate == "tanh" else _gelu_slope(lo, x)
    return _mul(lo, g, slope)


def _gelu_slope(lo: Lowering, x: Value) -> Value:
    """Phi(x) + x * phi(x), where Phi and phi are the normal distribution and its density."""
    below = lo.b.pointwise("erf", _mul(lo, x, math.sqrt(0.5)))
    below = _mul(lo, _add(lo, below, 1), 0.5)
    density = lo.b.pointwise("exp", _mul(lo, _mul(lo, x, x), -0.5))
    density = _mul(lo, density, 1 / math.sqrt(2 * math.pi))
    return lo.b.pointwise("fma", x, density, below)


def _tanh_gelu_slope(lo: Lowering, x: Value) -> Value:
    beta, kappa = math.sqrt(2 / math.pi), 0.044715
    square = _mul(lo, x, x)
    inner = _mul(lo, lo.b.pointwise("fma", _mul(lo, square, x), lo.number(kappa, x), x), beta)
    bell = lo.b.pointwise("tanh", inner)
    rises = lo.b.pointwise("fma", square, lo.number(3 * kappa, x), lo.number(1, x))
    rises = _mul(lo, _mul(lo, rises, beta), _one_minus(lo, _mul(lo, bell, bell)))
    half = _mul(lo, x, 0.5)
    return lo.b.pointwise("fma", half, rises, _mul(lo, _add(lo, bell, 1), 0.5))


@lowers(aten.hardsigmoid_backward.default)
def hardsigmoid_backward(lo: Lowering, grad: Value, x: Value) -> Value:
    g, x = _both(lo, grad, x)
    inside = lo.b.pointwise("bitwise_and", _test(lo, "gt", x, -3), _test(lo, "lt", x, 3))
    sixth = torch.tensor(
        1 / 6, dtype=torch.float32
    ).item()  # rounded to float32 even in float64, as in torch
    return _where(lo, inside, _mul(lo, g, sixth), 0.0)


@lowers(aten.hardswish_backward.default)
def hardswish_backward(lo: Lowering, grad: Value, x: Value) -> Value:
    g, x = _both(lo, grad, x)
    slope = _add(lo, lo.b.pointwise("div", x, lo.number(3, x)), 0.5)
    rising = _where(lo, _test(lo, "lt", x, 3), _mul(lo, g, slope), g)
    return _where(lo, _test(lo, "le", x, -3), 0.0, rising)


@lowers(aten.elu_backward.default)
def elu_backward(
    lo: Lowering,
    grad: Value,
    alpha: Any,
    scale: Any,
    input_scale: Any,
    is_result: bool,
    saved: Value,
) -> Value:
    g, x = _both(lo, grad, saved)
    low = alpha * scale
    if is_result:
        slope = _mul(lo, _add(lo, x, low), input_scale)
    else:
        slope = _mul(lo, lo.b.pointwise("exp", _mul(lo, x, input_scale)), input_scale * low)
    below = _mul(lo, g, slope)
    return _where(lo, _test(lo, "le", x, 0), below, _mul(lo, g, scale))


@lowers(aten.softplus_backward.default)
def softplus_backward(lo: Lowering, grad: Value, x: Value, beta: Any, threshold: Any) -> Value:
    g, x = _both(lo, grad, x)
    scaled = _mul(lo, x, beta)
    soft = _mul(lo, g, lo.b.pointwise("sigmoid", scaled))
    return _where(lo, _test(lo, "gt", scaled, threshold), g, soft)


@lowers(aten.mish_backward.default)
def mish_backward(lo: Lowering, grad: Value, x: Value) -> Value:
    g, x = _both(lo, grad, x)
    bell = lo.b.pointwise("tanh", softplus(lo, x))
    rises = _one_minus(lo, _mul(lo, bell, bell))
    slope = _mul(lo, _mul(lo, x, lo.b.pointwise("sigmoid", x)), rises)
    return _mul(lo, g, _add(lo, bell, slope))


@lowers(aten.log_sigmoid_forward.default)
def log_sigmoid_forward(lo: Lowering, x: Value) -> list[Value]:
    """The second result is the buffer that the gradient reads on CPU."""
    decay = lo.b.pointwise("exp", lo.b.pointwise("neg", lo.b.pointwise("abs", x)))
    if lo.results[1].shape != x.shape:
        raise lo.otherwise()
    return [log_sigmoid(lo, x), decay]


@lowers(aten.log_sigmoid_backward.default)
def log_sigmoid_backward(lo: Lowering, grad: Value, x: Value, buffer: Value) -> Value:
    g, x = _both(lo, grad, x)
    return _mul(lo, g, lo.b.pointwise("sigmoid", lo.b.pointwise("neg", x)))


@lowers(aten.glu_backward.default)
def glu_backward(lo: Lowering, grad: Value, x: Value, dim: int) -> Value:
    axis = dim % len(x.shape)
    size = grad.shape[axis]
    a, gate = (lo.b.slice(x, axis, start, 1, size) for start in (0, size))
    s = lo.b.pointwise("sigmoid", gate)
    first = _mul(lo, grad, s)
    second = _mul(lo, _mul(lo, first, a), _one_minus(lo, s))
    return lo.b.make("concat", (first, second), lo.shape, lo.dtype, axis=axis)


@lowers(aten._prelu_kernel.default)
def prelu_kernel(lo: Lowering, x: Value, weight: Value) -> Value:
    w = lo.value(weight, lo.dtype)
    return _where(lo, _test(lo, "gt", x, 0), x, _mul(lo, x, w))


@lowers(aten._prelu_kernel_backward.default)
def prelu_kernel_backward(lo: Lowering, grad: Value, x: Value, weight: Value) -> list[Value]:
    g, x = _both(lo, grad, x)
    above = _test(lo, "gt", x, 0)
    to_input = _where(lo, above, g, _mul(lo, g, lo.value(weight, lo.dtype)))
    return [to_input, _where(lo, above, 0.0, _mul(lo, g, x))]


@lowers(aten.native_dropout_backward.default)
def native_dropout_backward(lo: Lowering, grad: Value, mask: Value, scale: float) -> Value:
    g, kept = _both(lo, grad, mask)
    return _mul(lo, _mul(lo, g, kept), scale)


@lowers(aten._softmax_backward_data.default)
def softmax_backward(lo: Lowering, grad: Value, y: Value, dim: int, dtype: Any) -> Value:
    """(g - sum(g * y)) * y"""
    g = lo.value(grad, y.dtype)
    total = _mul(lo, g, y)
    if y.shape:
        total = lo.b.broadcast(lo.b.reduce("sum", total, axes_of(y, dim)), y.shape)
    return lo.b.cast(_mul(lo, lo.b.pointwise("sub", g, total), y), lo.dtype)


@lowers(aten._log_softmax_backward_data.default)
def log_softmax_backward(lo: Lowering, grad: Value, y: Value, dim: int, dtype: Any) -> Value:
    """g - exp(y) * sum(g)"""
    g = lo.value(grad, y.dtype)
    total = lo.b.broadcast(lo.b.reduce("sum", g, axes_of(y, dim)), y.shape) if y.shape else g
    part = _mul(lo, lo.b.pointwise("exp", y), total)
    return lo.b.cast(lo.b.pointwise("sub", g, part), lo.dtype)
