# SPDX-License-Identifier: Apache-2.0
"""Circular and hyperbolic functions of float32 vectors, 1 to 4 ulp.

sin, cos and tan reduce their argument in float64 (two-part pi/2, exact to 2**40) and use the kernels of
FreeBSD's k_sinf.c and k_cosf.c; beyond 2**40 they call libm. asin, acos, atan and the hyperbolic functions
follow Cephes.
"""

import math

from blade.backends.disc.cpu.emit.elementary import expm1, half_exp, polynomial
from blade.backends.disc.cpu.emit.mlir_builder import MlirBuilder, SsaValue

_PIO2, _PIO2_LOW = 1.5707963267948966, 6.123233995736766e-17
_FAR = 2.0**40
_SIN = (
    2.7183114939898219064e-6,
    -1.98393348360966317347e-4,
    8.3333293858894631756e-3,
    -0.166666666416265235595,
)
_COS = (
    2.43904487962774090654e-5,
    -1.38867637746099294692e-3,
    4.16666233237390631894e-2,
    -0.499999997251031003120,
)
_ASIN = (4.2163199048e-2, 2.4181311049e-2, 4.5470025998e-2, 7.4953002686e-2, 1.6666752422e-1)
_ATAN = (8.05374449538e-2, -1.38776856032e-1, 1.99777106478e-1, -3.33329491539e-1)


def sin(code: MlirBuilder, x: SsaValue) -> SsaValue:
    n, sine, cosine = _circle(code, x)
    return _near_or_libm(code, x, "sinf", _quadrant(code, n, sine, cosine))


def cos(code: MlirBuilder, x: SsaValue) -> SsaValue:
    n, sine, cosine = _circle(code, x)
    n = code.add(n, code.like(1, n))
    return _near_or_libm(code, x, "cosf", _quadrant(code, n, sine, cosine))


def tan(code: MlirBuilder, x: SsaValue) -> SsaValue:
    n, sine, cosine = _circle(code, x)
    odd = _bit(code, n, 1)
    top = code.select(odd, code.neg(cosine), sine)
    ratio = code.div(top, code.select(odd, sine, cosine))
    return _near_or_libm(code, x, "tanf", code.convert("arith.truncf", ratio, "f32"))


def asin(code: MlirBuilder, x: SsaValue) -> SsaValue:
    big, angle = _half_asin(code, x)
    far = code.sub(code.like(math.pi / 2, x), code.add(angle, angle))
    return code.apply("math.copysign", code.select(big, far, angle), x)


def acos(code: MlirBuilder, x: SsaValue) -> SsaValue:
    big, angle = _half_asin(code, x)
    twice = code.add(angle, angle)
    negative = code.compare("olt", x, code.like(0.0, x))
    far = code.select(negative, code.sub(code.like(math.pi, x), twice), twice)
    near = code.sub(code.like(math.pi / 2, x), code.apply("math.copysign", angle, x))
    return code.select(big, far, near)


def atan(code: MlirBuilder, x: SsaValue) -> SsaValue:
    a, one, zero = code.abs(x), code.like(1.0, x), code.like(0.0, x)
    steep = code.compare("ogt", a, code.like(2.414213562373095, x))
    middle = code.compare("ogt", a, code.like(0.4142135623730950, x))
    shifted = code.div(code.sub(a, one), code.add(a, one))
    inverse = code.div(code.like(-1.0, x), a)
    t = code.select(steep, inverse, code.select(middle, shifted, a))
    quarter, half = code.like(math.pi / 4, x), code.like(math.pi / 2, x)
    start = code.select(steep, half, code.select(middle, quarter, zero))
    z = code.mul(t, t)
    y = code.fma(code.mul(polynomial(code, z, _ATAN), z), t, t)
    return code.apply("math.copysign", code.add(start, y), x)


def sinh(code: MlirBuilder, x: SsaValue) -> SsaValue:
    a, one = code.abs(x), code.like(1.0, x)
    e = half_exp(code, a)
    far = code.sub(e, code.div(code.like(0.25, x), e))
    t = expm1(code, a)
    near = code.mul(code.like(0.5, x), code.add(t, code.div(t, code.add(t, one))))
    small = code.compare("olt", a, one)
    return code.apply("math.copysign", code.select(small, near, far), x)


def cosh(code: MlirBuilder, x: SsaValue) -> SsaValue:
    e = half_exp(code, code.abs(x))
    return code.add(e, code.div(code.like(0.25, x), e))


def _circle(code: MlirBuilder, x: SsaValue) -> tuple[SsaValue, SsaValue, SsaValue]:
    """The quadrant n (i64) of x and, in f64, sin and cos of x - n pi/2."""
    wide = code.convert("arith.extf", x, "f64")
    scaled = code.mul(wide, code.like(2 / math.pi, wide))
    # Adding 1.5 * 2**52 rounds to an integer, held in the low bits: no slow conversion to i64.
    magic = code.like(6755399441055744.0, wide)
    shifted = code.add(scaled, magic)
    n = code.sub(shifted, magic)
    r = code.fma(n, code.like(-_PIO2, n), wide)
    r = code.fma(n, code.like(-_PIO2_LOW, n), r)
    z = code.mul(r, r)
    sine = code.fma(code.mul(polynomial(code, z, _SIN), z), r, r)
    cosine = code.fma(polynomial(code, z, _COS), z, code.like(1.0, r))
    return code.bits(shifted), sine, cosine


def _quadrant(code: MlirBuilder, n: SsaValue, sine: SsaValue, cosine: SsaValue) -> SsaValue:
    y = code.select(_bit(code, n, 1), cosine, sine)
    y = code.select(_bit(code, n, 2), code.neg(y), y)
    return code.convert("arith.truncf", y, "f32")


def _bit(code: MlirBuilder, n: SsaValue, bit: int) -> SsaValue:
    return code.compare("ne", code.apply("arith.andi", n, code.like(bit, n)), code.like(0, n))


def _near_or_libm(code: MlirBuilder, x: SsaValue, function: str, near: SsaValue) -> SsaValue:
    """``near``, or libm's result in lanes with abs(x) > 2**40 (not NaN, not inf)."""
    a = code.abs(x)
    far = code.compare("ogt", a, code.like(_FAR, x))
    some = far
    if x.lanes > 1:
        some = code.op(f"vector.reduction <or>, {far.name} : {far.type} into i1", "i1", 1)
    result = SsaValue(code.fresh(), x.element, x.lanes)
    code.open(f"{result.name} = scf.if {some.name} -> ({x.type})")
    exact = code.select(far, code.call(function, x), near)
    code.line(f"scf.yield {exact.name} : {x.type}")
    code.close("} else {")
    code.indent += 1
    code.line(f"scf.yield {near.name} : {x.type}")
    code.close()
    return result


def _half_asin(code: MlirBuilder, x: SsaValue) -> tuple[SsaValue, SsaValue]:
    """asin(sqrt((1 - abs(x)) / 2)) if abs(x) > 1/2, else asin(abs(x)). NaN beyond 1."""
    a, half = code.abs(x), code.like(0.5, x)
    big = code.compare("ogt", a, half)
    z_big = code.mul(half, code.sub(code.like(1.0, x), a))
    t = code.select(big, code.apply("math.sqrt", z_big), a)
    z = code.select(big, z_big, code.mul(a, a))
    return big, code.fma(code.mul(polynomial(code, z, _ASIN), z), t, t)
