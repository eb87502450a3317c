# SPDX-License-Identifier: Apache-2.0
"""Triton functions that generated kernels call, as text; a kernel's module holds those it uses.

Integer division, power and shifts are defined for all operands, as on CPU (cpu/emit/integer_ops.py): division
by zero gives quotient and remainder 0, the minimum divided by -1 wraps. Floor divisions of floats follow the
steps of torch. ``erf_half`` is for values that are rounded to 16 bits: 1 - 2 ** -p(x) with a polynomial p, a
third of the work; its complement has a relative error of 4e-6. ``erf_absolute_half`` has an absolute error of
1e-7 near 0, but no such relative error. ``sigmoid_half`` and ``tanh_half`` are similar: 1 - 2 / (e**2x +
1), and a polynomial where that would cancel (error 2e-6). ``divide`` is for indices of 64 bits. It divides
in 32 bits if ``count``, their upper bound, allows: a 64-bit division takes four times as long.
"""

import re
from collections.abc import Iterable

EARLY = "from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait\n"


_SOURCES = """
def max_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)

def min_nan(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)

def product(a, b):
    return a * b

def erf_half(x):
    return tl.where(tl.abs(x) < 0.02, x * 1.12837916710, erf_absolute_half(x))

def erf_absolute_half(x):
    z = tl.minimum(tl.abs(x), 4.0, propagate_nan=tl.PropagateNan.ALL)
    t = z * 1.99763327e-05 - 0.00048200962
    t = t * z + 0.00520489376
    t = t * z - 0.03386888990
    t = t * z + 0.15238472892
    t = t * z + 0.91710342635
    t = t * z + 1.62805984157
    return libdevice.copysign(1.0 - tl.exp2(z * t * -1.0), x)

def sigmoid_half(x):
    return quotient_half(1.0, 1.0 + tl.exp2(x * -1.4426950408889634))

def tanh_half(x):
    z = tl.abs(x)
    s = x * x
    near = x * (s * (s * 0.13333333333 - 0.33333333333) + 1.0)
    far = 1.0 - quotient_half(2.0, tl.exp2(z * 2.8853900817779268) + 1.0)
    return tl.where(z < 0.1, near, libdevice.copysign(far, x))

def quotient_half(a, b):
    return libdevice.fast_dividef(tl.full([], a, tl.float32), b)

def fmod_float(a, b):
    return libdevice.fmod(a, b)

def remainder_float(a, b):
    rest = libdevice.fmod(a, b)
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)

def div_floor_float(a, b):
    rest = libdevice.fmod(a, b)
    quotient = tl.div_rn(a - rest, b)
    quotient = tl.where((rest != 0) & ((rest < 0) != (b < 0)), quotient - 1.0, quotient)
    whole = libdevice.floor(quotient)
    whole = tl.where(quotient - whole > 0.5, whole + 1.0, whole)
    exact = tl.div_rn(a, b)
    whole = tl.where(quotient == 0, libdevice.copysign(a * 0.0, exact), whole)
    return tl.where(b == 0, exact, whole)

def div_floor_double(a, b):
    rest = libdevice.fmod(a, b)
    quotient = (a - rest) / b
    quotient = tl.where((rest != 0) & ((rest < 0) != (b < 0)), quotient - 1.0, quotient)
    whole = libdevice.floor(quotient)
    whole = tl.where(quotient - whole > 0.5, whole + 1.0, whole)
    exact = a / b
    whole = tl.where(quotient == 0, libdevice.copysign(a * 0.0, exact), whole)
    return tl.where(b == 0, exact, whole)

def div_trunc_int(a, b):
    safe = tl.where((b == 0) | (b == -1), b * 0 + 1, b)
    return tl.where(b == 0, b * 0, tl.where(b == -1, a * 0 - a, a // safe))

def fmod_int(a, b):
    safe = tl.where((b == 0) | (b == -1), b * 0 + 1, b)
    return tl.where(b == 0, b * 0, a % safe)

def remainder_int(a, b):
    rest = fmod_int(a, b)
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)

def div_floor_int(a, b):
    rest = fmod_int(a, b)
    quotient = div_trunc_int(a, b)
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), quotient - 1, quotient)

def div_uint(a, b):
    return tl.where(b == 0, b * 0, a // tl.where(b == 0, b * 0 + 1, b))

def fmod_uint(a, b):
    return tl.where(b == 0, b * 0, a % tl.where(b == 0, b * 0 + 1, b))

def power_uint(base, exponent):
    total = base * 0 + exponent * 0 + 1
    square = base + total * 0
    left = exponent + total * 0
    for _ in range(base.dtype.primitive_bitwidth):
        total = tl.where((left & 1) != 0, total * square, total)
        square = square * square
        left = left >> 1
    return total

def power_int(base, exponent):
    one = base * 0 + exponent * 0 + 1
    total = power_uint(base, exponent)
    inverse = tl.where(base == -1, tl.where((exponent & 1) != 0, -one, one), one * 0)
    inverse = tl.where(base == 1, one, inverse)
    return tl.where(exponent < 0, inverse, total)

def lshift_int(a, by):
    inside = (by >= 0) & (by < a.dtype.primitive_bitwidth)
    return tl.where(inside, a << tl.where(inside, by, by * 0), a * 0)

def rshift_int(a, by):
    inside = (by >= 0) & (by < a.dtype.primitive_bitwidth)
    return tl.where(inside, a >> tl.where(inside, by, by * 0), a >> (by * 0 + (a.dtype.primitive_bitwidth - 1)))

def lshift_uint(a, by):
    inside = by < a.dtype.primitive_bitwidth
    return tl.where(inside, a << tl.where(inside, by, by * 0), a * 0)

def rshift_uint(a, by):
    inside = by < a.dtype.primitive_bitwidth
    return tl.where(inside, a >> tl.where(inside, by, by * 0), a * 0)

def divide(i, d, count):
    if count < 2147483648:
        quotient = (i.to(tl.uint32) // d.to(tl.uint32)).to(tl.int64)
    else:
        quotient = i // d
    return quotient

def divide_by(i, d: tl.constexpr, count):
    if count < 2147483648:
        quotient = (i.to(tl.uint32) // d).to(tl.int64)
    else:
        quotient = i // d
    return quotient
"""


def _parse() -> dict[str, str]:
    parts = re.split(r"^(?=def )", _SOURCES.strip(), flags=re.MULTILINE)
    return {part[4 : part.index("(")]: part.strip() for part in filter(None, parts)}


_FUNCTIONS = _parse()


def called(text: str) -> set[str]:
    """The functions of this file that ``text`` names."""
    return set(re.findall(r"\b[a-z_]+\b", text)) & _FUNCTIONS.keys()


def sources(names: Iterable[str]) -> str:
    """The text of these functions and of the functions they call."""
    needed = set(names)
    while more := {f for name in needed for f in called(_FUNCTIONS[name])} - needed:
        needed |= more
    return "".join(
        f"@triton.jit\n{text}\n\n\n" for name, text in _FUNCTIONS.items() if name in needed
    )
