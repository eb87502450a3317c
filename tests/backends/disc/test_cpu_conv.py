# SPDX-License-Identifier: Apache-2.0
"""The generated convolutions against torch in float64, through whole programs: every kind and border."""

from dataclasses import dataclass

import pytest
import sympy
import torch
from disc_programs import add_input, compile_to_engine, finish, new_builder
from torch.utils._sympy.functions import FloorDiv

from blade.backends.disc.cpu.target import Target, host
from blade.runtime.engine import Engine

pytestmark = pytest.mark.needs("torch_mlir")
UNIT = 2.0**-24


@dataclass(frozen=True)
class Conv:
    """One convolution: weight's shape [O, C / groups, *kernel] and what torch calls the rest."""

    weight: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1

    @property
    def axes(self) -> int:
        return len(self.weight) - 2

    @property
    def channels(self) -> int:
        return self.weight[1] * self.groups

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """On channels-last ``x``."""
        function = (torch.conv1d, torch.conv2d, torch.conv3d)[self.axes - 1]
        given = (self.stride, self.padding, self.dilation, self.groups)
        return function(x.movedim(-1, 1), weight, bias, *given).movedim(1, -1)


def square(o: int, c: int, kernel: int, stride: int = 1, padding: int = 0, groups: int = 1) -> Conv:
    return Conv((o, c, kernel, kernel), (stride,) * 2, (padding,) * 2, (1, 1), groups)


CASES = {
    "pointwise": square(50, 37, 1),
    "pointwise, strided": square(24, 40, 1, 2),
    "rows that would collide in cache": square(33, 1024, 1),
    "a border": square(64, 64, 3, 2, 1),
    "minimal filtering": square(64, 32, 3, 1, 1),
    "minimal filtering, several passes": Conv((48, 320, 3, 3), (1, 1), (0, 2), (1, 1)),
    "several passes": square(48, 300, 3, 1, 1),
    "few channels": square(64, 3, 7, 2, 3),
    "few channels, wide": square(20, 4, 5, 1, 2),
    "patches": square(96, 3, 4, 4),
    "mixed": Conv((50, 5, 3, 2), (1, 2), (2, 1), (2, 3)),
    "groups": square(96, 8, 3, 1, 1, 4),
    "groups that fill no vector": square(21, 5, 3, 2, 1, 3),
    "more results than channels": square(64, 1, 3, 1, 1, 32),
    "one axis": Conv((30, 20, 3), (1,), (1,), (1,)),
    "one axis, one channel": Conv((20, 1, 10), (5,), (0,), (1,)),
    "one axis, wide": Conv((48, 12, 128), (1,), (64,), (1,), 4),
    "three axes": Conv((6, 2, 3, 3, 2), (1, 2, 1), (1, 1, 0), (1, 1, 2)),
    "depthwise": square(64, 1, 3, 1, 1, 64),
    "depthwise, strided": square(144, 1, 3, 2, 1, 144),
    "depthwise, 5": square(40, 1, 5, 1, 2, 40),
    "depthwise, 7": square(20, 1, 7, 1, 3, 20),
    "depthwise, mixed": Conv((150, 1, 2, 3), (3, 1), (1, 2), (2, 1), 150),
    "depthwise, one axis": Conv((33, 1, 3), (1,), (2,), (2,), 33),
}


def engine_of(
    conv: Conv,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: bool = False,
    activation: str | None = None,
    target: Target | None = None,
) -> Engine:
    """x [n, *spatial, C], residual [n, *out, O] -> activation(conv(x) + bias + residual)."""
    b = new_builder()
    batch, *sizes = (
        sympy.Symbol(s, integer=True, nonnegative=True) for s in "nabc"[: conv.axes + 1]
    )
    x = add_input(b, (batch, *sizes, conv.channels))
    out = []
    for k, size in enumerate(sizes):
        reach = conv.dilation[k] * (conv.weight[k + 2] - 1) + 1
        out.append(FloorDiv(size + 2 * conv.padding[k] - reach, conv.stride[k]) + 1)
    constants = [weight] if bias is None else [weight, bias]
    operands = [x] + [
        b.make("const", (), c.shape, c.dtype, tuple(c.stride()), index=k)
        for k, c in enumerate(constants)
    ]
    shape = (batch, *out, conv.weight[0])
    if residual:
        operands.append(add_input(b, shape))
    y = b.make(
        "conv",
        operands,
        shape,
        torch.float32,
        stride=conv.stride,
        padding=conv.padding,
        dilation=conv.dilation,
        groups=conv.groups,
        activation=activation,
    )
    return compile_to_engine(finish(b, y, constants=constants), target)


