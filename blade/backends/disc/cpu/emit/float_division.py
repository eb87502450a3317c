# SPDX-License-Identifier: Apache-2.0
"""Floor division, remainder and the like for float32 and float64, in the same steps as torch."""

from blade.backends.disc.cpu.emit.mlir_builder import MlirBuilder, SsaValue


def div_trunc(code: MlirBuilder, a: SsaValue, b: SsaValue) -> SsaValue:
    return code.apply("math.trunc", code.div(a, b))


def div_floor(code: MlirBuilder, a: SsaValue, b: SsaValue) -> SsaValue:
    """``c10::div_floor_floating``: Python's float floor division."""
    rest = _fmod(code, a, b)
    zero, one = code.like(0.0, a), code.like(1.0, a)
    quotient = code.div(code.sub(a, rest), b)
    quotient = code.select(_signs_differ(code, rest, b), code.sub(quotient, one), quotient)
    whole = code.apply("math.floor", quotient)
    above = code.compare("ogt", code.sub(quotient, whole), code.like(0.5, a))
    whole = code.select(above, code.add(whole, one), whole)
    exact = code.div(a, b)
    nothing = code.compare("oeq", quotient, zero)
    whole = code.select(nothing, code.apply("math.copysign", zero, exact), whole)
    return code.select(code.compare("oeq", b, zero), exact, whole)


def remainder(code: MlirBuilder, a: SsaValue, b: SsaValue) -> SsaValue:
    rest = _fmod(code, a, b)
    return code.select(_signs_differ(code, rest, b), code.add(rest, b), rest)


def sigmoid(code: MlirBuilder, x: SsaValue) -> SsaValue:
    one = code.like(1.0, x)
    return code.div(one, code.add(one, code.call("exp", code.neg(x))))


def _fmod(code: MlirBuilder, a: SsaValue, b: SsaValue) -> SsaValue:
    return code.call("fmodf" if a.element == "f32" else "fmod", a, b)


def _signs_differ(code: MlirBuilder, rest: SsaValue, b: SsaValue) -> SsaValue:
    """Whether a nonzero remainder and the divisor have different signs."""
    zero = code.like(0.0, rest)
    low, divisor_low = code.compare("olt", rest, zero), code.compare("olt", b, zero)
    other = code.apply("arith.xori", low, divisor_low)
    return code.apply("arith.andi", code.compare("une", rest, zero), other)
