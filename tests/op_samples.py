# SPDX-License-Identifier: Apache-2.0
"""One table of sample calls of ATen ops, for every backend that has rows of them.

    row("add", lambda x, y: x + y, f32("a b"), f32("b"))

A shape is written as words: a letter is a dynamic axis (equal letters are equal sizes), a number a
fixed one. ``inputs(sample, sizes)`` makes seeded tensors at any sizes. Data is never zero, except in
``special`` runs, which feed NaN, infinities and zeros.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

aten = torch.ops.aten
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
HALVES = (torch.bfloat16, torch.float16)
SPECIAL = (math.nan, 1.0, math.inf, -0.5, -math.inf, 0.0, -0.0, 3.0, -1.0, 20.5, -20.5, 0.5, -3.0)


@dataclass(frozen=True)
class Spec:
    """One input: its axes, dtype and the range its numbers are drawn from."""

    axes: tuple[str, ...]
    dtype: torch.dtype
    low: float
    high: float

    def shape(self, sizes: Mapping[str, int]) -> list[int]:
        return [sizes[a] if a.isalpha() else int(a) for a in self.axes]

    def dynamic(self) -> list[bool]:
        return [a.isalpha() for a in self.axes]


@dataclass(frozen=True)
class Sample:
    """A function of tensors and its inputs.

    ``called``: runs through the dispatcher (a library op). ``sizes``: sizes that replace the usual ones.
    ``special``: defined, and the same everywhere, for NaN and infinities. ``refuses``: shapes with a size
    up to this are left to the original, because torch takes another way there. ``fused``: of the inputs, what a
    fused multiply-add leaves where eager subtracts two rounded numbers that are the same.
    """

    name: str
    function: Callable[..., Any]
    specs: tuple[Spec, ...]
    called: bool = False
    special: bool = False
    refuses: int = -1
    sizes: Mapping[str, int] | None = None
    fused: Callable[..., torch.Tensor] | None = None


TABLE: list[Sample] = []


def row(
    name: str,
    function: Callable[..., Any],
    *specs: Spec,
    called: bool = False,
    special: bool = False,
    refuses: int = -1,
    fused: Callable[..., torch.Tensor] | None = None,
    **sizes: int,
) -> None:
    """One sample; ``sizes`` are the axes' sizes where the usual ones do not suit."""
    TABLE.append(Sample(name, function, specs, called, special, refuses, sizes or None, fused))


def f32(axes: str, low: float = -2, high: float = 2) -> Spec:
    return spec(axes, torch.float32, low, high)


def i64(axes: str, low: float = -9, high: float = 9) -> Spec:
    return spec(axes, torch.int64, low, high)


def mask(axes: str) -> Spec:
    return spec(axes, torch.bool, 0, 1)


def index(axes: str, size: int) -> Spec:
    """Positions 0 .. size - 1."""
    return spec(axes, torch.int64, 0, size - 1)


def spec(axes: str, dtype: torch.dtype, low: float = -2, high: float = 2) -> Spec:
    return Spec(tuple(axes.split()), dtype, low, high)


def inputs(sample: Sample, sizes: Mapping[str, int], special: bool = False) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(len(sample.name) + 31 * sum(sizes.values()))
    return [_tensor(s, s.shape(sizes), rng, special, k) for k, s in enumerate(sample.specs)]


def _tensor(
    spec: Spec, shape: Sequence[int], rng: torch.Generator, special: bool, position: int
) -> torch.Tensor:
    if spec.dtype == torch.bool:
        return torch.rand(shape, generator=rng) > 0.4
    if not spec.dtype.is_floating_point:
        low = max(int(spec.low), torch.iinfo(spec.dtype).min)
        numbers = torch.randint(low, int(spec.high) + 1, shape, generator=rng)
        if spec.low < 0:
            numbers[numbers == 0] = 1
        return numbers.to(spec.dtype)
    if special:
        count = torch.arange(math.prod(shape)) * (1, 1 + len(SPECIAL) * 0 + 5, 7)[position % 3]
        count = count + torch.arange(math.prod(shape)).div(len(SPECIAL), rounding_mode="floor")
        return torch.tensor(SPECIAL, dtype=spec.dtype)[count % len(SPECIAL)].reshape(shape)
    numbers = torch.rand(shape, generator=rng, dtype=torch.float64)
    return (spec.low + numbers * (spec.high - spec.low)).to(spec.dtype)


def _of_every(axes: str, dtypes: Sequence[torch.dtype], *limits: float) -> list[Spec]:
    return [spec(axes, d, *limits) for d in dtypes]


def each(op: Callable[..., Any]) -> Callable[..., Any]:
    """``op`` of every input by itself: one row for many dtypes."""
    return lambda *xs: [op(x) for x in xs]


def pairs(op: Callable[..., Any]) -> Callable[..., Any]:
    """``op`` of inputs 0 and 1, of 2 and 3, ..."""
    return lambda *xs: [op(a, b) for a, b in zip(xs[::2], xs[1::2], strict=True)]


def both(dtypes: Sequence[torch.dtype], *limits: float) -> Iterator[Spec]:
    """Pairs of operands, the second one broadcast."""
    for d in dtypes:
        yield from (spec("a b", d, *limits), spec("b", d, *limits))


# Pointwise: functions of one tensor

for _name in (
    "neg abs sign exp exp2 expm1 sin cos tan tanh sinh cosh atan erf erfc sigmoid floor ceil trunc "
    "round frac square isnan isinf"
).split():
    row(
        _name, each(getattr(torch, _name)), *_of_every("a b", FLOATS), special=_name not in ("tan",)
    )
for _name in "log log2 log1p sqrt rsqrt reciprocal log10".split():
    row(_name, each(getattr(torch, _name)), *_of_every("a b", FLOATS, 0.1, 9), special=True)
for _name in "asin acos".split():
    row(_name, each(getattr(torch, _name)), *_of_every("a b", FLOATS, -0.9, 0.9), special=True)
row("asinh", each(torch.asinh), *_of_every("a b", FLOATS), called=True)
row("acosh", each(torch.acosh), *_of_every("a b", FLOATS, 1.5, 9), called=True)
row("atanh", each(torch.atanh), *_of_every("a b", FLOATS, -0.9, 0.9), called=True)
for _name in "neg abs sign square bitwise_not floor ceil trunc round".split():
    row(f"{_name} of ints", each(getattr(torch, _name)), *_of_every("a b", INTS, -9, 9))
for _name in "exp sin sqrt reciprocal sigmoid log1p erf tanh atan".split():
    row(f"{_name} of ints", each(getattr(torch, _name)), *_of_every("a b", INTS, 1, 9), mask("a b"))
row("isnan of ints", each(lambda x: (torch.isnan(x), torch.isinf(x))[0]), *_of_every("a b", INTS))
row("isinf of ints", each(torch.isinf), *_of_every("a b", INTS), mask("a b"))
row("isfinite", each(torch.isfinite), *_of_every("a b", (*FLOATS, *INTS)), special=True)
row("logical_not", each(torch.logical_not), *_of_every("a b", (*FLOATS, *INTS)), mask("a b"))
row("bitwise_not bool", torch.bitwise_not, mask("a b"))
row("sign bool", torch.sign, mask("a b"), called=True)
row("round decimals", lambda x: torch.round(x, decimals=2), f32("a b"), called=True)
row("positive", lambda x: +x * 1.0, f32("a b"))
row("sinc", each(torch.sinc), *_of_every("a b", FLOATS), special=True)
row("deg2rad", lambda x: (torch.deg2rad(x), torch.rad2deg(x)), f32("a b"))
row("nan_to_num", lambda x: torch.nan_to_num(x, 1.0, 2.0, -2.0), f32("a b"), special=True)
row("nan_to_num plain", lambda x: torch.nan_to_num(x), f32("a b"), special=True)
row("erfinv", torch.erfinv, f32("a b", -0.9, 0.9), called=True)
row("digamma", torch.digamma, f32("a b", 0.5, 3), called=True)
row("0-d", lambda x: (torch.exp(x) + 1, x * x, x.sum(), x.softmax(0)), f32(""))
row("0-d with tensor", lambda x, y: (x + y, y * x, x.clamp(max=y)), f32(""), f32("a b"))

# Arithmetic

