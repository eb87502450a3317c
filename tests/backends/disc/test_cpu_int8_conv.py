# SPDX-License-Identifier: Apache-2.0
"""Generated int8 convolutions through whole programs: exact integers, and models with explicit quantization."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from disc_programs import S0, S1, S2, add_input, compile_to_engine, finish, new_builder
from test_cpu_int8_gemm import TARGETS, bytes_of, run
from test_int8 import U8, Weight, build, check, count, per_tensor
from torch.utils._sympy.functions import FloorDiv

from blade.backends.disc.ir.graph import IrBuilder, Value
from blade.backends.disc.reference.quantized import product
from blade.backends.disc.target.cpu import CpuTarget
from blade.runtime.engine import Engine

pytestmark = [pytest.mark.needs("runtime"), pytest.mark.needs("torch_mlir")]

DEPTHWISE = [
    ((3, 3), 2, 1, 1),
    ((5, 5), 1, 2, 1),
    ((7, 3), 1, 3, 1),
    ((3, 3), 1, 2, 2),
    ((11, 11), 2, 5, 1),
]
"""Kernel, stride, padding, dilation."""


def conv_engine(
    weight: torch.Tensor,
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    groups: int = 1,
    zero: int = 0,
    target: CpuTarget | None = None,
) -> tuple[Engine, Callable[[torch.Tensor], torch.Tensor]]:
    """x [s0, s1, s2, c] of unsigned bytes, scales of 1: an engine and what it should give."""
    b, constants = new_builder(), []
    y = add_conv(b, constants, weight, stride, padding, dilation, groups, zero)
    engine = compile_to_engine(finish(b, y, constants=constants), target)
    return engine, lambda x: product(y, [x, *constants])


def add_conv(
    b: IrBuilder,
    constants: list[torch.Tensor],
    weight: torch.Tensor,
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    groups: int = 1,
    zero: int = 0,
) -> Value:
    """The convolution of a new input; its constants join the others."""
    x = add_input(b, (S0, S1, S2, weight.shape[1] * groups), torch.uint8)
    own = [weight, torch.ones(len(weight)), torch.zeros(len(weight))]
    held = [
        b.make("const", (), c.shape, c.dtype, tuple(c.stride()), index=len(constants) + k)
        for k, c in enumerate(own)
    ]
    constants += own
    reach = [dilation * (k - 1) for k in weight.shape[2:]]
    out = [
        FloorDiv(d + 2 * padding - r - 1, stride) + 1 for d, r in zip((S1, S2), reach, strict=True)
    ]
    names = ("stride", "padding", "dilation")
    geometry = {n: (k, k) for n, k in zip(names, (stride, padding, dilation), strict=True)}
    return b.make(
        "int8_conv",
        [x, *held],
        (S0, *out, len(weight)),
        torch.float32,
        scale=1.0,
        zero=zero,
        groups=groups,
        **geometry,
    )


def check_sizes(
    engine: Engine, meant: Callable[[torch.Tensor], torch.Tensor], channels: int
) -> None:
    for sizes in ((1, 7, 7), (2, 9, 5), (3, 12, 31), (0, 8, 8)):
        x = bytes_of(*sizes, channels, dtype=torch.uint8, seed=sum(sizes))
        assert torch.equal(run(engine, x), meant(x))


@pytest.mark.parametrize(("stride", "padding", "dilation"), [(1, 1, 1), (2, 3, 1), (1, 2, 3)])
@pytest.mark.parametrize(("columns", "channels"), [(1, 4), (64, 8), (70, 36)])
def test_any_geometry(
    stride: int, padding: int, dilation: int, columns: int, channels: int
) -> None:
    weight = bytes_of(columns, channels, 3, 2, dtype=torch.int8, seed=columns)
    engine, meant = conv_engine(weight, stride, padding, dilation, zero=77)
    check_sizes(engine, meant, channels)


@pytest.mark.parametrize("name", TARGETS)
def test_every_instruction(name: str) -> None:
    weight = bytes_of(40, 8, 3, 3, dtype=torch.int8).contiguous(memory_format=torch.channels_last)
    engine, meant = conv_engine(weight, padding=1, zero=255, target=TARGETS[name])
    check_sizes(engine, meant, 8)


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize(
    ("groups", "columns", "channels"),
    [(2, 36, 8), (32, 128, 4), (6, 24, 2), (8, 8, 3), (12, 36, 1)],
)
def test_groups(name: str, groups: int, columns: int, channels: int) -> None:
    """A few wide ones, many narrow ones, some that are no quads by themselves."""
    weight = bytes_of(columns, channels, 3, 3, dtype=torch.int8, seed=groups)
    how = {"padding": 1, "groups": groups, "zero": 9, "target": TARGETS[name]}
    check_sizes(*conv_engine(weight, **how), channels * groups)


def test_panels_of_two_widths_in_one_program() -> None:
    """Groups that are narrower than a panel have kernels of their own."""
    b, constants, results = new_builder(), [], []
    for groups in (1, 4):
        weight = bytes_of(64, 16, 3, 3, dtype=torch.int8, seed=groups)
        results.append(add_conv(b, constants, weight, padding=1, groups=groups))
    engine = compile_to_engine(finish(b, *results, constants=constants))
    inputs = [bytes_of(1, 9, 9, c, dtype=torch.uint8, seed=c) for c in (16, 64)]
    found = engine.try_execute(inputs) or pytest.fail(engine.last_error())
    for k, (y, x) in enumerate(zip(results, inputs, strict=True)):
        assert torch.equal(found[k], product(y, [x, *constants[3 * k : 3 * k + 3]]))


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("channels", [3, 32, 72, 131])
def test_depthwise(name: str, channels: int) -> None:
    weight = bytes_of(channels, 1, 3, 3, dtype=torch.int8, seed=channels)
    how = {"padding": 1, "groups": channels, "zero": 201, "target": TARGETS[name]}
    check_sizes(*conv_engine(weight, **how), channels)


@pytest.mark.parametrize(("kernel", "stride", "padding", "dilation"), DEPTHWISE)
def test_any_depthwise_geometry(
    kernel: tuple[int, int], stride: int, padding: int, dilation: int
) -> None:
    """Images smaller than the kernel's reach among them; all weights as large as can be."""
    weight = torch.full((40, 1, *kernel), -128, dtype=torch.int8)
    how = {"padding": padding, "groups": 40, "zero": 255}
    check_sizes(*conv_engine(weight, stride, dilation=dilation, **how), 40)


