# SPDX-License-Identifier: Apache-2.0
"""The generated convolutions against torch in float64, through whole programs: every kind and border."""

import itertools
from dataclasses import dataclass

import pytest
import sympy
import torch
from disc_programs import add_input, compile_to_engine, finish, new_builder
from torch.utils._sympy.functions import FloorDiv

from blade.backends.disc.cpu.conv.implicit_gemm import RUN
from blade.backends.disc.cpu.conv.plan import runs_per_group
from blade.backends.disc.ir.graph import IrBuilder, Value
from blade.backends.disc.target.cpu import CpuTarget, host
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
    "depthwise, three axes": Conv((40, 1, 3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1), 40),
    "depthwise, three mixed axes": Conv((21, 1, 3, 2, 5), (2, 1, 2), (2, 0, 1), (2, 3, 1), 21),
    "depthwise, one axis": Conv((33, 1, 3), (1,), (2,), (2,), 33),
}


@dataclass(frozen=True)
class Case:
    """A convolution with its constants, and what is fused into it."""

    conv: Conv
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    residual: bool = False
    activation: str | None = None

    def input(self, sizes: tuple[int, ...]) -> list[torch.Tensor]:
        """x [n, *sizes, C], and the residual."""
        x = torch.randn(*sizes, self.conv.channels)
        shape = self.conv(x, self.weight, None).shape
        return [x, torch.randn(shape)] if self.residual else [x]


def case(name: str, fused: bool = False) -> Case:
    conv = CASES[name]
    weight = torch.randn(conv.weight)
    return (
        Case(conv, weight, torch.randn(conv.weight[0]), True, "relu")
        if fused
        else Case(conv, weight)
    )


def engine_of(*cases: Case, target: CpuTarget | None = None) -> Engine:
    """All cases side by side in one program (compiled once): x, residual?, x, ... -> result, ..."""
    b, results, constants = new_builder(), [], []
    for number, given in enumerate(cases):
        names = [f"s{number}{axis}" for axis in "nabc"[: given.conv.axes + 1]]
        results.append(_add(b, given, names, constants))
    return compile_to_engine(finish(b, *results, constants=constants), target)


def _add(b: IrBuilder, given: Case, names: list[str], constants: list[torch.Tensor]) -> Value:
    conv = given.conv
    batch, *sizes = (sympy.Symbol(name, integer=True, nonnegative=True) for name in names)
    operands = [add_input(b, (batch, *sizes, conv.channels))]
    out = []
    for k, size in enumerate(sizes):
        reach = conv.dilation[k] * (conv.weight[k + 2] - 1) + 1
        out.append(FloorDiv(size + 2 * conv.padding[k] - reach, conv.stride[k]) + 1)
    for c in (given.weight, given.bias):
        if c is not None:
            strides = tuple(c.stride())
            operands.append(b.make("const", (), c.shape, c.dtype, strides, index=len(constants)))
            constants.append(c)
    shape = (batch, *out, conv.weight[0])
    if given.residual:
        operands.append(add_input(b, shape))
    return b.make(
        "conv",
        operands,
        shape,
        torch.float32,
        stride=conv.stride,
        padding=conv.padding,
        dilation=conv.dilation,
        groups=conv.groups,
        activation=given.activation,
        transposed=False,
    )


def run(engine: Engine, *inputs: torch.Tensor) -> list[torch.Tensor]:
    return engine.try_execute(list(inputs)) or pytest.fail(engine.last_error())


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


def is_minimal(conv: Conv) -> bool:
    """Whether it runs as Winograd's algorithm."""
    return conv in (CASES["minimal filtering"], CASES["minimal filtering, several passes"])


def check(given: Case, inputs: list[torch.Tensor], found: torch.Tensor) -> None:
    """Every element within the bound of Higham, "Accuracy and Stability", section 3.1.

    A sum of k products, a bias and a residual, in any order, is off by at most gamma(k + 3) times the
    sum of the magnitudes, gamma(j) = j u / (1 - j u). Minimal filtering sums over channels only, but
    adds before and after (2 + 4 roundings, and one of the weights) and has magnitudes of its own.
    """
    conv, x, weight = given.conv, inputs[0].double(), given.weight.double()
    bias = None if given.bias is None else given.bias.double()
    want = conv(x, weight, bias)
    sums = minimal_magnitudes if is_minimal(conv) else conv_magnitudes
    magnitude = sums(conv, x.abs(), weight.abs())
    for added in (*([] if bias is None else [bias]), *inputs[1:]):
        magnitude = magnitude + added.abs()
    for residual in inputs[1:]:
        want = want + residual
    if given.activation == "relu":
        want = want.relu()
    assert found.shape == want.shape
    terms = conv.weight[1] + 9 if is_minimal(conv) else weight[0].numel() + 3
    steps = terms * UNIT
    assert bool(((found - want).abs() <= steps / (1 - steps) * magnitude).all()), conv


