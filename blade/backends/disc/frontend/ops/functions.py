# SPDX-License-Identifier: Apache-2.0
"""Rows of mathematical functions composed of several pointwise ops."""

import math
from typing import Any

import torch

from blade.backends.disc.frontend.ops.pointwise import clamp
from blade.backends.disc.frontend.ops.table import Lowering, lowers
from blade.backends.disc.ir.graph import Value
from blade.core.dtypes import HALVES

aten = torch.ops.aten


@lowers(aten.logit.default)
def logit(lo: Lowering, x: Value, eps: Any = None) -> Value:
    if eps is not None:
        x = clamp(lo, x, eps, 1 - eps)
    rest = lo.b.pointwise("sub", lo.number(1, x), x)
    return lo.b.pointwise("log", lo.b.pointwise("div", x, rest))


@lowers(aten.lerp.Scalar, aten.lerp.Tensor)
def lerp(lo: Lowering, a: Value, b: Value, weight: Any) -> Value:
    """From the nearer end, as torch does: exact at both, and infinite where that is."""
    start, end = lo.value(a, lo.dtype), lo.value(b, lo.dtype)
    w = lo.value(weight, lo.dtype)
    way = lo.b.pointwise("sub", end, start)
    back = lo.b.pointwise("sub", w, lo.number(1, w))
    if not isinstance(weight, Value):
        near = (w, way, start) if abs(weight) < 0.5 else (back, way, end)
        return lo.b.pointwise("fma", *near)
    forward = lo.b.pointwise("fma", w, way, start)
    is_near = lo.b.pointwise("lt", lo.b.pointwise("abs", w), lo.number(0.5, w), dtype=torch.bool)
    return lo.b.pointwise("where", is_near, forward, lo.b.pointwise("fma", back, way, end))


@lowers(aten.frac.default)
def frac(lo: Lowering, x: Value) -> Value:
    return lo.b.pointwise("sub", x, lo.b.pointwise("trunc", x))


@lowers(aten.log10.default)
def log10(lo: Lowering, x: Value) -> Value:
    y = lo.b.pointwise("log", lo.b.cast(x, lo.dtype))
    return lo.b.pointwise("mul", y, lo.number(1 / math.log(10), y))


@lowers(aten.sinc.default)
def sinc(lo: Lowering, x: Value) -> Value:
    """16 bits are computed in float32, as torch does: rounded to them, pi would move the zeros."""
    y = lo.b.cast(x, torch.float32 if lo.dtype in HALVES else lo.dtype)
    angle = lo.b.pointwise("mul", y, lo.number(math.pi, y))
    ratio = lo.b.pointwise("div", lo.b.pointwise("sin", angle), angle)
    is_zero = lo.b.pointwise("eq", y, lo.number(0, y), dtype=torch.bool)
    return lo.b.cast(lo.b.pointwise("where", is_zero, lo.number(1, y), ratio), lo.dtype)


@lowers(aten.isfinite.default)
def isfinite(lo: Lowering, x: Value) -> Value:
    if not x.dtype.is_floating_point:
        return lo.b.fill(True, lo.shape, torch.bool)
    finite = lo.number(math.inf, x)
    return lo.b.pointwise("lt", lo.b.pointwise("abs", x), finite, dtype=torch.bool)


@lowers(aten.positive.default)
def positive(lo: Lowering, x: Value) -> Value:
    return x


@lowers(aten.deg2rad.default)
def deg2rad(lo: Lowering, x: Value) -> Value:
    y = lo.b.cast(x, lo.dtype)
    return lo.b.pointwise("mul", y, lo.number(math.pi / 180, y))


@lowers(aten.rad2deg.default)
def rad2deg(lo: Lowering, x: Value) -> Value:
    y = lo.b.cast(x, lo.dtype)
    return lo.b.pointwise("mul", y, lo.number(180 / math.pi, y))


