# SPDX-License-Identifier: Apache-2.0
"""Generated convolutions of bfloat16, through whole programs.

The bounds are those of test_cpu_bf16_gemm.py: sums in float32, the result rounded once.
"""

from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
import sympy
import torch
from disc_programs import S0, add_input, finish, new_builder
from hypothesis import assume, given, settings
from torch.utils._sympy.functions import FloorDiv

from blade.backends.disc.compiler import compile_ir
from blade.backends.disc.ir.graph import Graph, IrBuilder, Value
from blade.backends.disc.passes.bf16_convs import pair_channels
from blade.backends.disc.reference.interpret_graph import interpret
from blade.backends.disc.target.cpu import CpuTarget, host
from blade.runtime.engine import Engine, make_engine

pytestmark = pytest.mark.needs("torch_mlir")

F32, BF16 = torch.float32, torch.bfloat16
HEIGHT, WIDTH = (sympy.Symbol(f"s{k}", integer=True, nonnegative=True) for k in (1, 2))


@dataclass(frozen=True)
class Shape:
    channels: int
    columns: int
    kernel: tuple[int, int] = (3, 3)
    stride: int = 1
    padding: int = 1
    dilation: int = 1
    activation: str | None = None
    residual: torch.dtype | None = None
    groups: int = 1

    @property
    def is_depthwise(self) -> bool:
        return self.groups == self.channels == self.columns > 1

    @property
    def how(self) -> tuple[int, int, int, int]:
        return self.stride, self.padding, self.dilation, self.groups

    def size(self, given: object, axis: int) -> object:
        reach = self.dilation * (self.kernel[axis] - 1) + 1
        total = sympy.sympify(given) + 2 * self.padding - reach
        return FloorDiv(total, self.stride) + 1


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def graph_of(shape: Shape, given: list[torch.Tensor], result: torch.dtype) -> Graph:
    """``given``: weight and bias."""
    b = new_builder()
    x = add_input(b, (S0, HEIGHT, WIDTH, shape.channels), BF16)
    return finish(b, _add(b, shape, x, given, [], result), constants=given)


def _add(
    b: IrBuilder,
    shape: Shape,
    x: Value,
    given: list[torch.Tensor],
    constants: list[torch.Tensor],
    result: torch.dtype,
) -> Value:
    """The convolution of ``x``; its constants, ``given``, join the others."""
    batch, height, width, _ = x.shape
    out = (batch, shape.size(height, 0), shape.size(width, 1), shape.columns)
    operands = [x]
    for c in given:
        strides = tuple(c.stride())
        operands.append(b.make("const", (), c.shape, c.dtype, strides, index=len(constants)))
        constants.append(c)
    if shape.residual is not None:
        size = tuple(sympy.Symbol(f"s{k}", integer=True, nonnegative=True) for k in (3, 4))
        operands.append(add_input(b, (batch, *size, shape.columns), shape.residual))
        b.require(sympy.Eq(size[0], out[1]), "height")
        b.require(sympy.Eq(size[1], out[2]), "width")
    return b.make(
        "conv",
        operands,
        out,
        result,
        stride=(shape.stride,) * 2,
        padding=(shape.padding,) * 2,
        dilation=(shape.dilation,) * 2,
        groups=shape.groups,
        activation=shape.activation,
        transposed=False,
    )


def engine_of(
    shape: Shape, given: list[torch.Tensor], result: torch.dtype, target: CpuTarget
) -> Engine:
    compiled = compile_ir(graph_of(shape, given, result), target)
    name = "depthwise_bf16" if shape.is_depthwise else "bf16_conv"
    assert f"kernel {name}" in compiled.program
    return make_engine("test", "disc", compiled.program, compiled.object, compiled.constants)


