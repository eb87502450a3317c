# SPDX-License-Identifier: Apache-2.0
"""Integer division, power and shifts, defined for all operands.

Division by zero, for which torch raises, gives quotient and remainder 0 here: a trap would end the process.
The minimum divided by -1 wraps, as in torch.
"""

from blade.backends.disc.cpu.emit.mlir_builder import MlirBuilder, SsaValue


def div_trunc(code: MlirBuilder, a: SsaValue, b: SsaValue) -> SsaValue:
    minus, _, quotient = _divide(code, a, b)
    return code.select(minus, code.neg(a), quotient)


def fmod(code: MlirBuilder, a: SsaValue, b: SsaValue) -> SsaValue:
    _, safe, _ = _divide(code, a, b)
    return code.apply("arith.remsi", a, safe)


def div_floor(code: MlirBuilder, a: SsaValue, b: SsaValue) -> SsaValue:
    quotient, rest = div_trunc(code, a, b), fmod(code, a, b)
    down = code.sub(quotient, code.like(1, quotient))
    return code.select(_signs_differ(code, rest, b), down, quotient)


def remainder(code: MlirBuilder, a: SsaValue, b: SsaValue) -> SsaValue:
    rest = fmod(code, a, b)
    return code.select(_signs_differ(code, rest, b), code.add(rest, b), rest)


def divide_unsigned(code: MlirBuilder, a: SsaValue, b: SsaValue) -> SsaValue:
    zero = code.like(0, b)
    none = code.compare("eq", b, zero)
    quotient = code.apply("arith.divui", a, code.select(none, code.like(1, b), b))
    return code.select(none, zero, quotient)


def remainder_unsigned(code: MlirBuilder, a: SsaValue, b: SsaValue) -> SsaValue:
    none = code.compare("eq", b, code.like(0, b))
    return code.apply("arith.remui", a, code.select(none, code.like(1, b), b))


def power(code: MlirBuilder, base: SsaValue, exponent: SsaValue, signed: bool = True) -> SsaValue:
    """Power by squaring, modulo 2**bits. Negative exponents give 0, except for the bases 1 and -1."""
    one, zero = code.like(1, base), code.like(0, base)
    names = [SsaValue(code.fresh(), base.element, base.lanes) for _ in range(3)]
    starts = (one, base, exponent)
    out, at = code.fresh(), code.fresh()
    low, high, step = (code.constant(k, "i64") for k in (0, int(base.element[1:]), 1))
    pairs = ", ".join(f"{n.name} = {s.name}" for n, s in zip(names, starts))
    types = ", ".join([base.type] * 3)
    head = f"scf.for {at} = {low.name} to {high.name} step {step.name}"
    code.open(f"{out}:3 = {head} iter_args({pairs}) -> ({types}) : i64")
    total, square, left = names
    odd = code.compare("ne", code.apply("arith.andi", left, one), zero)
    total = code.select(odd, code.mul(total, square), total)
    square, left = code.mul(square, square), code.apply("arith.shrui", left, one)
    code.line(f"scf.yield {total.name}, {square.name}, {left.name} : {types}")
    code.close()
    result = SsaValue(f"{out}#0", base.element, base.lanes)
    return _negative_power(code, base, exponent, result) if signed else result


def _negative_power(
    code: MlirBuilder, base: SsaValue, exponent: SsaValue, result: SsaValue
) -> SsaValue:
    one, zero, minus = (code.like(k, base) for k in (1, 0, -1))
    odd = code.compare("ne", code.apply("arith.andi", exponent, one), zero)
    alternating = code.select(odd, minus, one)
    inverse = code.select(code.compare("eq", base, minus), alternating, zero)
    inverse = code.select(code.compare("eq", base, one), one, inverse)
    return code.select(code.compare("slt", exponent, zero), inverse, result)


def lshift(code: MlirBuilder, a: SsaValue, by: SsaValue) -> SsaValue:
    """Left shift; 0 for shifts by a negative number or by all bits."""
    inside, safe = _shift(code, by)
    return code.select(inside, code.apply("arith.shli", a, safe), code.like(0, a))


def rshift(code: MlirBuilder, a: SsaValue, by: SsaValue) -> SsaValue:
    """Arithmetic right shift; the sign for shifts by a negative number or by all bits."""
    inside, safe = _shift(code, by)
    sign = code.apply("arith.shrsi", a, code.like(int(a.element[1:]) - 1, a))
    return code.select(inside, code.apply("arith.shrsi", a, safe), sign)


def rshift_unsigned(code: MlirBuilder, a: SsaValue, by: SsaValue) -> SsaValue:
    inside, safe = _shift(code, by)
    return code.select(inside, code.apply("arith.shrui", a, safe), code.like(0, a))


def _shift(code: MlirBuilder, by: SsaValue) -> tuple[SsaValue, SsaValue]:
    inside = code.compare("ult", by, code.like(int(by.element[1:]), by))
    return inside, code.select(inside, by, code.like(0, by))


def _divide(code: MlirBuilder, a: SsaValue, b: SsaValue) -> tuple[SsaValue, SsaValue, SsaValue]:
    """Whether b is -1; b with 1 in place of 0 and -1; a divided by that, or 0 if b is 0."""
    one, zero = code.like(1, b), code.like(0, b)
    minus = code.compare("eq", b, code.like(-1, b))
    none = code.compare("eq", b, zero)
    safe = code.select(code.apply("arith.ori", minus, none), one, b)
    return minus, safe, code.select(none, zero, code.apply("arith.divsi", a, safe))


def _signs_differ(code: MlirBuilder, rest: SsaValue, b: SsaValue) -> SsaValue:
    """Whether a nonzero remainder and the divisor have different signs."""
    zero = code.like(0, rest)
    other = code.compare("slt", code.apply("arith.xori", rest, b), zero)
    return code.apply("arith.andi", code.compare("ne", rest, zero), other)