row("add", pairs(torch.add), *both((*FLOATS, *INTS)), special=True)
row("sub", pairs(torch.sub), *both((*FLOATS, *INTS)), special=True)
row("mul", pairs(torch.mul), *both((*FLOATS, *INTS)), special=True)
row("div", pairs(torch.div), *both((*FLOATS, *INTS), 1, 9), special=True)
row("add bool", lambda a, b: (a + b, a * b, a + 1, a * 2.5), mask("a b"), mask("b"))
row(
    "add mixed",
    lambda x, i, m, h: (x + i, i + x, m + x, m + i, h + x, h + i, h * m, i / m.int().add(1)),
    f32("a b"),
    i64("b"),
    mask("a 1"),
    spec("a b", torch.bfloat16),
)
row(
    "mixed ints",
    lambda a, b, c: (a + b, b * c, a - c, a / b),
    spec("a b", torch.int32, 1, 9),
    spec("b", torch.int16, 1, 9),
    spec("a b", torch.uint8, 1, 9),
)
row(
    "mixed floats",
    lambda a, b, c: (a + b, b * c, a / c, b - a),
    spec("a b", torch.float64),
    spec("b", torch.bfloat16),
    spec("a b", torch.float16, 1, 2),
)
row(
    "scalars",
    lambda x, i, m, h: (
        x + 1,
        x * 2,
        x / 3,
        1 - x,
        2 / x,
        i + 1,
        i * 2,
        i / 2,
        i + 0.5,
        3 - i,
        m + 1,
        m * 0.5,
        m / 2,
        h + 1.1,
        h * 3,
        1.3 - h,
    ),
    f32("a b"),
    i64("a b"),
    mask("a b"),
    spec("a b", torch.bfloat16),
)
row(
    "alpha",
    lambda x, y, i: (
        torch.add(x, y, alpha=2),
        torch.sub(x, y, alpha=0.5),
        torch.add(i, i, alpha=3),
        torch.add(x, i, alpha=2),
        torch.sub(x, 2, alpha=3),
        torch.rsub(x, y, alpha=2),
        torch.rsub(x, 2, alpha=3),
    ),
    f32("a b"),
    f32("b"),
    i64("b"),
)
row(
    "alpha half",
    lambda x, y: (torch.add(x, y, alpha=0.3), torch.sub(x, y, alpha=0.3)),
    spec("a b", torch.bfloat16),
    spec("b", torch.bfloat16),
)
row(
    "sizes as numbers",
    lambda x: (x * x.shape[0], x + x.shape[1], x / x.shape[1], x.shape[0] - x),
    f32("a b"),
)
row(
    "sizes with ints",
    lambda i: (
        i * i.shape[0],
        i // i.shape[1],
        i / i.shape[1],
        i % i.shape[0],
        i < i.shape[0],
        i + 1.5 * i.shape[0],
    ),
    i64("a b"),
    refuses=0,
    a=3,
    b=5,
)
row(
    "Scalar overloads",
    lambda x, i: [
        getattr(aten, name).Scalar(t, 2)
        for name in ("add", "sub", "mul", "div", "floor_divide", "remainder")
        for t in (x, i)
    ],
    f32("a b"),
    i64("a b"),
)
row(
    "Scalar overloads of bits",
    lambda i, m: (
        [
            getattr(aten, f"bitwise_{name}").Scalar(t, s)
            for name in ("and", "or", "xor")
            for t, s in ((i, 6), (m, True), (m, 3))
        ]
        + [getattr(aten, f"bitwise_{name}").Scalar_Tensor(5, i) for name in ("and", "or", "xor")]
    ),
    i64("a b"),
    mask("a b"),
)
row(
    "Scalar overloads of shifts",
    lambda i: (
        aten.bitwise_left_shift.Tensor(i, i),
        aten.bitwise_right_shift.Scalar_Tensor(64, i),
        aten.bitwise_right_shift.Tensor_Scalar(i, 1),
    ),
    i64("a b", 1, 4),
)
row(
    "div.Scalar_mode",
    lambda x, i: [
        aten.div.Scalar_mode(t, 3, rounding_mode=m)
        for t in (x, i)
        for m in ("floor", "trunc", None)
    ],
    f32("a b"),
    i64("a b"),
)
# Whole numbers divided by a tensor: torch raises where it holds a zero, so torch is asked.
for _name, _op in (
    ("floor_divide", torch.floor_divide),
    ("div trunc", lambda a, b: torch.div(a, b, rounding_mode="trunc")),
    ("div floor", lambda a, b: torch.div(a, b, rounding_mode="floor")),
    ("remainder", torch.remainder),
    ("fmod", torch.fmod),
):
    row(_name, pairs(_op), *both(FLOATS, -9, 9))
    row(f"{_name} of ints", pairs(_op), *both(INTS, -9, 9), called=True)