@lowers(aten.nan_to_num.default)
def nan_to_num(
    lo: Lowering, x: Value, nan: Any = None, posinf: Any = None, neginf: Any = None
) -> Value:
    if not x.dtype.is_floating_point:
        return x
    limits = torch.finfo(x.dtype)
    high, low = (
        (limits.max if posinf is None else posinf),
        (limits.min if neginf is None else neginf),
    )
    missing = lo.b.pointwise("isnan", x, dtype=torch.bool)
    y = lo.b.pointwise("where", missing, lo.number(nan or 0.0, x), x)
    for infinity, number in ((math.inf, high), (-math.inf, low)):
        at = lo.b.pointwise("eq", x, lo.number(infinity, x), dtype=torch.bool)
        y = lo.b.pointwise("where", at, lo.number(number, x), y)
    return y


@lowers(aten.fmax.default)
def fmax(lo: Lowering, a: Any, b: Any) -> Value:
    return _ignoring_nan(lo, "maximum", a, b)


@lowers(aten.fmin.default)
def fmin(lo: Lowering, a: Any, b: Any) -> Value:
    return _ignoring_nan(lo, "minimum", a, b)


def _ignoring_nan(lo: Lowering, op: str, a: Any, b: Any) -> Value:
    x, y = lo.value(a, lo.dtype), lo.value(b, lo.dtype)
    best = lo.b.pointwise(op, x, y)
    if not lo.dtype.is_floating_point:
        return best
    for candidate, other in ((x, y), (y, x)):
        missing = lo.b.pointwise("isnan", candidate, dtype=torch.bool)
        best = lo.b.pointwise("where", missing, other, best)
    return best


@lowers(aten.xlogy.Tensor)
def xlogy(lo: Lowering, a: Value, b: Value) -> Value:
    x, y = lo.value(a, lo.dtype), lo.value(b, lo.dtype)
    zero = lo.number(0, x)
    product = lo.b.pointwise("mul", x, lo.b.pointwise("log", y))
    at_zero = lo.b.pointwise("eq", x, zero, dtype=torch.bool)
    kept = lo.b.pointwise("where", at_zero, zero, product)
    return lo.b.pointwise("where", lo.b.pointwise("isnan", y, dtype=torch.bool), y, kept)


@lowers(aten.logaddexp.default)
def logaddexp(lo: Lowering, a: Value, b: Value) -> Value:
    x, y = lo.value(a, lo.dtype), lo.value(b, lo.dtype)
    gap = lo.b.pointwise("neg", lo.b.pointwise("abs", lo.b.pointwise("sub", x, y)))
    more = lo.b.pointwise("log1p", lo.b.pointwise("exp", gap))
    result = lo.b.pointwise("add", lo.b.pointwise("maximum", x, y), more)
    infinite = lo.b.pointwise("isinf", x, dtype=torch.bool)
    same = lo.b.pointwise("eq", x, y, dtype=torch.bool)
    both = lo.b.pointwise("bitwise_and", infinite, same, dtype=torch.bool)
    return lo.b.pointwise("where", both, x, result)


@lowers(aten.pow.Tensor_Tensor, aten.pow.Scalar, aten.pow.Tensor_Scalar)
def power(lo: Lowering, a: Any, b: Any) -> Value:
    if isinstance(a, Value) and isinstance(b, (int, float)) and lo.dtype.is_floating_point:
        simple = _simple_power(lo, lo.value(a, lo.dtype), b)
        if simple is not None:
            return simple
    return lo.b.pointwise("pow", lo.value(a, lo.dtype), lo.value(b, lo.dtype))


def _simple_power(lo: Lowering, x: Value, exponent: float) -> Value | None:
    """``x`` to one of the exponents that torch special-cases; matters for sqrt(-inf) and -0."""
    if exponent in (0.5, -0.5, -1):
        return lo.b.pointwise({0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}[exponent], x)
    if exponent not in (2, 3, -2):
        return None
    y = lo.b.pointwise("mul", x, x)
    if exponent == 3:
        return lo.b.pointwise("mul", y, x)
    return y if exponent == 2 else lo.b.pointwise("reciprocal", y)


@lowers(aten.float_power.Tensor_Scalar)
def float_power(lo: Lowering, x: Value, exponent: Any) -> Value:
    return power(lo, x, float(exponent))