def check(shape: Shape, source: torch.dtype, result: torch.dtype, target: CpuTarget) -> None:
    """The weights of a depthwise convolution are float32 and not rounded."""
    weight = numbers(shape.columns, shape.channels // shape.groups, *shape.kernel, dtype=source)
    bias = numbers(shape.columns, seed=1, dtype=source)
    engine = engine_of(shape, [weight, bias], result, target)
    for batch, height, width in ((1, 7, 9), (2, 14, 14), (1, 30, 5), (0, 8, 8), (3, 8, 23)):
        x = numbers(batch, height, width, shape.channels, seed=height)
        convolve = torch.nn.functional.conv2d
        used = weight if shape.is_depthwise else weight.to(BF16)
        first, w, b = x.permute(0, 3, 1, 2).double(), used.double(), bias.double()
        exact = convolve(first, w, b, *shape.how).permute(0, 2, 3, 1)
        size = convolve(first.abs(), w.abs(), b.abs(), *shape.how).permute(0, 2, 3, 1)
        extra = []
        if shape.residual is not None:
            extra = [numbers(*exact.shape, seed=2, dtype=shape.residual)]
            exact, size = exact + extra[0].double(), size + extra[0].double().abs()
        if shape.activation is not None:
            exact = exact.clamp(0, 6 if shape.activation == "relu6" else None)
        [got] = engine.try_execute([x, *extra]) or pytest.fail(engine.last_error())
        allowed = (shape.channels * 9 + 2) * (2.0**-23 * size + 2.0**-126)
        if result == BF16:
            allowed = allowed + 2.0**-8 * (exact.abs() + allowed)
        assert got.shape == exact.shape
        assert bool(((got.double() - exact).abs() <= allowed).all())


CASES = {
    "1x1": Shape(64, 64, (1, 1), padding=0),
    "1x1 stride 2": Shape(32, 130, (1, 1), 2, padding=0),
    "3x3": Shape(16, 65),
    "3x3 with a residual": Shape(30, 48, activation="relu", residual=F32),
    "the same in bfloat16": Shape(30, 47, activation="relu6", residual=BF16),
    "without a border": Shape(6, 17, (3, 2), padding=0),
    "far apart": Shape(8, 16, (3, 3), 2, 2, dilation=2, activation="relu"),
    "three channels": Shape(3, 33, (7, 7), 2, 3, activation="relu"),
    "three channels, rows of pairs": Shape(3, 20, (4, 4), 4, 0),
    "three channels, far apart": Shape(3, 20, (3, 3), 1, 2, dilation=2),
    "one channel": Shape(1, 17, (3, 3), 1, 1, activation="relu6", residual=BF16),
    "an odd number of channels": Shape(65, 20),
    "groups": Shape(64, 96, activation="relu", residual=BF16, groups=2),
    "groups of a partial panel": Shape(30, 93, (2, 3), groups=3),
    "groups to merge": Shape(24, 72, (3, 3), 2, groups=12),
    "odd groups to merge": Shape(30, 20, groups=10),
    "all groups to merge": Shape(12, 8, groups=4),
    "depthwise": Shape(48, 48, groups=48),
    "depthwise, odd": Shape(37, 37, (5, 5), 2, 2, groups=37),
    "depthwise with a residual": Shape(130, 130, activation="relu6", residual=F32, groups=130),
    "the same, depthwise and in bfloat16": Shape(
        70, 70, activation="relu", residual=BF16, groups=70
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_geometries(name: str) -> None:
    check(CASES[name], F32, BF16, host())


@pytest.mark.parametrize("name", ["three channels", "groups", "depthwise, odd"])
def test_bfloat16_weights(name: str) -> None:
    check(CASES[name], BF16, BF16, host())
    check(CASES[name], BF16, F32, host())


@pytest.mark.parametrize("lanes", [4, 8])
def test_without_the_instruction(lanes: int) -> None:
    target = CpuTarget((), 4) if lanes == 4 else CpuTarget(("avx2", "fma"), 8)
    if not set(target.isa) <= set(host().isa):
        pytest.skip("this CPU has no AVX2")
    for name in ("3x3 with a residual", "three channels", "the same, depthwise and in bfloat16"):
        check(CASES[name], BF16, F32, target)


def test_pixels_of_whole_pairs() -> None:
    """Zeros surround every row of few channels, and make pixels even where the taps of a row are odd."""
    found = {}
    for name in ("three channels", "three channels, rows of pairs", "an odd number of channels"):
        shape = CASES[name]
        constants = [numbers(shape.columns, shape.channels, *shape.kernel), numbers(shape.columns)]
        graph = graph_of(shape, constants, BF16)
        padded = pair_channels(graph)
        [conv] = (v for v in padded.values if v.op == "conv")
        found[name] = (conv.args[0].shape[-1], conv.attrs["padding"])
        x = numbers(2, 12, 13, shape.channels)
        for got, want in zip(interpret(padded, [x]), interpret(graph, [x]), strict=True):
            assert torch.equal(got, want)
    assert found == {
        "three channels": (4, (3, 0)),
        "three channels, rows of pairs": (3, (0, 0)),
        "an odd number of channels": (66, (1, 1)),
    }


def test_small_groups_are_called() -> None:
    """Unless their weights are float32, so that ATen would compute in it."""
    shape = Shape(8, 12, groups=4)
    for dtype in (BF16, F32):
        constants = [numbers(12, 2, 3, 3, dtype=dtype), numbers(12, dtype=dtype)]
        program = compile_ir(graph_of(shape, constants, BF16), host()).program
        assert ("aten::convolution" in program) == (dtype == BF16)


def test_panels_of_two_widths_in_one_program() -> None:
    """Groups that are narrower than a panel have kernels of their own."""
    shapes = [Shape(16, 64), Shape(32, 32, groups=2)]
    b, results, constants = new_builder(), [], []
    inputs = [numbers(1, 9, 9, s.channels, seed=k) for k, s in enumerate(shapes)]
    for shape, x in zip(shapes, inputs, strict=True):
        given = [
            numbers(shape.columns, shape.channels // shape.groups, 3, 3),
            numbers(shape.columns),
        ]
        results.append(_add(b, shape, add_input(b, x.shape, BF16), given, constants, F32))
    compiled = compile_ir(finish(b, *results, constants=constants), host())
    engine = make_engine("test", "disc", compiled.program, compiled.object, compiled.constants)
    found = engine.try_execute(inputs) or pytest.fail(engine.last_error())
    for k, (shape, x, got) in enumerate(zip(shapes, inputs, found, strict=True)):
        w, bias = (c.double() for c in constants[2 * k : 2 * k + 2])
        want = torch.nn.functional.conv2d(x.permute(0, 3, 1, 2).double(), w, bias, *shape.how)
        torch.testing.assert_close(got.double(), want.permute(0, 2, 3, 1), rtol=1e-4, atol=1e-4)


@given(
    channels=st.sampled_from([1, 2, 3, 10, 32, 33, 100]),
    columns=st.sampled_from([1, 16, 31, 64, 70]),
    kernel=st.tuples(st.sampled_from([1, 2, 3, 5]), st.sampled_from([1, 2, 3, 5])),
    stride=st.sampled_from([1, 2, 3]),
    padding=st.sampled_from([0, 1, 2]),
    result=st.sampled_from([F32, BF16]),
)
@settings(max_examples=5, deadline=None)
def test_any_geometry(
    channels: int,
    columns: int,
    kernel: tuple[int, int],
    stride: int,
    padding: int,
    result: torch.dtype,
) -> None:
    assume(padding < max(kernel))
    check(Shape(channels, columns, kernel, stride, padding), BF16, result, host())
