# SPDX-License-Identifier: Apache-2.0
"""Rows of pointwise ops: arithmetic, comparison, logic, transcendental functions, activations."""

import math
from typing import Any

import torch

from blade.backends.disc.ir import Value
from blade.backends.disc.ops.table import TABLE, Lowering, common_dtype, lowers

aten = torch.ops.aten

# name in ATen -> name in the kernel IR; the result dtype is what torch's meta kernel says
UNARY = (
    "neg abs sign exp exp2 expm1 log log2 log1p sqrt rsqrt reciprocal sin cos tan tanh sinh cosh "
    "asin acos atan erf erfc sigmoid floor ceil trunc bitwise_not"
).split()
PREDICATES = "isnan isinf logical_not".split()
ARITHMETIC = {"mul": "mul", "div": "div", "maximum": "maximum", "minimum": "minimum"}
ARITHMETIC |= {"atan2": "atan2", "fmod": "fmod", "remainder": "remainder", "pow": "pow"}
ARITHMETIC |= {"bitwise_and": "bitwise_and", "bitwise_or": "bitwise_or"}
ARITHMETIC |= {"bitwise_xor": "bitwise_xor", "__and__": "bitwise_and", "__or__": "bitwise_or"}
ARITHMETIC |= {"__xor__": "bitwise_xor", "floor_divide": "div_floor"}
ARITHMETIC |= {"bitwise_left_shift": "lshift", "bitwise_right_shift": "rshift"}
COMPARISONS = "eq ne lt le gt ge".split()
LOGICAL = "logical_and logical_or logical_xor".split()
OVERLOADS = ("default", "Tensor", "Scalar", "Tensor_Tensor", "Tensor_Scalar", "Scalar_Tensor")


def _overloads(name: str, wanted: tuple[str, ...] = OVERLOADS) -> list[torch._ops.OpOverload]:
    packet = getattr(aten, name)
    return [getattr(packet, o) for o in wanted if o in packet.overloads()]


def _unary(op: str) -> Any:
    def rule(lo: Lowering, x: Value) -> Value:
        return lo.b.pointwise(op, lo.b.cast(x, lo.dtype))

    return rule


def _predicate(op: str) -> Any:
    def rule(lo: Lowering, x: Value) -> Value:
        return lo.b.pointwise(op, x, dtype=torch.bool)

    return rule


def _binary(op: str) -> Any:
    def rule(lo: Lowering, a: Any, b: Any) -> Value:
        return lo.b.pointwise(op, lo.value(a, lo.dtype), lo.value(b, lo.dtype))

    return rule


def _comparison(op: str) -> Any:
    def rule(lo: Lowering, a: Any, b: Any) -> Value:
        dtype = common_dtype(a, b)
        return lo.b.pointwise(op, lo.value(a, dtype), lo.value(b, dtype), dtype=torch.bool)

    return rule


def _logical(op: str) -> Any:
    def rule(lo: Lowering, a: Any, b: Any) -> Value:
        return lo.b.pointwise(op, lo.value(a, torch.bool), lo.value(b, torch.bool))

    return rule


def _fill_table() -> None:
    rows = [(n, _unary(n)) for n in UNARY] + [(n, _predicate(n)) for n in PREDICATES]
    rows += [(n, _binary(op)) for n, op in ARITHMETIC.items()]
    rows += [(n, _comparison(n)) for n in COMPARISONS] + [(n, _logical(n)) for n in LOGICAL]
    for name, rule in rows:
        lowers(*_overloads(name))(rule)


_fill_table()
TABLE[aten.where.self] = lambda lo, c, a, b: lo.b.pointwise(
    "where", lo.value(c, torch.bool), lo.value(a, lo.dtype), lo.value(b, lo.dtype)
)


@lowers(*_overloads("add"))
def add(lo: Lowering, a: Any, b: Any, alpha: Any = 1) -> Value:
    y = lo.value(b, lo.dtype)
    if alpha != 1:
        y = lo.b.pointwise("mul", y, lo.number(alpha, y))
    return lo.b.pointwise("add", lo.value(a, lo.dtype), y)