class Conv(Weight):
    """A random kernel [n, c, k, k]."""

    def __init__(self, n: int, c: int, k: int) -> None:
        super().__init__(n, c * k * k)
        self.bytes = self.bytes.reshape(n, c, k, k)


def test_a_chain_of_convolutions() -> None:
    """Kernels of 3x3 and of one pixel; what is between them is one kernel, and nothing is transposed."""
    first, second, third = Conv(32, 8, 3), Conv(16, 32, 1), Conv(24, 16, 3)
    quantized, positive = per_tensor(U8, zero=128), per_tensor(U8, zero=0)

    def function(x):
        y = F.relu(F.conv2d(quantized(x), first.floats(), first.bias, padding=1))
        y = F.relu(F.conv2d(positive(y), second.floats()))
        return F.conv2d(positive(y), third.floats(), third.bias, stride=2)

    x = torch.randn(2, 8, 12, 9).contiguous(memory_format=torch.channels_last)
    engine, graph = build(function, [x])
    assert count(graph, "int8_conv") == 2 and count(graph, "int8_linear") == 1
    for sizes in ((2, 12, 9), (1, 31, 9)):
        check(function, engine, graph, torch.randn(sizes[0], 8, *sizes[1:]))


def test_an_image_of_three_channels_and_groups() -> None:
    """Pixels become quads and get a border; the groups lie side by side."""
    image, grouped, each = Conv(16, 3, 5), Conv(24, 4, 3), Conv(24, 1, 3)
    quantized = per_tensor(U8, zero=128)

    def function(x):
        y = F.relu(F.conv2d(quantized(x), image.floats(), image.bias, stride=2, padding=2))
        y = F.conv2d(quantized(y), grouped.floats(), grouped.bias, groups=4)
        return F.conv2d(quantized(y), each.floats(), each.bias, padding=1, groups=24)

    engine, graph = build(function, [torch.randn(2, 3, 12, 9)])
    assert count(graph, "int8_conv") == 3 and count(graph, "conv") == 0
    for sizes in ((2, 12, 9), (1, 31, 9)):
        check(function, engine, graph, torch.randn(sizes[0], 3, *sizes[1:]))


def test_what_stays_a_convolution_of_floats() -> None:
    """Groups of channels that are no quads even together."""
    grouped = Conv(9, 3, 3)
    quantized = per_tensor(U8, zero=128)

    def function(x):
        return F.conv2d(quantized(x), grouped.floats(), grouped.bias, groups=3)

    engine, graph = build(function, [torch.randn(2, 9, 12, 9)])
    assert count(graph, "int8_conv") == 0 and count(graph, "conv") == 1
    check(function, engine, graph, torch.randn(3, 9, 12, 9))
