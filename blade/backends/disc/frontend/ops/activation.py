# SPDX-License-Identifier: Apache-2.0
"""Rows of activation functions."""

import math
from typing import Any

import torch

from blade.backends.disc.frontend.ops.pointwise import clamp
from blade.backends.disc.frontend.ops.table import Lowering, lowers
from blade.backends.disc.ir.graph import Value

aten = torch.ops.aten


@lowers(aten.relu.default)
def relu(lo: Lowering, x: Value) -> Value:
    return lo.b.pointwise("maximum", x, lo.number(0, x))


@lowers(aten.relu6.default)
def relu6(lo: Lowering, x: Value) -> Value:
    return clamp(lo, x, 0, 6)


@lowers(aten.hardtanh.default)
def hardtanh(lo: Lowering, x: Value, min_val: Any = -1, max_val: Any = 1) -> Value:
    return clamp(lo, x, min_val, max_val)


@lowers(aten.leaky_relu.default)
def leaky_relu(lo: Lowering, x: Value, negative_slope: Any = 0.01) -> Value:
    below = lo.b.pointwise("mul", x, lo.number(negative_slope, x))
    return lo.b.pointwise("where", _positive(lo, x), x, below)


@lowers(aten.silu.default)
def silu(lo: Lowering, x: Value) -> Value:
    return lo.b.pointwise("mul", x, lo.b.pointwise("sigmoid", x))


@lowers(aten.gelu.default)
def gelu(lo: Lowering, x: Value, approximate: str = "none") -> Value:
    half = lo.b.pointwise("mul", x, lo.number(0.5, x))
    if approximate == "tanh":
        cube = lo.b.pointwise("mul", lo.b.pointwise("mul", x, x), x)
        inner = lo.b.pointwise("fma", cube, lo.number(0.044715, x), x)
        inner = lo.b.pointwise("mul", inner, lo.number(math.sqrt(2 / math.pi), x))
        bell = lo.b.pointwise("tanh", inner)
    else:
        bell = lo.b.pointwise("erf", lo.b.pointwise("mul", x, lo.number(math.sqrt(0.5), x)))
    return lo.b.pointwise("mul", half, lo.b.pointwise("add", bell, lo.number(1, x)))


@lowers(aten.hardsigmoid.default)
def hardsigmoid(lo: Lowering, x: Value) -> Value:
    shifted = clamp(lo, lo.b.pointwise("add", x, lo.number(3, x)), 0, 6)
    return lo.b.pointwise("div", shifted, lo.number(6, x))


@lowers(aten.hardswish.default)
def hardswish(lo: Lowering, x: Value) -> Value:
    shifted = clamp(lo, lo.b.pointwise("add", x, lo.number(3, x)), 0, 6)
    return lo.b.pointwise("div", lo.b.pointwise("mul", x, shifted), lo.number(6, x))


@lowers(aten.elu.default)
def elu(lo: Lowering, x: Value, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Value:
    inner = lo.b.pointwise("expm1", lo.b.pointwise("mul", x, lo.number(input_scale, x)))
    below = lo.b.pointwise("mul", inner, lo.number(alpha * scale, x))
    above = lo.b.pointwise("mul", x, lo.number(scale, x))
    return lo.b.pointwise("where", _positive(lo, x), above, below)


@lowers(aten.selu.default)
def selu(lo: Lowering, x: Value) -> Value:
    return elu(lo, x, 1.6732632423543772, 1.0507009873554805)


@lowers(aten.softplus.default)
def softplus(lo: Lowering, x: Value, beta: Any = 1, threshold: Any = 20) -> Value:
    scaled = lo.b.pointwise("mul", x, lo.number(beta, x))
    soft = lo.b.pointwise("log1p", lo.b.pointwise("exp", scaled))
    soft = lo.b.pointwise("div", soft, lo.number(beta, x))
    high = lo.b.pointwise("gt", scaled, lo.number(threshold, x), dtype=torch.bool)
    return lo.b.pointwise("where", high, x, soft)


@lowers(aten.mish.default)
def mish(lo: Lowering, x: Value) -> Value:
    return lo.b.pointwise("mul", x, lo.b.pointwise("tanh", softplus(lo, x)))


def _positive(lo: Lowering, x: Value) -> Value:
    return lo.b.pointwise("gt", x, lo.number(0, x), dtype=torch.bool)


def _when(lo: Lowering, op: str, x: Value, limit: Any, yes: Value, no: Value) -> Value:
    """``yes`` where ``x op limit``, else ``no``."""
    condition = lo.b.pointwise(op, x, lo.number(limit, x), dtype=torch.bool)
    return lo.b.pointwise("where", condition, yes, no)


@lowers(aten.celu.default)
def celu(lo: Lowering, x: Value, alpha: Any = 1.0) -> Value:
    return elu(lo, x, alpha, 1, 1 / alpha)


@lowers(aten.threshold.default)
def threshold(lo: Lowering, x: Value, threshold: Any, value: Any) -> Value:
    return _when(lo, "le", x, threshold, lo.number(value, x), x)


@lowers(aten.hardshrink.default)
def hardshrink(lo: Lowering, x: Value, lambd: Any = 0.5) -> Value:
    low = _when(lo, "ge", x, -lambd, lo.number(0, x), x)
    return _when(lo, "le", x, lambd, low, x)


@lowers(aten.softshrink.default)
def softshrink(lo: Lowering, x: Value, lambd: Any = 0.5) -> Value:
    step = lo.number(lambd, x)
    rest = lo.b.pointwise("mul", x, lo.number(0, x))  # keeps NaN
    low = _when(lo, "lt", x, -lambd, lo.b.pointwise("add", x, step), rest)
    return _when(lo, "gt", x, lambd, lo.b.pointwise("sub", x, step), low)


@lowers(aten.log_sigmoid.default)
def log_sigmoid(lo: Lowering, x: Value) -> Value:
    small = lo.b.pointwise("minimum", x, lo.number(0, x))
    decay = lo.b.pointwise("exp", lo.b.pointwise("neg", lo.b.pointwise("abs", x)))
    return lo.b.pointwise("sub", small, lo.b.pointwise("log1p", decay))


@lowers(aten.prelu.default)
def prelu(lo: Lowering, x: Value, weight: Value) -> Value:
    if len(weight.shape) == 1 and weight.shape[0] != 1 and len(x.shape) > 1:
        ones = (1,) * (len(x.shape) - 2)
        weight = lo.b.reshape(weight, (weight.shape[0], *ones))
    elif not x.shape:
        weight = lo.b.reshape(weight, ())
    below = lo.b.pointwise("mul", x, lo.value(weight, x.dtype))
    return lo.b.pointwise("where", _positive(lo, x), x, below)


@lowers(aten.glu.default)
def glu(lo: Lowering, x: Value, dim: int = -1) -> Value:
    axis = dim % len(x.shape)
    size = lo.shape[axis]
    a, gate = (lo.b.slice(x, axis, start, 1, size) for start in (0, size))
    return lo.b.pointwise("mul", a, lo.b.pointwise("sigmoid", gate))
