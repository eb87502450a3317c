# SPDX-License-Identifier: Apache-2.0
"""Elementary functions of float32 as vector polynomials: x (Value of f32) -> Value, 1 to 4 ulp.

Sources: exp, log, log2, erfc, sin, cos from Cephes single precision (S. Moshier, public domain); tanh and erf are the
rational approximations of Eigen (MPL2) / XLA, with their coefficients. Reduced arguments use fma.
Results for infinities, NaN, zeros and denormals equal those of torch.
"""

from collections.abc import Sequence

from blade.backends.disc.cpu.emit.mlir_builder import MlirBuilder, SsaValue

_LOG2E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_ROUND = 12582912.0  # 1.5 * 2**23: adding it rounds to an integer held in the low mantissa bits
EXP_TO_ZERO = -88.02969193111305  # -127 ln 2: here the bits of the power of two are those of 0
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
_LOG = (
    (7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1)
    + (-1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1)
)  # fmt: skip
_TANH_TOP = (
    (-2.76076847742355e-16, 2.00018790482477e-13, -8.60467152213735e-11, 5.12229709037114e-08)
    + (1.48572235717979e-05, 6.37261928875436e-04, 4.89352455891786e-03)
)  # fmt: skip
_TANH_BOTTOM = (
    1.19825839466702e-06,
    1.18534705686654e-04,
    2.26843463243900e-03,
    4.89352518554385e-03,
)
_ERF_TOP = (
    (0.00022905065861350646, 0.0034082910107109506, 0.050955695062380861)
    + (0.18520832239976145, 1.128379143519084)
)  # fmt: skip
_ERF_BOTTOM = (
    (-1.1791602954361697e-7, 0.000023547966471313185, 0.0010179625278914885, 0.014070470171167667)
    + (0.11098505178285362, 0.49746925110067538, 1.0)
)  # fmt: skip
_ERFC_NEAR = (
    (2.326819970068386e-2, -1.387039388740657e-1, 3.687424674597105e-1, -5.824733027278666e-1)
    + (6.210004621745983e-1, -4.944515323274145e-1, 3.404879937665872e-1, -2.741127028184656e-1)
    + (5.638259427386472e-1,)
)  # fmt: skip
_ERFC_FAR = (
    (-1.047766399936249e1, 1.297719955372516e1, -7.495518717768503, 2.921019019210786)
    + (-1.015265279202700, 4.218463358204948e-1, -2.820767439740514e-1, 5.641895067754075e-1)
)  # fmt: skip


def polynomial(code: MlirBuilder, x: SsaValue, coefficients: Sequence[float]) -> SsaValue:
    """Horner's rule, highest power first."""
    result = code.like(coefficients[0], x)
    for c in coefficients[1:]:
        result = code.fma(result, x, code.like(c, x))
    return result


def at_most(code: MlirBuilder, x: SsaValue, bound: float) -> SsaValue:
    """min(x, bound); NaN stays."""
    limit = code.like(bound, x)
    return code.select(code.compare("ogt", x, limit), limit, x)


def at_least(code: MlirBuilder, x: SsaValue, bound: float) -> SsaValue:
    """max(x, bound); NaN stays."""
    limit = code.like(bound, x)
    return code.select(code.compare("olt", x, limit), limit, x)


def exp(code: MlirBuilder, x: SsaValue) -> SsaValue:
    x = at_least(code, at_most(code, x, 89.0), -104.0)
    n, r = _reduce(code, x)
    return _scale(code, _exp_near_zero(code, r), n)


def exp_in_one_step(code: MlirBuilder, x: SsaValue) -> SsaValue:
    """exp(x) for EXP_TO_ZERO <= x <= 88 or NaN; results below 2**-126 are 0."""
    n, r = _reduce(code, x)
    return code.mul(_exp_near_zero(code, r), _power_of_two(code, n))


def exp2(code: MlirBuilder, x: SsaValue) -> SsaValue:
    x = at_least(code, at_most(code, x, 129.0), -151.0)
    magic = code.like(_ROUND, x)
    shifted = code.add(x, magic)
    r = code.sub(x, code.sub(shifted, magic))
    n = code.sub(code.bits(shifted), code.bits(magic))
    return _scale(code, _exp_near_zero(code, code.mul(r, code.like(0.6931471805599453, x))), n)


