# SPDX-License-Identifier: Apache-2.0
"""Int8 products that give bytes: the very bytes that quantizing their floats would give, up to one's rounding."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from test_cpu_int8_conv import Conv
from test_int8 import I8, U8, Weight, build, per_tensor, qd

from blade.backends.disc.ir.graph import Graph
from blade.backends.disc.reference.interpret_graph import interpret

pytestmark = [pytest.mark.needs("runtime"), pytest.mark.needs("torch_mlir")]

SIZES = ((1, 1), (2, 7), (5, 13), (3, 0))


def bytes_out(graph: Graph) -> list[bool]:
    """Of each int8 product: does it give bytes?"""
    products = [v for v in graph.values if v.op in ("int8_linear", "int8_conv")]
    return [v.dtype == torch.uint8 for v in products]


def check(function: Callable[..., torch.Tensor], x: torch.Tensor, step: float) -> None:
    """Floats within fp32's error of a tie may fall on its other side, one ``step`` away; few do."""
    engine, graph = build(function, [x])
    [meant] = interpret(graph, [x])
    for given in (x, torch.cat([x, -x, x / 3])):
        [found] = engine.try_execute([given]) or pytest.fail(engine.last_error())
        want = function(given).double()
        gap = (found.double() - want).abs()
        assert float(gap.max()) <= step * 1.001
        assert float((gap > step / 2).double().mean()) < 1e-3
    assert float((meant.double() - function(x).double()).abs().max()) <= step * 1.001


@pytest.mark.parametrize("dtype", [I8, U8])
@pytest.mark.parametrize("activation", ["none", "relu", "relu6", "hardtanh"])
def test_bytes_of_a_product(dtype: torch.dtype, activation: str) -> None:
    w, scale, zero = Weight(70, 36), 0.05, 11 if dtype == I8 else 140
    info = torch.iinfo(dtype)
    act = {"none": lambda y: y}.get(activation) or getattr(F, activation)

    def function(x):
        y = act(F.linear(per_tensor(U8, zero=128)(x), w.floats(), w.bias))
        return qd.quantize_per_tensor(y, scale, zero, info.min + 1, info.max - 2, dtype)

    check(function, torch.randn(4, 3, 36), 1.0)


@pytest.mark.parametrize("dtype", [I8, U8])
def test_products_hand_each_other_bytes(dtype: torch.dtype) -> None:
    """With powers of two for scales all sums are exact in float32 too: the same bytes everywhere."""
    convs = first, second, third = Conv(32, 8, 3), Conv(16, 32, 1), Conv(12, 16, 3)
    for conv in convs:
        conv.scales, conv.bias = torch.full_like(conv.scales, 2.0**-7), conv.bias.round()
    quantized = per_tensor(dtype, 2.0**-5, zero=0 if dtype == I8 else 128)

    def function(x):
        y = F.relu(F.conv2d(quantized(x), first.floats(), first.bias, padding=1))
        y = F.relu6(F.conv2d(quantized(y), second.floats()))
        return F.conv2d(quantized(y), third.floats(), third.bias, stride=2)

    x = torch.randn(2, 8, 12, 9).contiguous(memory_format=torch.channels_last)
    engine, graph = build(function, [x])
    assert bytes_out(graph) == [True, True, False]
    for given in (x, 3 * x, torch.randn(3, 8, 19, 9)):
        [found] = engine.try_execute([given]) or pytest.fail(engine.last_error())
        assert torch.equal(found, function(given))


ACTIVATIONS = ("silu", "hardswish", "gelu", "leaky_relu", "sigmoid")


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [I8, U8])
def test_an_activation_is_part_of_the_product(dtype: torch.dtype, activation: str) -> None:
    w, each = Weight(24, 36), Conv(24, 1, 3)
    act, quantized = getattr(F, activation), per_tensor(dtype, zero=-97 if dtype == I8 else 31)

    def function(x):
        y = act(F.linear(per_tensor(U8, zero=128)(x), w.floats(), w.bias)).movedim(-1, 1)
        y = F.conv2d(quantized(y), each.floats(), each.bias, padding=1, groups=24)
        return quantize(act(y), 0.05, 130)

    x = torch.randn(2, 5, 7, 36)
    assert products_of(function, x) == [True, True]
    check(function, x, 1.0)


@pytest.mark.parametrize("kind", ["bytes", "signed", "floats"])
def test_a_residual_is_part_of_the_product(kind: str) -> None:
    """One that is read as bytes is dequantized there; one of floats is another product's."""
    first, second, third = Conv(24, 16, 1), Conv(24, 24, 3), Conv(24, 16, 1)
    dtype = I8 if kind == "signed" else U8
    step = per_tensor(dtype, 0.05, zero=-3 if dtype == I8 else 125)

    def function(x):
        q = per_tensor(U8, zero=128)(x)
        y = step(F.conv2d(q, first.floats(), first.bias))
        other = F.conv2d(q, third.floats(), third.bias) if kind == "floats" else y
        y = F.relu(F.conv2d(y, second.floats(), second.bias, padding=1) + other)
        return quantize(y, 0.3, 100)

    x = torch.randn(2, 16, 5, 7).contiguous(memory_format=torch.channels_last)
    assert products_of(function, x) == [True, True] if kind != "floats" else [True, False, True]
    check(function, x, 1.0)


def quantize(y: torch.Tensor, scale: float, zero: int) -> torch.Tensor:
    return qd.quantize_per_tensor(y, scale, zero, 0, 255, U8)


def products_of(function: Callable[..., torch.Tensor], x: torch.Tensor) -> list[bool]:
    _, graph = build(function, [x])
    pointwise = [v for v in graph.values if v.is_pointwise and v.dtype == torch.float32]
    quantizing = [v for v in pointwise if v.op == "round"]
    assert len(quantizing) == 1  # of the input
    return bytes_out(graph)


def test_a_sum_that_is_also_read_stays() -> None:
    """Of floats: then the sum is no part of the product, whose floats are stored."""
    w, v = Weight(24, 24), Weight(24, 24)

    def function(x):
        y = x + F.linear(per_tensor(U8, zero=128)(x), w.floats(), w.bias)
        return y, F.linear(per_tensor(U8, zero=128)(y), v.floats(), v.bias)

    _, graph = build(function, [torch.randn(2, 3, 24)])
    assert bytes_out(graph) == [False, False]


def test_floats_that_are_also_read_stay() -> None:
    w, v = Weight(24, 24), Weight(8, 24)

    def function(x):
        y = F.linear(per_tensor(U8, zero=128)(x), w.floats(), w.bias)
        return y + 1, F.linear(per_tensor(U8, zero=128)(y), v.floats(), v.bias)

    _, graph = build(function, [torch.randn(2, 3, 24)])
    assert bytes_out(graph) == [False, False]