def run(engine: Engine, *inputs: torch.Tensor) -> torch.Tensor:
    [found] = engine.try_execute(list(inputs)) or pytest.fail(engine.last_error())
    return found


def conv_magnitudes(conv: Conv, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Sums of the magnitudes of all products; ``x`` and ``weight`` are magnitudes."""
    return conv(x, weight, None)


def minimal_magnitudes(conv: Conv, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The same for F(2x2, 3x3): |A'| ((|G| g |G'|) (|B'| d |B|)) |A|, over 4 x 4 tiles two apart."""
    b = torch.tensor([[1, 0, 1, 0], [0, 1, 1, 0], [0, 1, 1, 0], [0, 1, 0, 1]]).double()
    g = torch.tensor([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, 0.5, 0.5], [0, 0, 1]]).double()
    a = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1]]).double()
    (h, w), (n, *_, c) = conv.padding, x.shape
    height, width = x.shape[1] + 2 * h - 2, x.shape[2] + 2 * w - 2
    down, across = (height + 1) // 2, (width + 1) // 2
    if n == 0:
        return x.new_zeros(0, height, width, weight.shape[0])
    padded = torch.nn.functional.pad(x.movedim(-1, 1), (w, w + width % 2, h, h + height % 2))
    tiles = torch.nn.functional.unfold(padded, 4, stride=2).reshape(n, c, 4, 4, down, across)
    d = torch.einsum("ai,bj,ncijyx->ncabyx", b, b, tiles)
    u = torch.einsum("ai,bj,ocij->ocab", g, g, weight)
    m = torch.einsum("ncabyx,ocab->noabyx", d, u)
    y = torch.einsum("pa,qb,noabyx->nypxqo", a, a, m)
    return y.reshape(n, 2 * down, 2 * across, -1)[:, :height, :width]


def check(
    engine: Engine,
    conv: Conv,
    weight: torch.Tensor,
    sizes: tuple[int, ...],
    bias: torch.Tensor | None = None,
    residual: bool = False,
    activation: str | None = None,
) -> None:
    """Every element within the bound of Higham, "Accuracy and Stability", section 3.1.

    A sum of k products, a bias and a residual, in any order, is off by at most gamma(k + 3) times the
    sum of the magnitudes, gamma(j) = j u / (1 - j u). Minimal filtering sums over channels only, but
    adds before and after (2 + 4 roundings, and one of the weights) and has magnitudes of its own.
    """
    x = torch.randn(*sizes, conv.channels)
    double = None if bias is None else bias.double()
    want = conv(x.double(), weight.double(), double)
    minimal = "kernel winograd_f32 " in engine.program()
    sums = minimal_magnitudes if minimal else conv_magnitudes
    magnitude = sums(conv, x.double().abs(), weight.double().abs())
    if double is not None:
        magnitude = magnitude + double.abs()
    added = [torch.randn(want.shape)] if residual else []
    for r in added:
        want, magnitude = want + r, magnitude + r.abs()
    if activation == "relu":
        want = want.relu()
    found = run(engine, x, *added)
    assert found.shape == want.shape
    terms = conv.weight[1] + 9 if minimal else weight[0].numel() + 3
    steps = terms * UNIT
    assert bool(((found - want).abs() <= steps / (1 - steps) * magnitude).all())


def sizes_of(conv: Conv) -> list[tuple[int, ...]]:
    """Batches and images that fit the kernel: the smallest, 1 and 0 images, ones of many tiles."""
    least = [
        max(1, d * (k - 1) + 1 - 2 * p)
        for d, k, p in zip(conv.dilation, conv.weight[2:], conv.padding, strict=True)
    ]
    return [
        (n, *(size + more + k for k, size in enumerate(least)))
        for n, more in ((1, 0), (0, 3), (2, 4), (1, 7), (3, 12), (1, 26))
        if conv.axes < 3 or more < 12
    ]