def half_exp(code: MlirBuilder, x: SsaValue) -> SsaValue:
    """exp(x) / 2, finite up to twice the range of exp."""
    x = at_least(code, at_most(code, x, 90.0), -104.0)
    n, r = _reduce(code, x)
    return _scale(code, _exp_near_zero(code, r), code.sub(n, code.like(1, n)))


def expm1(code: MlirBuilder, x: SsaValue) -> SsaValue:
    x = at_least(code, at_most(code, x, 89.0), -30.0)
    n, r = _reduce(code, x)
    p = code.fma(code.mul(r, r), polynomial(code, r, _EXP), r)
    # 2**n * p + (2**n - 1), with one factor 2 kept back because 2**128 overflows.
    half = _power_of_two(code, code.sub(n, code.like(1, n)))
    y = code.fma(half, p, code.sub(half, code.like(0.5, x)))
    y = code.add(y, y)
    zero = code.compare("eq", n, code.like(0, n))
    return code.select(zero, p, y)


def log(code: MlirBuilder, x: SsaValue) -> SsaValue:
    e, f, y = _log_parts(code, x)
    y = code.fma(e, code.like(_LN2_LOW, x), y)
    result = code.fma(e, code.like(_LN2_HIGH, x), code.add(f, y))
    return _log_edges(code, x, result)


def log2(code: MlirBuilder, x: SsaValue) -> SsaValue:
    e, f, y = _log_parts(code, x)
    tail = code.like(_LOG2E - 1.0, x)
    z = code.mul(y, tail)
    z = code.fma(f, tail, z)
    result = code.add(code.add(code.add(z, y), f), e)
    return _log_edges(code, x, result)


def log1p(code: MlirBuilder, x: SsaValue) -> SsaValue:
    """log(u) + (x - (u - 1)) / u with u = 1 + x rounded; the second term corrects the rounding."""
    one = code.like(1.0, x)
    u = code.add(one, x)
    lost = code.sub(x, code.sub(u, one))
    usable = code.compare("ogt", u, code.like(0.0, x))
    finite = code.compare("olt", u, code.like(float("inf"), x))
    repair = code.div(lost, u)
    repair = code.select(code.apply("arith.andi", usable, finite), repair, code.like(0.0, x))
    return code.add(log(code, u), repair)


def tanh(code: MlirBuilder, x: SsaValue) -> SsaValue:
    c = at_least(code, at_most(code, x, 7.90531110763549805), -7.90531110763549805)
    s = code.mul(c, c)
    top = code.mul(c, polynomial(code, s, _TANH_TOP))
    y = code.div(top, polynomial(code, s, _TANH_BOTTOM))
    small = code.compare("olt", code.abs(x), code.like(0.0004, x))
    y = code.select(small, x, _within_one(code, y))
    # Exactly 1 where float32 rounds to it: callers multiply 1 + tanh(x) by large numbers.
    negative = code.compare("olt", x, code.like(0.0, x))
    one = code.select(negative, code.like(-1.0, x), code.like(1.0, x))
    return code.select(code.compare("ogt", code.abs(x), code.like(9.0109, x)), one, y)


def erf(code: MlirBuilder, x: SsaValue) -> SsaValue:
    c = at_least(code, at_most(code, x, 3.832506856900711), -3.832506856900711)
    s = code.mul(c, c)
    top = code.mul(c, polynomial(code, s, _ERF_TOP))
    y = code.div(top, polynomial(code, s, _ERF_BOTTOM))
    return _within_one(code, y)


