# SPDX-License-Identifier: Apache-2.0
"""Rows of pointwise ops: arithmetic, comparison, logic, transcendental functions, activations."""

from typing import Any

import sympy
import torch

from blade.backends.disc.frontend.ops.table import (
    TABLE,
    Lowering,
    common_dtype,
    lowers,
)
from blade.backends.disc.ir.graph import Value
from blade.core.dtypes import HALVES

aten = torch.ops.aten

# name in ATen -> name in the kernel IR; torch's meta kernel gives the result dtype
UNARY = (
    "neg exp exp2 expm1 log log2 log1p sqrt rsqrt reciprocal sin cos tan tanh sinh cosh "
    "asin acos atan erf erfc sigmoid floor ceil trunc bitwise_not"
).split()
PREDICATES = "isnan isinf".split()
ARITHMETIC = {"maximum": "maximum", "minimum": "minimum", "copysign": "copysign"}
ARITHMETIC |= {"atan2": "atan2", "fmod": "fmod", "remainder": "remainder"}
ARITHMETIC |= {"bitwise_and": "bitwise_and", "bitwise_or": "bitwise_or"}
ARITHMETIC |= {"bitwise_xor": "bitwise_xor", "__and__": "bitwise_and", "__or__": "bitwise_or"}
ARITHMETIC |= {"__xor__": "bitwise_xor", "floor_divide": "div_floor"}
ARITHMETIC |= {"bitwise_left_shift": "lshift", "bitwise_right_shift": "rshift"}
ARITHMETIC |= {"__lshift__": "lshift", "__rshift__": "rshift"}
COMPARISONS = "eq ne lt le gt ge".split()
LOGICAL = "logical_and logical_or logical_xor".split()
OVERLOADS = ("default", "Tensor", "Scalar", "Tensor_Tensor", "Tensor_Scalar", "Scalar_Tensor")


def _overloads(name: str, wanted: tuple[str, ...] = OVERLOADS) -> list[torch._ops.OpOverload]:
    """The wanted overloads of ``aten.name`` except those on Python numbers."""
    packet = getattr(aten, name)
    found = [getattr(packet, o) for o in wanted if o in packet.overloads()]
    return [o for o in found if str(o._schema.returns[0].type) == "Tensor"]


def _unary(op: str) -> Any:
    def rule(lo: Lowering, x: Value) -> Value:
        return lo.b.pointwise(op, lo.b.cast(x, lo.dtype))

    return rule


def _predicate(op: str) -> Any:
    def rule(lo: Lowering, x: Value) -> Value:
        if not x.dtype.is_floating_point:
            return lo.b.fill(False, lo.shape, torch.bool)
        if op == "isinf" and x.dtype == torch.float16:  # kernels compute it in float32
            x = lo.b.cast(x, torch.float32)
            least = lo.number(65520, x)  # rounded to infinity
            return lo.b.pointwise("ge", lo.b.pointwise("abs", x), least, dtype=torch.bool)
        return lo.b.pointwise(op, x, dtype=torch.bool)

    return rule


def _of_magnitude(op: str) -> Any:
    def rule(lo: Lowering, x: Value) -> Value:
        if x.dtype == torch.bool:
            raise lo.otherwise()
        return lo.b.pointwise(op, x)

    return rule


DIVISIONS = ("div_floor", "div_trunc", "fmod", "remainder")


def _check_divisor(lo: Lowering, op: str, divisor: Any) -> None:
    """Refuse integer division by a number that may be 0: torch raises, which generated code cannot."""
    whole = not (lo.dtype.is_floating_point or lo.dtype.is_complex)
    if op in DIVISIONS and whole and isinstance(divisor, sympy.Expr):
        lo.at_least(divisor, 1, "divided by a size")
        return
    known = isinstance(divisor, (int, float)) and divisor != 0
    if isinstance(divisor, Value):
        known = divisor.op == "fill" and divisor.attrs["value"] != 0
    if op in DIVISIONS and whole and not known:
        raise lo.otherwise()


def _binary(op: str) -> Any:
    def rule(lo: Lowering, a: Any, b: Any) -> Value:
        _check_divisor(lo, op, b)
        return lo.b.pointwise(op, lo.value(a, lo.dtype), lo.value(b, lo.dtype))

    return rule


def _scaling(op: str) -> Any:
    """Scaling by a wider 0-d tensor, which torch does not round to the 16 bits of the other operand."""

    def is_wider(x: Any) -> bool:
        wide = isinstance(x, Value) and x.dtype.is_floating_point and x.dtype not in HALVES
        return wide and not x.shape

    def rule(lo: Lowering, a: Any, b: Any) -> Value:
        wide = is_wider(b) or (op == "mul" and is_wider(a))
        dtype = torch.float32 if lo.dtype in HALVES and wide else lo.dtype
        found = lo.b.pointwise(op, lo.value(a, dtype), lo.value(b, dtype))
        return lo.b.cast(found, lo.dtype)

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
    rows += [(n, _of_magnitude(n)) for n in ("abs", "sign")]
    rows += [(n, _binary(op)) for n, op in ARITHMETIC.items()]
    rows += [(n, _scaling(n)) for n in ("mul", "div")]
    rows += [(n, _comparison(n)) for n in COMPARISONS] + [(n, _logical(n)) for n in LOGICAL]
    for name, rule in rows:
        lowers(*_overloads(name))(rule)


_fill_table()
lowers(aten.max.other)(_binary("maximum"))
lowers(aten.min.other)(_binary("minimum"))
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


@lowers(aten.logical_not.default)
def logical_not(lo: Lowering, x: Value) -> Value:
    return lo.b.pointwise("logical_not", lo.b.cast(x, torch.bool))


@lowers(*_overloads("rsub"))
def rsub(lo: Lowering, a: Any, b: Any, alpha: Any = 1) -> Value:
    return sub(lo, b, a, alpha)


@lowers(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_mode(lo: Lowering, a: Any, b: Any, rounding_mode: str | None = None) -> Value:
    op = {None: "div", "floor": "div_floor", "trunc": "div_trunc"}[rounding_mode]
    _check_divisor(lo, op, b)
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


@lowers(aten.clamp.default, aten.clamp.Tensor, aten.clip.default, aten.clip.Tensor)
def clamp(lo: Lowering, x: Value, min: Any = None, max: Any = None) -> Value:
    y = lo.value(x, lo.dtype)
    if min is not None:
        y = lo.b.pointwise("maximum", y, lo.value(min, lo.dtype))
    return y if max is None else lo.b.pointwise("minimum", y, lo.value(max, lo.dtype))


@lowers(aten.clamp_min.default, aten.clamp_min.Tensor)
def clamp_min(lo: Lowering, x: Value, min: Any) -> Value:
    return clamp(lo, x, min)


@lowers(aten.clamp_max.default, aten.clamp_max.Tensor)
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