def check_all(engine: Engine, cases: list[Case]) -> None:
    """Batches and images that fit the kernels: the smallest, 1 and 0 images, ones of many tiles."""
    for n, more in ((1, 0), (0, 3), (2, 4), (1, 7), (3, 12), (1, 26)):
        inputs = []
        for given in cases:
            conv, extra = given.conv, min(more, 12 if given.conv.axes == 3 else 26)
            least = (
                max(1, d * (k - 1) + 1 - 2 * p)
                for d, k, p in zip(conv.dilation, conv.weight[2:], conv.padding, strict=True)
            )
            inputs.append(given.input((n, *(size + extra + k for k, size in enumerate(least)))))
        results = run(engine, *(t for one in inputs for t in one))
        for given, one, found in zip(cases, inputs, results, strict=True):
            check(given, one, found)


def test_values() -> None:
    torch.manual_seed(1)
    cases = [case(name) for name in CASES]
    engine = engine_of(*cases)
    program = engine.program()
    assert "aten::convolution" not in program
    for name, conv in CASES.items():
        assert is_minimal(conv) == name.startswith("minimal")
    assert program.count("kernel winograd_f32 ") == 2
    check_all(engine, cases)


def test_epilogue() -> None:
    """Bias, residual and activation are applied once, after the last pass."""
    torch.manual_seed(2)
    names = ["minimal filtering", "several passes", "groups", "groups that fill no vector"]
    cases = [
        case(name, True) for name in (*names, "depthwise", "depthwise, 5", "depthwise, three axes")
    ]
    check_all(engine_of(*cases), cases)


@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_vector_widths(lanes: int) -> None:
    """Tiles of every kind of CPU, on whatever runs this (LLVM splits or joins the vectors)."""
    torch.manual_seed(lanes)
    names = ["mixed", "few channels", "minimal filtering", "groups", "depthwise, mixed"]
    cases = [case(name, True) for name in names]
    check_all(engine_of(*cases, target=CpuTarget(host().isa, lanes)), cases)


def test_weights_in_other_orders() -> None:
    """Weights stored channels-last, as torch's memory format has them, and written in place later."""
    torch.manual_seed(3)
    cases = []
    for name in ("mixed", "minimal filtering", "depthwise, mixed"):
        weight = torch.randn(CASES[name].weight).to(memory_format=torch.channels_last)
        cases.append(Case(CASES[name], weight))
    engine = engine_of(*cases)
    check_all(engine, cases)
    with torch.no_grad():
        for given in cases:
            given.weight.mul_(-3)
    check_all(engine, cases)


def test_nan_and_infinity_pass_through() -> None:
    torch.manual_seed(4)
    names = ("a border", "depthwise")
    cases = [Case(CASES[n], torch.randn(CASES[n].weight), activation="relu") for n in names]
    inputs = [torch.randn(1, 9, 9, c.conv.channels) for c in cases]
    for x in inputs:
        x[0, 2, 3, 1], x[0, 7, 7, 2] = float("nan"), float("inf")
    for given, x, found in zip(cases, inputs, run(engine_of(*cases), *inputs), strict=True):
        want = given.conv(x, given.weight, None).relu()
        assert torch.equal(found.isnan(), want.isnan())
        assert torch.equal(found.isinf(), want.isinf())


def test_minimal_filtering_hides_nothing_that_is_not_finite() -> None:
    """Transforms mix the 16 inputs of a tile: what is not finite may reach neighbours, and never vanishes."""
    torch.manual_seed(5)
    given = case("minimal filtering")
    x = torch.randn(1, 9, 9, given.conv.channels)
    x[0, 2, 3, 1], x[0, 7, 7, 2] = float("nan"), float("inf")
    [found] = run(engine_of(given), x)
    want = given.conv(x, given.weight, None)
    assert not found[~want.isfinite()].isfinite().any()
    far = torch.ones(9, 9, dtype=torch.bool)
    far[:6, :6], far[4:, 4:] = False, False
    assert found[0][far].isfinite().all()


def test_wide_depthwise_kernels_are_asked_of_torch() -> None:
    torch.manual_seed(6)
    conv = Conv((16, 1, 31), (1,), (15,), (1,), 16)
    given = Case(conv, torch.randn(conv.weight))
    engine = engine_of(given)
    assert "aten::convolution" in engine.program()
    check_all(engine, [given])


def test_runs_of_panels_share_out_evenly() -> None:
    """No run is longer than it should be, none is empty, and two threads get as many where that can be."""
    for blocks in range(1, 9):
        for panels in range(1, 40):
            runs = runs_per_group(sympy.Integer(blocks), panels)
            bounds = [k * panels // runs for k in range(runs + 1)]
            counts = {b - a for a, b in itertools.pairwise(bounds)}
            assert counts <= set(range(1, RUN + 1))
            assert blocks * runs % 2 == 0 or panels < 2 * runs