def erfc(code: MlirBuilder, x: SsaValue) -> SsaValue:
    """exp(-a * a) / a * P(1 / a**2) away from zero, with the rounding of a * a put back."""
    one, a = code.like(1.0, x), code.abs(x)
    square = code.mul(a, a)
    lost = code.fma(a, a, code.neg(square))
    e = exp(code, code.neg(square))
    e = code.fma(code.neg(e), lost, e)
    q = code.div(one, a)
    y = code.mul(q, q)
    near_two = code.compare("olt", a, code.like(2.0, x))
    p = code.select(near_two, polynomial(code, y, _ERFC_NEAR), polynomial(code, y, _ERFC_FAR))
    tail = code.mul(code.mul(e, q), p)
    # From 10.06 on the result is 0, but e * lost would be 0 * inf.
    tail = code.select(code.compare("ogt", a, code.like(10.1, x)), code.like(0.0, x), tail)
    negative = code.compare("olt", x, code.like(0.0, x))
    tail = code.select(negative, code.sub(code.like(2.0, x), tail), tail)
    small = code.compare("olt", a, one)
    return code.select(small, code.sub(one, erf(code, x)), tail)


def sigmoid(code: MlirBuilder, x: SsaValue) -> SsaValue:
    one = code.like(1.0, x)
    return code.div(one, code.add(one, exp(code, code.neg(x))))


def _within_one(code: MlirBuilder, x: SsaValue) -> SsaValue:
    return at_least(code, at_most(code, x, 1.0), -1.0)


def _reduce(code: MlirBuilder, x: SsaValue) -> tuple[SsaValue, SsaValue]:
    """n (i32) and r with x = n ln 2 + r, abs(r) <= ln(2) / 2."""
    magic = code.like(_ROUND, x)
    shifted = code.fma(x, code.like(_LOG2E, x), magic)
    n = code.sub(shifted, magic)
    r = code.fma(n, code.like(-_LN2_HIGH, x), x)
    r = code.fma(n, code.like(-_LN2_LOW, x), r)
    return code.sub(code.bits(shifted), code.bits(magic)), r


def _exp_near_zero(code: MlirBuilder, r: SsaValue) -> SsaValue:
    one = code.like(1.0, r)
    return code.fma(code.mul(r, r), polynomial(code, r, _EXP), code.add(r, one))


def _power_of_two(code: MlirBuilder, n: SsaValue) -> SsaValue:
    """2**n for -127 < n < 128; 0 for -127."""
    biased = code.add(n, code.like(127, n))
    return code.from_bits(code.apply("arith.shli", biased, code.like(23, n)))


def _scale(code: MlirBuilder, y: SsaValue, n: SsaValue) -> SsaValue:
    """y * 2**n in two steps, so that results may overflow to inf or become denormal."""
    first = code.apply("arith.shrsi", n, code.like(1, n))
    second = code.sub(n, first)
    return code.mul(code.mul(y, _power_of_two(code, first)), _power_of_two(code, second))


def _log_parts(code: MlirBuilder, x: SsaValue) -> tuple[SsaValue, SsaValue, SsaValue]:
    """e, f, y with x = 2**e (1 + f), sqrt(1/2) <= 1 + f < sqrt(2), log(1 + f) = f + y."""
    tiny = code.compare("olt", x, code.like(1.17549435e-38, x))
    scaled = code.select(tiny, code.mul(x, code.like(8388608.0, x)), x)
    bits = code.bits(scaled)
    start = code.like(0x3F3504F3, bits)  # sqrt(1/2)
    offset = code.sub(bits, start)
    e = code.convert("arith.sitofp", code.apply("arith.shrsi", offset, code.like(23, bits)), "f32")
    e = code.select(tiny, code.sub(e, code.like(23.0, x)), e)
    mantissa = code.add(code.apply("arith.andi", offset, code.like(0x7FFFFF, bits)), start)
    f = code.sub(code.from_bits(mantissa), code.like(1.0, x))
    z = code.mul(f, f)
    y = code.mul(code.mul(f, z), polynomial(code, f, _LOG))
    return e, f, code.fma(z, code.like(-0.5, x), y)


def _log_edges(code: MlirBuilder, x: SsaValue, result: SsaValue) -> SsaValue:
    infinity, zero = code.like(float("inf"), x), code.like(0.0, x)
    # Infinity and NaN, the only values not below infinity, are returned unchanged.
    result = code.select(code.compare("olt", x, infinity), result, x)
    result = code.select(code.compare("olt", x, zero), code.like(float("nan"), x), result)
    return code.select(code.compare("oeq", x, zero), code.like(float("-inf"), x), result)