row("floor_divide of a number", lambda i: 7 // i, i64("a b", 1, 9), called=True)
row(
    "halves scaled by a wide 0-d",  # which float16 has one or two digits of
    lambda x, y, s: (x * s, s * x, x * 2.0**-20 / s, y * s, s * y, y / s),
    spec("a b", torch.float16, -2000, 2000),
    spec("a b", torch.bfloat16, -2000, 2000),
    f32("", 1e-6, 1.1e-6),
)
row(
    "floor_divide scalar",
    lambda x, i: (x // 2, i // 2, i // -3, x // 0.7, i // 2.5),
    f32("a b"),
    i64("a b"),
)
row(
    "div mode scalar",
    lambda x, i: [
        torch.div(t, s, rounding_mode=m)
        for t in (x, i)
        for s in (2, -3)
        for m in ("floor", "trunc", None)
    ],
    f32("a b"),
    i64("a b"),
)
row(
    "div mode mixed",
    lambda x, i: [torch.div(i, x, rounding_mode=m) for m in ("floor", "trunc", None)],
    f32("a b"),
    i64("a b"),
)
row(
    "remainder scalar",
    lambda x, i: (
        x % 3,
        i % 3,
        i % -3,
        torch.fmod(i, -3),
        torch.fmod(x, 0.7),
        torch.remainder(7.5, i),
    ),
    f32("a b"),
    i64("a b"),
)
row("remainder of a number by ints", lambda i: 7 % i, i64("a b"), called=True)
row("pow", pairs(torch.pow), *both(FLOATS, 0.2, 3), special=True)
row("pow ints", pairs(torch.pow), *both(INTS, 1, 3))
row(
    "pow scalar",
    lambda x, i: (
        x**2,
        x**3,
        x**0.5,
        x**-1,
        x**-2,
        x**2.5,
        x**0,
        x**1,
        x**4,
        i**2,
        i**3,
        i**0,
        i**1,
        i**0.5,
        2**x,
        2 ** i.abs(),
        2.5**x,
        1**x,
    ),
    f32("a b", 0.2, 3),
    i64("a b", 1, 4),
    special=True,
)
row(
    "pow special",
    lambda x: (x**2, x**3, x**0.5, x**-1, x**-0.5, x**-2, x**2.5, x**0.0, x**1.0, 1.0**x, 2.0**x),
    f32("a b"),
    special=True,
)
row("pow half", lambda x: (x**2, x**0.5, x**3, x**-1), spec("a b", torch.bfloat16, 0.2, 3))
row(
    "float_power",
    lambda x, i: (torch.float_power(x, 2), torch.float_power(i, 0.5)),
    f32("a b", 0.2, 3),
    i64("a b", 1, 4),
)
row("maximum", pairs(torch.maximum), *both((*FLOATS, *INTS)), special=True)
row("minimum", pairs(torch.minimum), *both((*FLOATS, *INTS)), special=True)
row(
    "max of two",
    lambda x, i, m: (torch.max(x, i), torch.min(x, i), torch.maximum(m, m[0])),
    f32("a b"),
    i64("b"),
    mask("a b"),
)
row("fmax", lambda x, y: (torch.fmax(x, y), torch.fmin(x, y)), f32("a b"), f32("b"), special=True)
row("atan2", pairs(torch.atan2), *both(FLOATS), special=False)
row("atan2 special", torch.atan2, f32("a b"), f32("a b"), special=True)
row("copysign", pairs(torch.copysign), *both((*FLOATS, *INTS)), special=True)
row("copysign of a number", lambda x: torch.copysign(x, -0.0), f32("a b"), special=True)
row("hypot", torch.hypot, f32("a b"), f32("b"), called=True)
row("xlogy", torch.xlogy, f32("a b", 0.1, 2), f32("b", 0.1, 2))
row("logaddexp", torch.logaddexp, f32("a b"), f32("b"), special=True)
row(
    "addcmul",
    lambda x, y, z: (
        torch.addcmul(x, y, z),
        torch.addcmul(x, y, z, value=0.3),
        torch.addcmul(y, x, x),
    ),
    f32("a b"),
    f32("b"),
    f32("a 1"),
    special=True,
)
row("addcmul ints", lambda i, j: torch.addcmul(i, j, i, value=2), i64("a b"), i64("b"))
row(
    "addcdiv",
    lambda x, y, z: (torch.addcdiv(x, y, z), torch.addcdiv(x, y, z, value=0.3)),
    f32("a b"),
    f32("b"),
    f32("a 1", 1, 2),
)
row(
    "addcmul half",
    lambda x, y: (torch.addcmul(x, y, y, value=0.3), torch.addcdiv(x, y, y, value=0.3)),
    spec("a b", torch.bfloat16, 1, 2),
    spec("b", torch.bfloat16, 1, 2),
)
row(
    "lerp",
    lambda x, y, z: (torch.lerp(x, y, 0.3), torch.lerp(x, y, z), torch.lerp(x, y, 0.7)),
    f32("a b"),
    f32("a b"),
    f32("b", 0.1, 0.9),
    special=False,
)
row(
    "lerp half",
    lambda x, y: (torch.lerp(x, y, 0.3), torch.lerp(x, y, 0.8)),
    spec("a b", torch.bfloat16),
    spec("a b", torch.bfloat16),
)
row(
    "rsub",
    lambda x, i: (torch.rsub(x, i), torch.rsub(i, 1), torch.rsub(x, 1.5)),
    f32("a b"),
    i64("b"),
)

# Comparison, logic, bits


def _with_one(op: Callable[..., Any], x: torch.Tensor) -> Any:
    return op(x, 1)


for _name in "eq ne lt le gt ge".split():
    row(
        _name,
        pairs(getattr(torch, _name)),
        *both((*FLOATS, *INTS)),
        mask("a b"),
        mask("b"),
        special=True,
    )
    row(
        f"{_name} scalar",
        each(partial(_with_one, getattr(torch, _name))),
        *_of_every("a b", (*FLOATS, *INTS)),
        mask("a b"),
    )
row(
    "compare mixed",
    lambda x, i, m, h: (
        x < i,
        i == 1.5,
        m == 1,
        h > x,
        h <= 0.1,
        i > m,
        m < 0.5,
        x == m,
        x >= x.shape[0],
    ),
    f32("a b"),
    i64("b"),
    mask("a b"),
    spec("a b", torch.bfloat16),
)
for _name in "logical_and logical_or logical_xor".split():
    row(
        _name,
        pairs(getattr(torch, _name)),
        *both((torch.float32, torch.int64, torch.bool)),
        special=True,
    )
row(
    "logical mixed",
    lambda x, m: (torch.logical_and(x, m), torch.logical_or(m, x), torch.logical_xor(x, m)),
    f32("a b"),
    mask("b"),
)
for _name in "bitwise_and bitwise_or bitwise_xor".split():
    row(_name, pairs(getattr(torch, _name)), *both((*INTS, torch.bool)))
row(
    "bit operators",
    lambda i, m: (i & 3, i | 4, i ^ 5, m & m[0], m | True, m ^ True, ~m, ~i, m & i.bool()),
    i64("a b"),
    mask("a b"),
)
row(
    "bit operators mixed",
    lambda i, j: (i & j, i | j, i ^ j, 3 & i),
    i64("a b"),
    spec("b", torch.int32, -9, 9),
)
row(
    "shifts",
    lambda i, j: (
        i << 2,
        i >> 1,
        i << j,
        i >> j,
        torch.bitwise_left_shift(i, 1),
        torch.bitwise_right_shift(i, j),
        torch.bitwise_left_shift(2, j),
    ),
    i64("a b"),
    i64("b", 1, 4),
)

# Selection

row(
    "where",
    lambda m, x, y, i: (
        torch.where(m, x, y),
        torch.where(m, x, i),
        torch.where(m, x, 0.5),
        torch.where(m, 1, x),
        torch.where(m, 1.5, i),
        torch.where(m, 2, 3),
        torch.where(m, 2.0, 3.0),
        torch.where(m, i, 2),
    ),
    mask("a b"),
    f32("a b"),
    f32("b"),
    i64("a 1"),
    special=True,
)
row(
    "where 0-d",
    lambda m, x, z: (torch.where(m, x, z), torch.where(m, z, x)),
    mask("a b"),
    f32("a b"),
    spec("", torch.float64),
)
row(
    "where half",
    lambda m, h: (torch.where(m, h, 0.0), torch.where(m, h, -1)),
    mask("a b"),
    spec("b", torch.bfloat16),
)
row(
    "masked_fill",
    lambda m, x, i, z: (
        x.masked_fill(m, -math.inf),
        x.masked_fill(m, 2),
        i.masked_fill(m, 3),
        x.masked_fill(m, z),
        x.masked_fill(m[0], 1.5),
    ),
    mask("a b"),
    f32("a b"),
    i64("a b"),
    f32(""),
)
row(
    "masked_fill broadcast",
    lambda m, x: x.masked_fill(m, torch.finfo(x.dtype).min),
    mask("a 1"),
    f32("a b"),
)
row(
    "clamp",
    lambda x, i: (
        x.clamp(-1, 1),
        x.clamp(min=0.5),
        x.clamp(max=0.5),
        x.clamp(1, -1),
        i.clamp(-2, 2),
        i.clamp(min=0.5),
        i.clamp(max=2.5),
        x.clip(-1, 1),
        x.clamp_min(0),
        x.clamp_max(0),
        i.clamp_min(1.5),
        torch.clamp(x, None, 1.0),
    ),
    f32("a b"),
    i64("a b"),
    special=True,
)
row(
    "clamp tensors",
    lambda x, y, i: (
        x.clamp(y),
        x.clamp(max=y),
        x.clamp(y, y + 1),
        x.clamp(i),
        i.clamp(i - 1, i + 1),
        x.clip(y),
        x.clamp_min(y),
        x.clamp_max(y),
    ),
    f32("a b"),
    f32("b"),
    i64("a b"),
    special=True,
)
row(
    "clamp half",
    lambda x: (x.clamp(-0.3, 0.3), x.clamp(min=0.1)),
    spec("a b", torch.bfloat16),
    special=True,
)

# Activations

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu,
    "relu6": F.relu6,
    "hardtanh": F.hardtanh,
    "hardtanh limits": lambda x: F.hardtanh(x, -0.3, 0.7),
    "leaky_relu": F.leaky_relu,
    "leaky_relu slope": lambda x: F.leaky_relu(x, 0.3),
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "elu": F.elu,
    "elu alpha": lambda x: F.elu(x, 0.7),
    "selu": F.selu,
    "celu": F.celu,
    "celu alpha": lambda x: F.celu(x, 0.7),
    "softplus": F.softplus,
    "softplus beta": lambda x: F.softplus(x, 2.0, 1.0),
    "mish": F.mish,
    "softsign": F.softsign,
    "tanhshrink": F.tanhshrink,
    "hardshrink": F.hardshrink,
    "softshrink": F.softshrink,
    "threshold": lambda x: F.threshold(x, 0.2, -7.0),
    "logsigmoid": F.logsigmoid,
    "logit": lambda x: torch.logit(x, 0.1),
}
for _name, _op in _ACTIVATIONS.items():
    row(_name, each(_op), *_of_every("a b", FLOATS), special=True)
row("activations of ints", lambda i: (F.relu(i), F.relu6(i), F.hardtanh(i)), i64("a b"))
row("logit plain", each(torch.logit), *_of_every("a b", FLOATS, 0.1, 0.9), special=True)
row("prelu", F.prelu, f32("a 4 c"), f32("4"))
row("prelu one", F.prelu, f32("a b"), f32("1"))
row("prelu of a number", lambda x, w: F.prelu(x[0, 0], w), f32("a b"), f32("1"))
row("glu", lambda x, y: (F.glu(x), F.glu(y, 0)), f32("a 6"), f32("4 b"))
row("glu dynamic", lambda x: F.glu(torch.cat([x, x + 1], -1)), f32("a b"))
row("aten.elu scale", lambda x: aten.elu(x, 0.5, 1.5, 2.0), f32("a b"), special=True)
row("geglu", lambda x: x[..., :4] * F.gelu(x[..., 4:]), f32("a b 8"))

# Casts and copies

row("casts", lambda x: [x.to(d) for d in (*FLOATS, *INTS, torch.bool)], f32("a b", 0, 9))
row(
    "casts of halves",
    lambda x, y: [t.to(d) for t in (x, y) for d in (*FLOATS, torch.int64, torch.int8, torch.bool)],
    spec("a b", torch.bfloat16),
    spec("a b", torch.float16),
)
row(
    "casts of ints",
    lambda i, j: [t.to(d) for t in (i, j) for d in (*FLOATS, *INTS, torch.bool)],
    i64("a b", 1, 99),
    spec("a b", torch.uint8, 1, 200),
)
row(
    "casts of doubles",
    lambda x: [x.to(d) for d in (*FLOATS, torch.int64, torch.int32, torch.bool)],
    spec("a b", torch.float64),
)
row("casts of bool", lambda m: [m.to(d) for d in (*FLOATS, *INTS)], mask("a b"))
row(
    "to forms",
    lambda x, i: (
        x.to("cpu"),
        aten.to.other(x, i),
        x.to(torch.float64, copy=True),
        x.to(i),
        x.to(x),
        x.type_as(i),
        i.float(),
        x.half(),
        x.double(),
        x.long(),
        x.to(device="cpu", dtype=torch.bfloat16),
        x.to(torch.float32, non_blocking=True),
    ),
    f32("a b"),
    i64("a b"),
)
row(
    "copies",
    lambda x: (
        x.clone(),
        x.contiguous(),
        x.detach(),
        x.t().contiguous(),
        x.t().clone(),
        x.clone(memory_format=torch.contiguous_format),
    ),
    f32("a b"),
)
row(
    "casts of TorchScript's autocast",
    lambda x: (
        aten._autocast_to_reduced_precision(x, False, True, torch.float16, torch.bfloat16) * 2,
        aten._autocast_to_full_precision(x.bfloat16(), False, True) * 2,
    ),
    f32("a b"),
)
row(
    "_to_copy",
    lambda x: (aten._to_copy(x, dtype=torch.bfloat16), aten.lift_fresh_copy(x), aten.alias(x)),
    f32("a b"),
)
row(
    "channels last",
    lambda x: x.contiguous(memory_format=torch.channels_last) * 2,
    f32("a 3 c d"),
)
row(
    "dropout",
    lambda x: (
        F.dropout(x, 0.5, False),
        aten.feature_dropout(x, 0.5, False),
        aten.alpha_dropout(x, 0.5, False),
    ),
    f32("a b"),
)

# Shapes

row(
    "view",
    lambda x: (x.view(-1), x.view(x.shape[0], -1), x.view(x.shape[0], 2, 4, x.shape[1]).sum(1)),
    f32("a b 8"),
)
row(
    "reshape",
    lambda x: (
        x.reshape(-1, 2),
        x.reshape(x.shape[1], -1),
        x.transpose(0, 1).reshape(-1),
        x.permute(2, 0, 1).reshape(8, -1),
    ),
    f32("a b 8"),
)
row(
    "view strided",
    lambda x: (x + 1).view(x.shape[0] * x.shape[1], 2, 4).transpose(0, 1),
    f32("a b 8"),
)
row(
    "unsqueeze",
    lambda x: (x.unsqueeze(0), x.unsqueeze(-1), x.unsqueeze(1), x[:, None], x[..., None, :]),
    f32("a b"),
)
row(
    "squeeze",
    lambda x: (x.squeeze(1), x.squeeze(-1), x.squeeze((1, 3)), x.squeeze(0)),
    f32("a 1 b 1"),
    refuses=1,
)
row("squeeze all", lambda x: x.squeeze(), f32("a 1 b 1"), refuses=1)
row("squeeze dynamic", lambda x: x.sum(1, keepdim=True).squeeze(1), f32("a b c"))
row(
    "flatten",
    lambda x: (x.flatten(), x.flatten(1), x.flatten(0, 1), x.flatten(-2), x.sum().flatten()),
    f32("a b 4"),
)
row("unflatten", lambda x: (x.unflatten(-1, (2, 4)), x.unflatten(1, (2, -1))), f32("a 8"))
row("view_as", lambda x, y: (x.view_as(y), x.t().reshape_as(y)), f32("a b"), f32("b a"))
row("_unsafe_view", lambda x: aten._unsafe_view(x, [-1]), f32("a b"))
row(
    "transpose",
    lambda x: (
        x.transpose(0, 1),
        x.transpose(-1, -3),
        x.swapaxes(0, 2),
        x.swapdims(-1, 0),
        x.mT,
        x.transpose(1, 1),
    ),
    f32("a b 4"),
)
row("t", lambda x, y, z: (x.t(), x.T, y.t(), z.t(), aten.numpy_T(x)), f32("a b"), f32("a"), f32(""))
row(
    "permute",
    lambda x: (
        x.permute(2, 0, 1),
        x.permute(-1, -2, -3),
        x.permute(0, 1, 2),
        x.permute(1, 0, 2) + x.permute(1, 0, 2),
    ),
    f32("a b 4"),
)
row(
    "movedim",
    lambda x: (
        x.movedim(0, -1),
        x.movedim(-1, 0),
        x.movedim(1, 1),
        x.movedim((0, 1), (1, 2)),
        x.moveaxis(2, 1),
        torch.moveaxis(x, (0, 1), (1, 2)),
    ),
    f32("a b 4"),
)
row(
    "expand",
    lambda x, y, z: (
        x.expand(-1, x.shape[1], 5),
        x.expand(7, -1, -1, 3),
        y.expand(x.shape[0], -1),
        y.expand_as(x[..., 0]),
        torch.broadcast_to(y, x.shape[:2]),
        z.expand(2, 3),
    ),
    f32("a b 1"),
    f32("b"),
    f32(""),
)
row("expand and compute", lambda x, y: x.expand(-1, 4) * 2 + y, f32("a 1"), f32("a 4"))
row(
    "slice",
    lambda x: (
        x[1:],
        x[:2],
        x[:-1],
        x[-2:],
        x[::2],
        x[1::2],
        x[:, 1:-1],
        x[5:],
        x[:99],
        x[-99:2],
        x[2:1],
    ),
    f32("a b"),
    refuses=0,
)
row(
    "slice more",
    lambda x: (
        x[1:] * 2,
        x[:, -1:],
        x[:, ::3],
        x[..., 1:3] + 1,
        x[0 : x.shape[1]],
        x[x.shape[1] - 1 :],
        x[:, : x.shape[0] // 2],
        x[:, -x.shape[0] :] * 2,
    ),
    f32("a b"),
    refuses=0,
)
row(
    "slice static",
    lambda x: (x[:, 2:4], x[:, -3:], x[:, :-5], x[:, 1:9:4], x[:, 10:], x[:, -20:3]),
    f32("a 8"),
)
row(
    "narrow",
    lambda x: (
        x.narrow(1, 2, 3),
        x.narrow(-1, -3, 2),
        x.narrow(1, 0, 8),
        x.narrow(0, 0, x.shape[0]),
    ),
    f32("a 8"),
)
row(
    "select",
    lambda x: (x[:, 0], x[:, -1], x.select(1, 3), x.select(-1, -2) * 2, x[:, 1] + x[:, 2]),
    f32("a 8"),
)
row("select dynamic", lambda x: (x[0], x[-1], x[:, 0], x[:, -1] * 2), f32("a b"))
row("select more", lambda x: (x[1], x[-2], x[:, 2], x[:, -3]), f32("a b"))
row(
    "split",
    lambda x: (
        *x.split(3, 1),
        *x.split([2, 5, 1], 1),
        *x.split(8, -1),
        *aten.split.sizes(x, [3, 5], 1),
    ),
    f32("a 8"),
)
row("chunk", lambda x: (*x.chunk(3, -1), *x.chunk(2, 1), *x.chunk(9, 1)), f32("a 8"))
row("chunk compute", lambda x: (lambda q, k, v: q * k + v)(*x.chunk(3, -1)), f32("a b 12"))
row("split dynamic", lambda x: x.split([x.shape[0] - 1, 1]), f32("a b"))
row("tensor_split", lambda x: (*x.tensor_split(3, 1), *x.tensor_split([2, 5], 1)), f32("a 8"))
row("unbind", lambda x: (*x.unbind(1), *x.unbind(-1), x.unbind(1)[1] * 2), f32("a 3 2"))
row(
    "cat",
    lambda x, y: (
        torch.cat([x, y]),
        torch.cat([x, x], 1),
        torch.cat([x, y[:, :1], x], -1) if False else torch.cat([x, x * 2, x], -1),
        torch.concat([x, y]),
    ),
    f32("a b"),
    f32("c b"),
)
row(
    "cat mixed",
    lambda x, i, h: (torch.cat([x, i], 1), torch.cat([h, x], 1), torch.cat([i, h], 0)),
    f32("a b"),
    i64("a b"),
    spec("a b", torch.bfloat16),
)
row(
    "cat empty",
    lambda x: (
        torch.cat([torch.empty(0), x]),
        torch.cat([x[:0], x]),
        torch.cat([x]),
        torch.cat([x, x.new_empty(0, 4)]),
    ),
    f32("a 4"),
)
row(
    "cat of views",
    lambda x, y: torch.cat([x.t(), y[:, None].expand(-1, 2), x.t() * 2], 1),
    f32("a b"),
    f32("b"),
)
row(
    "cat scalars",
    lambda x: torch.cat([torch.ones_like(x), x, torch.zeros(x.shape[0], 2)], 1),
    f32("a b"),
)
row(
    "stack",
    lambda x, y, i: (
        torch.stack([x, y]),
        torch.stack([x, y, x], 1),
        torch.stack([x, y], -1),
        torch.stack([x]),
        torch.stack([x, i], -2),
    ),
    f32("a b"),
    f32("a b"),
    i64("a b"),
)
row("stack 0-d", lambda x, y: torch.stack([x, y, x * y]), f32(""), f32(""))
row("hstack", lambda x, y: (torch.hstack([x, y]), torch.vstack([x, y])), f32("a b"), f32("a b"))
row(
    "repeat",
    lambda x: (x.repeat(2, 3), x.repeat(2, 1, 1), x.repeat(1, 1), torch.tile(x, (2, 2))),
    f32("a b"),
)
row(
    "repeat_interleave",
    lambda x: (x.repeat_interleave(3, 1), x.repeat_interleave(2, 0)),
    f32("a b"),
)
row(
    "roll",
    lambda x: (x.roll(1, 0), x.roll(-9, 1), x.roll((1, 20), (0, 1)), x.roll(1), x.t().roll(-2)),
    f32("a b"),
    refuses=0,
)
row("roll by half", lambda x: x.roll((x.shape[0] // 2, -x.shape[1]), (0, 1)), f32("a b"), refuses=0)
row("roll by one size", lambda x: x.roll(x.shape[0] // 2, 0), f32("a b"), refuses=0)
row("roll static", lambda x: (x.roll(3, 1), x.roll(-9, 1)), f32("a 8"))
row("flip", lambda x: (x.flip(0), x.flip((0, 1))), f32("a b"), called=True)
row(
    "pad",
    lambda x: (
        F.pad(x, (1, 2)),
        F.pad(x, (1, 0, 0, 2), value=3.5),
        F.pad(x, (0, -1)),
        F.pad(x, (0, 0)),
        aten.constant_pad_nd(x, [1, 1], 2.5),
    ),
    f32("a b"),
)
row(
    "pad ints",
    lambda i, m: (F.pad(i, (1, 1), value=7), F.pad(m, (2, 0), value=True)),
    i64("a b"),
    mask("a b"),
)
row(
    "pad modes",
    lambda x: (
        F.pad(x, (1, 2), mode="reflect"),
        F.pad(x, (1, 2), mode="replicate"),
        F.pad(x, (1, 1), mode="circular"),
    ),
    f32("a 3 b"),
    called=True,
)
row(
    "pixel_shuffle",
    lambda x: (F.pixel_shuffle(x, 2), F.pixel_unshuffle(F.pixel_shuffle(x, 2), 2)),
    f32("a 8 c d"),
    refuses=0,
)
row("channel_shuffle", lambda x: F.channel_shuffle(x, 2), f32("a 8 c d"))
row(
    "tril",
    lambda x: (x.tril(), x.triu(), x.tril(1), x.triu(-1), x.tril(-2), x.triu(2)),
    f32("a b c"),
    special=True,
)
row("tril ints", lambda i, m: (i.tril(), m.triu(1)), i64("a b"), mask("a b"))
row(
    "causal mask", lambda x: torch.full((x.shape[0], x.shape[0]), -math.inf).triu(1) + x, f32("a a")
)

# Factories

row(
    "full",
    lambda x: (
        torch.full((2, 3), 1.5),
        torch.full(x.shape, 2),
        torch.full((x.shape[0],), True),
        torch.full((2,), 3, dtype=torch.float32),
        torch.full_like(x, 2),
        torch.full_like(x, 1.5, dtype=torch.int64),
        x.new_full((3, x.shape[1]), 2.5),
        torch.full(x.shape, x.shape[0]),
    ),
    f32("a b"),
)
row(
    "ones",
    lambda x: (
        torch.ones(x.shape),
        torch.ones_like(x),
        torch.ones_like(x, dtype=torch.int64),
        x.new_ones(2, x.shape[0]),
        torch.zeros(x.shape[1], dtype=torch.bool),
        torch.zeros_like(x),
        x.new_zeros(3),
        torch.zeros(2, x.shape[0], dtype=torch.int32),
    ),
    f32("a b"),
)
row(
    "scalar_tensor",
    lambda x: (
        torch.scalar_tensor(2.5),
        torch.scalar_tensor(3, dtype=torch.int64) + x,
        torch.scalar_tensor(x.shape[0]),
    ),
    f32("a b"),
)
row(
    "empty",
    lambda x: (torch.empty_like(x).fill_(2) if False else torch.zeros_like(x)) + x,
    f32("a b"),
)
row(
    "arange",
    lambda x: (
        torch.arange(5),
        torch.arange(x.shape[0]),
        torch.arange(2, x.shape[1] + 2),
        torch.arange(1, 10, 3),
        torch.arange(x.shape[0], dtype=torch.int32),
        torch.arange(x.shape[0] - 1, -1, -1),
        torch.arange(7, dtype=torch.int64) * 2,
        torch.arange(0, 2 * x.shape[0], 2),
    ),
    f32("a b"),
)
row(
    "arange as floats",
    lambda x: (
        torch.arange(0, x.shape[0], dtype=torch.float32),
        torch.arange(x.shape[1], dtype=torch.float32) * 0.5,
        torch.arange(0, 8, 2, dtype=torch.bfloat16),
    ),
    f32("a b"),
)
row(
    "arange of fractions",
    lambda x: (torch.arange(0.0, 2.0, 0.5) + x, torch.arange(0, 1, 0.25)),
    f32("a 4"),
    called=True,
)
row("linspace", lambda x: torch.linspace(0, 1, 5) + x, f32("a 5"), called=True)
row("eye", lambda x: torch.eye(4) @ x, f32("4 b"), called=True)
row(
    "positions",
    lambda x: (
        (torch.arange(x.shape[1])[None, :] <= torch.arange(x.shape[0])[:, None]).to(x.dtype) * x
    ),
    f32("a b"),
)
row("one_hot", lambda i: F.one_hot(i, 7), index("a b", 7), called=True)
row(
    "meshgrid",
    lambda x, y: (*torch.meshgrid(x, y, indexing="ij"), *aten.meshgrid([x, y])),
    f32("a"),
    f32("b"),
)

# Reductions

for _name in "sum mean".split():
    _op = getattr(torch, _name)
    row(_name, each(_op), *_of_every("a b", FLOATS))
    row(
        f"{_name} dims",
        lambda x, op=_op: (
            op(x, 0),
            op(x, -1),
            op(x, 1, keepdim=True),
            op(x, (0, 2)),
            op(x, (0, 1, 2)),
            op(x, ()),
            op(x, [-1], dtype=torch.float64),
            op(x, (1, 2), keepdim=True),
        ),
        f32("a b c"),
    )
    row(
        f"{_name} halves",
        lambda x, y, op=_op: (op(x, -1), op(y, 0), op(x, 1, dtype=torch.float32)),
        spec("a b", torch.bfloat16),
        spec("a b", torch.float16),
    )
    row(f"{_name} special", lambda x, op=_op: (op(x, -1), op(x, 0)), f32("a b"), special=True)
row(
    "sum ints",
    lambda i, j, m: (
        i.sum(),
        j.sum(-1),
        m.sum(0),
        m.sum(),
        i.sum(0, dtype=torch.float32),
        m.sum(1, dtype=torch.int32),
        j.sum(0, keepdim=True),
    ),
    i64("a b"),
    spec("a b", torch.int32, -9, 9),
    mask("a b"),
)
row(
    "mean dtype",
    lambda i: (i.mean(dtype=torch.float32), i.mean(0, dtype=torch.float64)),
    i64("a b"),
)
row(
    "prod",
    lambda x, i, m: (
        x.prod(),
        x.prod(-1),
        x.prod(0, keepdim=True),
        i.prod(1),
        m.prod(0),
        i.prod(0, dtype=torch.float32),
    ),
    f32("a b", 0.5, 1.5),
    i64("a b", 1, 3),
    mask("a b"),
)
row(
    "amax",
    lambda x, i, h, m: (
        x.amax(),
        x.amax(0),
        x.amax((0, 1)),
        x.amax(-1, True),
        i.amax(1),
        h.amax(-1),
        m.amax(0),
    ),
    f32("a b"),
    i64("a b"),
    spec("a b", torch.bfloat16),
    mask("a b"),
    special=True,
)
row(
    "amin",
    lambda x, i, h, m: (
        x.amin(),
        x.amin(0),
        x.amin((0, 1)),
        x.amin(-1, True),
        i.amin(1),
        h.amin(-1),
        m.amin(0),
    ),
    f32("a b"),
    i64("a b"),
    spec("a b", torch.bfloat16),
    mask("a b"),
    special=True,
)
row(
    "max",
    lambda x, i: (x.max(), x.min(), i.max(), i.min(), x.max() + x.min()),
    f32("a b"),
    i64("a b"),
    special=True,
)
row("amax of one axis", lambda x: (x.amax(1), x.amin(1, True)), f32("a b"))
row(
    "max dim",
    lambda x: (*x.max(1), *x.min(0, keepdim=True), x.max(-1)[0] * 2, x.max(-1).values),
    f32("a b"),
    called=True,
)
row(
    "values of max dim",
    lambda x, i, h: (x.max(1)[0], x.min(0, True).values, i.max(-1).values + 1, h.min(1)[0]),
    f32("a b"),
    i64("a b"),
    spec("a b", torch.bfloat16),
    special=True,
)
row("max dim of booleans", lambda m: m.max(1).values, mask("a b"), called=True)
row("aminmax", lambda x: torch.aminmax(x, dim=1), f32("a b"), called=True)
row(
    "any",
    lambda m, x, i: (
        m.any(),
        m.any(0),
        m.any(-1, True),
        (x > 1).any(1),
        i.any(1),
        x.any(0),
        torch.any(m, (0, 1)),
    ),
    mask("a b"),
    f32("a b"),
    i64("a b"),
)
row(
    "all",
    lambda m, x, i: (
        m.all(),
        m.all(0),
        m.all(-1, True),
        (x > 1).all(1),
        i.all(1),
        x.all(0),
        torch.all(m, (0, 1)),
    ),
    mask("a b"),
    f32("a b"),
    i64("a b"),
)
row(
    "any bytes",
    lambda b: (b.any(), b.all(1), b.any(0)),
    spec("a b", torch.uint8, 0, 1),
    called=True,
)
row(
    "any dims",
    lambda m: (aten.any.dims(m, [0, 1]), aten.all.dims(m, [1], True), aten.any.dims(m)),
    mask("a b"),
)
row(
    "var",
    lambda x: (
        x.var(),
        x.var(-1),
        x.var(0, unbiased=False),
        x.var((0, 1), correction=0),
        x.var(1, correction=2),
        x.var(-1, keepdim=True),
        x.var(False),
        torch.var(x, dim=None, correction=1),
    ),
    f32("a b"),
)
row(
    "std",
    lambda x: (
        x.std(),
        x.std(-1),
        x.std(0, unbiased=False),
        x.std((0, 1), correction=0),
        x.std(1, correction=2),
        x.std(-1, keepdim=True),
        x.std(False),
    ),
    f32("a b"),
)
row(
    "var halves",
    lambda x, y, z: (x.var(-1), y.std(0), x.std(), z.var(1)),
    spec("a b", torch.bfloat16),
    spec("a b", torch.float16),
    spec("a b", torch.float64),
)
row(
    "var_mean",
    lambda x: (
        *torch.var_mean(x, -1),
        *torch.var_mean(x, (0, 1), correction=0),
        *torch.std_mean(x, 0),
        *torch.var_mean(x, 0, keepdim=True),
        *torch.var_mean(x),
        *torch.std_mean(x, unbiased=False),
        *torch.var_mean(x, unbiased=True),
        *torch.std_mean(x, 0, correction=2),
    ),
    f32("a b"),
    called=True,
)
row(
    "norm",
    lambda x: (
        x.norm(),
        x.norm(dim=-1),
        x.norm(1, 0),
        torch.linalg.vector_norm(x, 2, -1, True),
        torch.linalg.vector_norm(x),
        x.norm(math.inf, 1),
        torch.linalg.vector_norm(x, 3, 1),
        torch.linalg.vector_norm(x, 0, 1),
        torch.linalg.vector_norm(x, -math.inf, 1),
    ),
    f32("a b"),
)
row(
    "norm halves",
    lambda x: (torch.linalg.vector_norm(x, 2, -1), x.norm(dim=0)),
    spec("a b", torch.bfloat16),
)
row("normalize", lambda x: (F.normalize(x, dim=-1), F.normalize(x, p=1, dim=0)), f32("a b"))
row(
    "cosine_similarity",
    lambda x, y: (F.cosine_similarity(x, y, -1), F.cosine_similarity(x, y[0], 0)),
    f32("a b"),
    f32("a b"),
    refuses=0,
)
row(
    "cosine_similarity of all",
    lambda x, y: F.cosine_similarity(x[:, None], y[None], -1, 1e-6),
    f32("a b"),
    f32("c b"),
)
row(
    "logsumexp",
    lambda x, h: (x.logsumexp(-1), x.logsumexp(0, True), x.logsumexp((0, 1)), h.logsumexp(1)),
    f32("a b"),
    spec("a b", torch.bfloat16),
    special=True,
)
row("argmax", lambda x: (x.argmax(), x.argmax(-1), x.argmin(0, True)), f32("a b"), called=True)
row(
    "cumsum",
    lambda x, i: (x.cumsum(-1), i.cumsum(0), x.cumprod(1)),
    f32("a b"),
    i64("a b"),
    called=True,
)
row("count_nonzero", lambda i: i.count_nonzero(1), i64("a b"), called=True)
row(
    "reduce twice",
    lambda x: (
        (x - x.mean(-1, keepdim=True)).pow(2).mean(-1, keepdim=True) + x.amax(-1, keepdim=True)
    ),
    f32("a b"),
)
row(
    "mse",
    lambda x, y: (F.mse_loss(x, y), F.l1_loss(x, y), F.mse_loss(x, y, reduction="none")),
    f32("a b"),
    f32("a b"),
    called=True,
)

# Softmax and normalization

row("softmax", each(lambda x: x.softmax(-1)), *_of_every("a b", FLOATS), special=True)
row(
    "softmax axes",
    lambda x: (
        x.softmax(0),
        x.softmax(1),
        x.softmax(-1, dtype=torch.float64),
        x.softmax(2, torch.float32),
    ),
    f32("a b c"),
)
row(
    "softmax dtype",
    lambda h, i: (
        h.softmax(-1, dtype=torch.float32),
        h.softmax(-1, torch.float32).to(h.dtype),
        i.softmax(-1, dtype=torch.float32),
    ),
    spec("a b", torch.bfloat16),
    i64("a b"),
)
row("log_softmax", each(lambda x: x.log_softmax(-1)), *_of_every("a b", FLOATS), special=True)
row(
    "log_softmax axes",
    lambda x, h: (x.log_softmax(0), x.log_softmax(1), h.log_softmax(-1, dtype=torch.float32)),
    f32("a b c"),
    spec("a b", torch.bfloat16),
)
row("_softmax", lambda x: (aten._softmax(x, -1, False), aten._log_softmax(x, 0, False)), f32("a b"))
row(
    "_safe_softmax",
    lambda x, m: aten._safe_softmax(x.masked_fill(m, -math.inf), -1),
    f32("a b"),
    mask("a b"),
)
row("softmin", lambda x: F.softmin(x, -1), f32("a b"))
row(
    "masked softmax",
    lambda x, m: (x / 8 + torch.where(m, 0.0, -math.inf)[:, None, :]).softmax(-1),
    f32("a b c"),
    mask("a c"),
)
row(
    "layer_norm",
    lambda x, w, b: (
        F.layer_norm(x, (6,), w, b),
        F.layer_norm(x, (6,)),
        F.layer_norm(x, (6,), w),
        F.layer_norm(x, (6,), None, b),
        F.layer_norm(x, (6,), w, b, 0.1),
    ),
    f32("a b 6"),
    f32("6"),
    f32("6"),
)
row(
    "layer_norm axes",
    lambda x, w, b: (F.layer_norm(x, (3, 6), w, b), F.layer_norm(x, (3, 6))),
    f32("a 3 6"),
    f32("3 6"),
    f32("3 6"),
)
row("layer_norm dynamic", lambda x: F.layer_norm(x, x.shape[-1:]), f32("a b"))
row(
    "layer_norm halves",
    lambda x, w, y, v: (F.layer_norm(x, (6,), w, w), F.layer_norm(y, (6,), v, v)),
    spec("a 6", torch.bfloat16),
    spec("6", torch.bfloat16),
    spec("a 6", torch.float16),
    spec("6", torch.float16),
)
row("layer_norm double", lambda x: F.layer_norm(x, (6,)), spec("a 6", torch.float64))
row(
    "layer_norm mixed",
    lambda x, w: F.layer_norm(x, (6,), w, w),
    spec("a 6", torch.bfloat16),
    f32("6"),
)
row(
    "native_layer_norm",
    lambda x, w, b: (
        *aten.native_layer_norm(x, [6], w, b, 1e-5),
        aten.native_layer_norm(x, [6], None, None, 1e-5)[0],
    ),
    f32("a b 6"),
    f32("6"),
    f32("6"),
)
row(
    "native_layer_norm half",
    lambda x, w, b: aten.native_layer_norm(x, [6], w, b, 1e-5),
    *[spec(s, torch.bfloat16) for s in ("a b 6", "6", "6")],
)
row(
    "rms_norm",
    lambda x, w, h: (
        F.rms_norm(x, (6,), w),
        F.rms_norm(x, (6,)),
        F.rms_norm(x, (6,), w, 0.1),
        F.rms_norm(h, (6,)),
        F.rms_norm(x, (6,), None, 1e-6),
    ),
    f32("a b 6"),
    f32("6"),
    spec("a 6", torch.bfloat16),
)
row(
    "rms_norm by hand",
    lambda x, w: (
        w * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
    ),
    spec("a b 6", torch.bfloat16),
    spec("6", torch.bfloat16),
)
row(
    "group_norm",
    lambda x, w, b: (F.group_norm(x, 2, w, b), F.group_norm(x, 4), F.group_norm(x, 1, w, b, 0.1)),
    f32("a 8 c d"),
    f32("8"),
    f32("8"),
    refuses=0,
)
row(
    "group_norm 1d",
    lambda x: (F.group_norm(x, 2), F.group_norm(x[..., 0], 2)),
    f32("a 8 c"),
    refuses=0,
)
row(
    "group_norm half",
    lambda x, w: F.group_norm(x, 2, w, w),
    spec("a 8 c d", torch.bfloat16),
    spec("8", torch.bfloat16),
    refuses=0,
)
row(
    "batch_norm",
    lambda x, m, v, w, b: (
        F.batch_norm(x, m, v, w, b),
        F.batch_norm(x, m, v),
        F.batch_norm(x[..., 0, 0], m, v, w, b),
        F.batch_norm(x, m, v, w, None, False, 0.1, 0.1),
    ),
    f32("a 8 c d"),
    f32("8"),
    f32("8", 0.5, 2),
    f32("8"),
    f32("8"),
)
row(
    "batch_norm half",
    lambda x, m, v, w, b: F.batch_norm(x, m, v, w, b),
    spec("a 8 c", torch.bfloat16),
    f32("8"),
    f32("8", 0.5, 2),
    f32("8"),
    f32("8"),
)
row(
    "_native_batch_norm_legit_no_training",
    lambda x, m, v, w, b: aten._native_batch_norm_legit_no_training(
        x + m[:, None],
        w,
        b,
        m,
        v,
        0.1,
        1e-5,  # adding raises where eager would read beyond the statistics
    )[0],
    f32("a 8 c"),
    f32("8"),
    f32("8", 0.5, 2),
    f32("8"),
    f32("8"),
)
row(
    "instance_norm",
    lambda x, w, b: (
        torch.instance_norm(x, w, b, None, None, True, 0.1, 1e-5, False),
        torch.instance_norm(x, None, None, None, None, True, 0.1, 1e-5, False),
    ),
    f32("a 8 c d"),
    f32("8"),
    f32("8"),
    a=3,
    c=4,
    d=5,
)
row(
    "local_response_norm",
    lambda x: F.local_response_norm(x, 2),
    f32("a 8 c d"),
    called=True,
    refuses=0,
)

# Matrix products

row(
    "linear",
    lambda x, w, b: (
        F.linear(x, w, b),
        F.linear(x, w),
        F.linear(x[0], w, b),
        F.linear(x, w, b) * 2,
    ),
    f32("a b 6"),
    f32("7 6"),
    f32("7"),
)
row("linear vector", lambda x, w: F.linear(x, w), f32("6"), f32("7 6"))
row("linear dynamic", lambda x, w: F.linear(x, w), f32("a b"), f32("c b"))
row(
    "linear halves",
    lambda x, w, b, y, v: (F.linear(x, w, b), F.linear(y, v)),
    spec("a 6", torch.bfloat16),
    spec("7 6", torch.bfloat16),
    spec("7", torch.bfloat16),
    spec("a 6", torch.float64),
    spec("7 6", torch.float64),
)
row(
    "linear of views",
    lambda x, w: (
        F.linear(x.transpose(0, 1), w),
        F.linear(x.transpose(0, 2)[..., :3].contiguous(), w[:, :3]),
        F.linear(x[:, 1:], w),
        F.linear(x[..., :4], w[:, :4]),
    ),
    f32("a b 6"),
    f32("7 6"),
    a=4,
    b=5,
    refuses=1,
)
row(
    "mm",
    lambda x, y: (torch.mm(x, y), x @ y, torch.mm(y.t(), x.t()), x.mm(y).relu()),
    f32("a b"),
    f32("b c"),
)
row("mm ints", lambda i, j: i @ j, i64("a b"), i64("b c"), called=True)
row("bmm", lambda x, y: (torch.bmm(x, y), torch.bmm(y.mT, x.mT), x @ y), f32("a b c"), f32("a c d"))
row(
    "matmul",
    lambda x, y, z: (x @ y, x @ z, y @ z, z @ y),
    f32("a 2 b c"),
    f32("a 2 c c"),
    f32("c c"),
)
row(
    "matmul vectors",
    lambda x, v, w: (x @ v, w @ x, v @ v, torch.mv(x, v), torch.dot(v, v), torch.outer(w, v)),
    f32("a b"),
    f32("b"),
    f32("a"),
)
row(
    "matmul broadcast",
    lambda x, y: (x @ y, y.unsqueeze(1) @ x.unsqueeze(0)),
    f32("a b c"),
    f32("a c c"),
    a=3,
    b=4,
    c=4,
)
row("matmul broadcast batch", lambda x, y: x @ y, f32("a 1 b c"), f32("d c b"))
row(
    "matmul halves",
    lambda x, y: x @ y,
    spec("a b c", torch.bfloat16),
    spec("a c d", torch.bfloat16),
)
row(
    "addmm",
    lambda b, x, y, m: (
        torch.addmm(b, x, y),
        torch.addmm(m, x, y),
        torch.addmm(b, x, y, beta=2, alpha=0.5),
        torch.addmm(m, x, y, beta=0),
        torch.addmm(b, x, y, alpha=2),
        torch.addmm(m[:1], x, y),
    ),
    f32("c"),
    f32("a b"),
    f32("b c"),
    f32("a c"),
    refuses=0,
)
row("addmm nan", lambda m, x, y: torch.addmm(m, x, y, beta=0), f32("a c"), f32("a b"), f32("b c"))
row(
    "baddbmm",
    lambda m, x, y: (
        torch.baddbmm(m, x, y),
        torch.baddbmm(m[0], x, y, beta=0.5, alpha=2),
        torch.baddbmm(m, x, y, beta=0),
    ),
    f32("a b d"),
    f32("a b c"),
    f32("a c d"),
)
row("addmv", lambda v, x, w: torch.addmv(v, x, w), f32("a"), f32("a b"), f32("b"))
row(
    "einsum",
    lambda x, y: (
        torch.einsum("abc,adc->abd", x, y),
        torch.einsum("abc->ac", x),
        torch.einsum("abc,adc->abdc", x, y),
        torch.einsum("abc, adc -> bd", x, y),
        torch.einsum("a...c,adc->a...d", x, y),
        torch.einsum("...c,c->...", x, y[0, 0]),
        torch.einsum("abc,adc", x, y),
        torch.einsum("ab,ad->abd", x[..., 0], y[..., 0]),
        torch.einsum("abc,dc->dab", x, y[0]),
        torch.einsum("abc,adc->cadb", x, y),
        torch.einsum("xyz->zx", x) * 2,
    ),
    f32("a b c"),
    f32("a d c"),
    refuses=0,
)
row(
    "einsum of three",
    lambda x, y, w: (
        torch.einsum("abc,adc,de->abe", x, y, w),
        torch.einsum("abc,adc,de->ae", x, y, w),
        torch.einsum("...bc,...dc->...bd", x[:, None], y[None]),
    ),
    f32("a b c", 0.1, 2),
    f32("a d c", 0.1, 2),
    f32("d 3", 0.1, 2),
)
row("einsum diagonal", lambda x: torch.einsum("aii->ai", x) + 1, f32("a 4 4"), called=True)
row("einsum ints", lambda i: torch.einsum("ab,ab->a", i, i), i64("a b"), called=True)
row(
    "einsum halves",
    lambda x, y: torch.einsum("ab,cb->ac", x, y),
    spec("a b", torch.bfloat16),
    spec("c b", torch.bfloat16),
)
row(
    "bilinear",
    lambda x, y, w: F.bilinear(x, y, w),
    f32("a 3"),
    f32("a 4"),
    f32("5 3 4"),
    called=True,
)
row("cdist", lambda x, y: torch.cdist(x, y), f32("a b 4"), f32("a c 4"), called=True, a=3, b=5, c=4)
row("addr", lambda m, v, w: torch.addr(m, v, w), f32("a b"), f32("a"), f32("b"), called=True)

# Attention

row(
    "attention",
    lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
    f32("a 2 b 4"),
    f32("a 2 c 4"),
    f32("a 2 c 4"),
)
row(
    "attention mask",
    lambda q, k, v, m: (
        F.scaled_dot_product_attention(q, k, v, m),
        F.scaled_dot_product_attention(q, k, v, torch.where(m, 0.0, -9.0)),
    ),
    f32("a 2 b 4"),
    f32("a 2 c 4"),
    f32("a 2 c 4"),
    mask("a 1 b c"),
)
row(
    "attention causal",
    lambda q, k, v: (
        F.scaled_dot_product_attention(q, k, v, is_causal=True),
        F.scaled_dot_product_attention(q, k, v, scale=0.3),
    ),
    f32("a 2 b 4"),
    f32("a 2 b 4"),
    f32("a 2 b 4"),
)
row(
    "attention gqa",
    lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
    f32("a 4 b 4"),
    f32("a 2 b 4"),
    f32("a 2 b 4"),
)
row(
    "attention few axes",
    lambda q, k, v: (
        F.scaled_dot_product_attention(q, k, v),
        F.scaled_dot_product_attention(q[0], k[0], v[0]),
    ),
    f32("a b 4"),
    f32("a c 4"),
    f32("a c 6"),
)
row(
    "attention shared keys",
    lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
    f32("a 3 2 b 4"),
    f32("a 1 2 c 4"),
    f32("a 1 2 c 4"),
)
row(
    "attention float64",
    lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
    spec("a 2 b 4", torch.float64, -2, 2),
    spec("a 2 c 4", torch.float64, -2, 2),
    spec("a 2 c 4", torch.float64, -2, 2),
    called=True,
)
row(
    "attention gqa mask",
    lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m, enable_gqa=True),
    f32("a 4 b 4"),
    f32("a 2 c 4"),
    f32("a 2 c 4"),
    mask("a 1 b c"),
)
row(
    "attention by hand",
    lambda q, k, v, m: ((q @ k.mT / 2).masked_fill(~m, -1e9).softmax(-1)) @ v,
    f32("a 2 b 4"),
    f32("a 2 c 4"),
    f32("a 2 c 4"),
    mask("a 1 1 c"),
)
row(
    "rotary",
    lambda x, c: x * c.cos() + torch.cat([-x[..., 2:], x[..., :2]], -1) * c.sin(),
    f32("a 2 b 4"),
    f32("b 4"),
)

# Gather and scatter

row(
    "index",
    lambda x, i, j: (x[i], x[:, j], x[i, i], x[i[:, None], j]),
    f32("8 8 b"),
    index("a", 8),
    index("c", 8),
    called=True,
)
row(
    "index of pixels",
    lambda x, i, j: (
        x[:, :, i[:, None], j],
        x[:, i, -j[:, None] - 1],
        aten._unsafe_index(x, [None, None, i[:, None].int(), j]),
    ),
    f32("b 7 7 7"),
    index("a", 7),
    index("c", 7),
    called=True,
)
row("index negative", lambda x, i: x[-i - 1], f32("8 b"), index("a", 8), called=True)
row(
    "index of counting",
    lambda x: (
        x[torch.arange(x.shape[0])],
        x[torch.arange(x.shape[0])[:, None], torch.arange(x.shape[1])],
    ),
    f32("a b"),
)
row(
    "index counting short", lambda x, y: x[torch.arange(y.shape[0])], f32("a b"), f32("c"), a=6, c=4
)
row(
    "index select last token",
    lambda x, i: x[torch.arange(x.shape[0]), i],
    f32("a 8 4"),
    index("a", 8),
    called=True,
)
row(
    "index_select",
    lambda x, i: (x.index_select(0, i), x.index_select(1, i)),
    f32("8 8"),
    index("a", 8),
    called=True,
)
row("gather", lambda x, i: x.gather(1, i), f32("a 8"), index("a c", 8), called=True)
row(
    "scatter",
    lambda x, i, s: (x.scatter(1, i, s), x.scatter(1, i, 2.0), x.scatter_add(1, i, s)),
    f32("a 8"),
    index("a 1", 8),
    f32("a 1"),
    called=True,
)
row(
    "index_put",
    lambda x, i, s: x.index_put((i,), s, accumulate=True),
    f32("8 b"),
    index("a", 8),
    f32("a b"),
    called=True,
)
row(
    "index_add",
    lambda x, i, s: x.index_add(0, i, s),
    f32("8 b"),
    index("a", 8),
    f32("a b"),
    called=True,
)
row(
    "masked_scatter",
    lambda x, m, s: x.masked_scatter(m, s),
    f32("a b"),
    mask("a b"),
    f32("a b"),
    called=True,
)
row(
    "select_scatter",
    lambda x, y: (x.select_scatter(y, 1, 2), x.slice_scatter(y[:, None], 1, 3, 4)),
    f32("a 8"),
    f32("a"),
)
row(
    "embedding",
    lambda i, w: (F.embedding(i, w), F.embedding(i, w, padding_idx=2), F.embedding(i, w) * 2),
    index("a b", 9),
    f32("9 6"),
    called=True,
)
row(
    "embedding half",
    lambda i, w: F.embedding(i, w),
    index("a b", 9),
    spec("9 6", torch.bfloat16),
    called=True,
)
row(
    "embedding_bag",
    lambda i, o, w: (F.embedding_bag(i, w, o), F.embedding_bag(i, w, o, mode="sum")),
    index("8", 9),
    index("4", 1),
    f32("9 b"),
    called=True,
)
row(
    "embedding_bag rows",
    lambda i, w: (F.embedding_bag(i, w, mode="mean"), F.embedding_bag(i, w, mode="max")),
    index("a 5", 9),
    f32("9 6"),
    called=True,
)
row(
    "embedding_bag overloads",
    lambda i, w: tuple(
        op(w, i.reshape(-1), torch.arange(0, i.numel(), i.shape[1]), False, mode)[0]
        for op in (
            torch.ops.aten.embedding_bag.default,
            torch.ops.aten._embedding_bag.default,
            torch.ops.aten._embedding_bag_forward_only.default,
        )
        for mode in (1, 2)
    ),
    index("a 5", 9),
    f32("9 6"),
    called=True,
)
row("topk", lambda x: x.topk(2, -1), f32("a 8"), called=True)
row(
    "sort",
    lambda x: (*x.sort(-1), *x.sort(0, descending=True), x.argsort(-1)),
    f32("a b"),
    called=True,
)
row("kthvalue", lambda x: x.kthvalue(2, -1), f32("a 8"), called=True)
row(
    "bucketize",
    lambda x: torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0])),
    f32("a b"),
    called=True,
)

# Convolution, pooling, resampling

row(
    "conv1d",
    lambda x, w, b: (
        F.conv1d(x, w, b),
        F.conv1d(x, w, b, stride=2, padding=1),
        F.conv1d(x, w, None, padding="same"),
    ),
    f32("a 3 b"),
    f32("4 3 3"),
    f32("4"),
    a=2,
    b=9,
)
row(
    "conv2d",
    lambda x, w, b: (
        F.conv2d(x, w, b),
        F.conv2d(x, w, b, 2, 1),
        F.conv2d(x, w, b, dilation=2, padding=2).relu(),
    ),
    f32("a 4 c d"),
    f32("6 4 3 3"),
    f32("6"),
    c=8,
    d=9,
)
row(
    "conv2d groups",
    lambda x, w, v: (F.conv2d(x, w, groups=2), F.conv2d(x, v, groups=4)),
    f32("a 4 c d"),
    f32("6 2 3 3"),
    f32("4 1 3 3"),
    c=8,
    d=9,
)
row(
    "conv3d",
    lambda x, w: F.conv3d(x, w, padding=1),
    f32("a 2 b c d"),
    f32("3 2 3 3 3"),
)
row(
    "conv_transpose",
    lambda x, w: F.conv_transpose2d(x, w, stride=2),
    f32("a 4 c d"),
    f32("4 3 2 2"),
    called=True,
)
row(
    "max_pool2d",
    lambda x: (F.max_pool2d(x, 2), F.max_pool2d(x, 3, 2, 1)),
    f32("a 3 c d"),
    c=8,
    d=9,
)
row("max_pool1d", lambda x: F.max_pool1d(x, 2), f32("a 3 8"), called=True)
row(
    "avg_pool2d",
    lambda x: (F.avg_pool2d(x, 2), F.avg_pool2d(x, 3, 1, 1, False, False)),
    f32("a 3 c d"),
    c=8,
    d=9,
)
row(
    "adaptive_avg_pool2d",
    lambda x: (F.adaptive_avg_pool2d(x, 1), F.adaptive_avg_pool2d(x, (2, 3))),
    f32("a 3 c d"),
    c=8,
    d=9,
)
row("adaptive_avg_pool1d", lambda x: F.adaptive_avg_pool1d(x, 2), f32("a 3 b"), called=True)
row(
    "adaptive_avg_pool1d to one", lambda x: F.adaptive_avg_pool1d(x.mT, 1).squeeze(-1), f32("a b c")
)
row(
    "upsample_nearest2d",
    lambda x: (F.interpolate(x, scale_factor=2.0), F.interpolate(x, size=(5, 7))),
    f32("a 3 c d"),
)
row(
    "upsample_bilinear",
    lambda x: (
        F.interpolate(x, scale_factor=2.0, mode="bilinear"),
        F.interpolate(x, size=(5, 7), mode="bilinear", align_corners=True),
    ),
    f32("a 3 c d"),
)
row(
    "upsample_bicubic",
    lambda x: (
        F.interpolate(x, size=(5, 7), mode="bicubic"),
        F.interpolate(x, scale_factor=(2.0, 0.7), mode="bicubic"),
    ),
    f32("a 3 c d"),
)
row(
    "grid_sample",
    lambda x, g: F.grid_sample(x, g, align_corners=False),
    f32("a 3 c d"),
    f32("a 4 5 2", -0.9, 0.9),
    called=True,
)
row("im2col", lambda x: F.unfold(x, 2), f32("a 3 c d"), refuses=0)

# Recurrent cells

row(
    "gru_cell",
    lambda x, h, w, u, b, c: torch.gru_cell(x, h, w, u, b, c),
    f32("a 4"),
    f32("a 5"),
    f32("15 4"),
    f32("15 5"),
    f32("15"),
    f32("15"),
    called=True,
)
row(
    "lstm_cell",
    lambda x, h, c, w, u, b: torch.lstm_cell(x, (h, c), w, u, b, b),
    f32("a 4"),
    f32("a 5"),
    f32("a 5"),
    f32("20 4"),
    f32("20 5"),
    f32("20"),
    called=True,
)