@pytest.mark.parametrize("name", CASES)
def test_values(name: str) -> None:
    torch.manual_seed(len(name))
    conv = CASES[name]
    weight = torch.randn(conv.weight)
    engine = engine_of(conv, weight)
    assert "aten::convolution" not in engine.program()
    for sizes in sizes_of(conv):
        check(engine, conv, weight, sizes)


@pytest.mark.parametrize("name", ["minimal filtering", "several passes", "groups", "depthwise"])
def test_epilogue(name: str) -> None:
    """Bias, residual and activation are applied once, after the last pass."""
    torch.manual_seed(len(name))
    conv = CASES[name]
    weight, bias = torch.randn(conv.weight), torch.randn(conv.weight[0])
    engine = engine_of(conv, weight, bias, True, "relu")
    for sizes in sizes_of(conv):
        check(engine, conv, weight, sizes, bias, True, "relu")


@pytest.mark.parametrize("lanes", [4, 8, 16])
@pytest.mark.parametrize("name", ["mixed", "minimal filtering", "depthwise, mixed"])
def test_vector_widths(name: str, lanes: int) -> None:
    """Tiles of every kind of CPU, on whatever runs this (LLVM splits or joins the vectors)."""
    torch.manual_seed(lanes)
    conv = CASES[name]
    weight, bias = torch.randn(conv.weight), torch.randn(conv.weight[0])
    engine = engine_of(conv, weight, bias, target=Target(host().isa, lanes))
    for sizes in sizes_of(conv):
        check(engine, conv, weight, sizes, bias)


@pytest.mark.parametrize("name", ["mixed", "minimal filtering", "depthwise, mixed"])
def test_weights_in_other_orders(name: str) -> None:
    """Weights stored channels-last, as torch's memory format has them, and written in place later."""
    torch.manual_seed(7)
    conv = CASES[name]
    weight = torch.randn(conv.weight).to(memory_format=torch.channels_last)
    engine = engine_of(conv, weight)
    check(engine, conv, weight, (2, 9, 11))
    with torch.no_grad():
        weight.mul_(-3)
    check(engine, conv, weight, (2, 9, 11))


@pytest.mark.parametrize("name", ["a border", "depthwise"])
def test_nan_and_infinity_pass_through(name: str) -> None:
    torch.manual_seed(8)
    conv = CASES[name]
    weight = torch.randn(conv.weight)
    engine = engine_of(conv, weight, activation="relu")
    x = torch.randn(1, 9, 9, conv.channels)
    x[0, 2, 3, 1], x[0, 7, 7, 2] = float("nan"), float("inf")
    found, want = run(engine, x), conv(x, weight, None).relu()
    assert torch.equal(found.isnan(), want.isnan())
    assert torch.equal(found.isinf(), want.isinf())


def test_minimal_filtering_hides_nothing_that_is_not_finite() -> None:
    """Transforms mix the 16 inputs of a tile: what is not finite may reach neighbours, and never vanishes."""
    torch.manual_seed(10)
    conv = CASES["minimal filtering"]
    weight = torch.randn(conv.weight)
    engine = engine_of(conv, weight)
    x = torch.randn(1, 9, 9, conv.channels)
    x[0, 2, 3, 1], x[0, 7, 7, 2] = float("nan"), float("inf")
    found, want = run(engine, x), conv(x, weight, None)
    assert not found[~want.isfinite()].isfinite().any()
    far = torch.ones(9, 9, dtype=torch.bool)
    far[:6, :6], far[4:, 4:] = False, False
    assert found[0][far].isfinite().all()


def test_wide_depthwise_kernels_are_asked_of_torch() -> None:
    torch.manual_seed(9)
    conv = Conv((16, 1, 31), (1,), (15,), (1,), 16)
    weight = torch.randn(conv.weight)
    engine = engine_of(conv, weight)
    assert "aten::convolution" in engine.program()
    check(engine, conv, weight, (2, 40))