@lowers(*_overloads("sub"))
def sub(lo: Lowering, a: Any, b: Any, alpha: Any = 1) -> Value:
    y = lo.value(b, lo.dtype)
    if alpha != 1:
        y = lo.b.pointwise("mul", y, lo.number(alpha, y))
    return lo.b.pointwise("sub", lo.value(a, lo.dtype), y)


@lowers(*_overloads("rsub"))
def rsub(lo: Lowering, a: Any, b: Any, alpha: Any = 1) -> Value:
    return sub(lo, b, a, alpha)


@lowers(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_mode(lo: Lowering, a: Any, b: Any, rounding_mode: str | None = None) -> Value:
    op = {None: "div", "floor": "div_floor", "trunc": "div_trunc"}[rounding_mode]
    return lo.b.pointwise(op, lo.value(a, lo.dtype), lo.value(b, lo.dtype))


@lowers(aten.square.default)
def square(lo: Lowering, x: Value) -> Value:
    y = lo.b.cast(x, lo.dtype)
    return lo.b.pointwise("mul", y, y)


@lowers(aten.round.default)
def round_(lo: Lowering, x: Value) -> Value:
    return lo.b.pointwise("round", x) if x.dtype.is_floating_point else x


@lowers(*_overloads("masked_fill"))
def masked_fill(lo: Lowering, x: Value, mask: Value, value: Any) -> Value:
    keep = lo.value(x, lo.dtype)
    return lo.b.pointwise("where", lo.value(mask, torch.bool), lo.value(value, lo.dtype), keep)


@lowers(*_overloads("where", ("ScalarSelf", "ScalarOther", "Scalar")))
def where_scalar(lo: Lowering, c: Value, a: Any, b: Any) -> Value:
    mask = lo.value(c, torch.bool)
    return lo.b.pointwise("where", mask, lo.value(a, lo.dtype), lo.value(b, lo.dtype))


@lowers(aten.clamp.default, aten.clamp.Tensor, aten.clip.default)
def clamp(lo: Lowering, x: Value, min: Any = None, max: Any = None) -> Value:
    y = lo.value(x, lo.dtype)
    if min is not None:
        y = lo.b.pointwise("maximum", y, lo.value(min, lo.dtype))
    return y if max is None else lo.b.pointwise("minimum", y, lo.value(max, lo.dtype))


@lowers(aten.clamp_min.default)
def clamp_min(lo: Lowering, x: Value, min: Any) -> Value:
    return clamp(lo, x, min)


@lowers(aten.clamp_max.default)
def clamp_max(lo: Lowering, x: Value, max: Any) -> Value:
    return clamp(lo, x, None, max)


@lowers(aten.addcmul.default)
def addcmul(lo: Lowering, x: Value, a: Value, b: Value, value: Any = 1) -> Value:
    product = lo.b.pointwise("mul", lo.value(a, lo.dtype), lo.value(b, lo.dtype))
    if value != 1:
        product = lo.b.pointwise("mul", product, lo.number(value, product))
    return lo.b.pointwise("add", lo.value(x, lo.dtype), product)


@lowers(aten.addcdiv.default)
def addcdiv(lo: Lowering, x: Value, a: Value, b: Value, value: Any = 1) -> Value:
    top = lo.value(a, lo.dtype)
    if value != 1:
        top = lo.b.pointwise("mul", top, lo.number(value, top))
    ratio = lo.b.pointwise("div", top, lo.value(b, lo.dtype))
    return lo.b.pointwise("add", lo.value(x, lo.dtype), ratio)


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


@lowers(aten.logit.default)
def logit(lo: Lowering, x: Value, eps: Any = None) -> Value:
    if eps is not None:
        x = clamp(lo, x, eps, 1 - eps)
    rest = lo.b.pointwise("sub", lo.number(1, x), x)
    return lo.b.pointwise("log", lo.b.pointwise("div", x, rest))


@lowers(aten.lerp.Scalar, aten.lerp.Tensor)
def lerp(lo: Lowering, a: Value, b: Value, weight: Any) -> Value:
    start, end = lo.value(a, lo.dtype), lo.value(b, lo.dtype)
    w = lo.value(weight, lo.dtype)
    return lo.b.pointwise("fma", w, lo.b.pointwise("sub", end, start), start)


def _positive(lo: Lowering, x: Value) -> Value:
    return lo.b.pointwise("gt", x, lo.number(0, x), dtype=torch.bool)
