# SPDX-License-Identifier: Apache-2.0
"""What goes into a convolution, what does not, and that the values are the same."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from op_trace import trace

from blade.backends.disc.compiler import compile_ir
from blade.backends.disc.frontend.lower import lower
from blade.backends.disc.ir.convolution import operands
from blade.backends.disc.ir.graph import Graph, Value
from blade.backends.disc.passes.fuse_conv_epilogue import fuse_conv_epilogue
from blade.backends.disc.passes.propagate_layouts import propagate
from blade.backends.disc.reference.interpret_graph import interpret
from blade.backends.disc.target.cpu import host
from blade.runtime.engine import make_engine

pytestmark = [pytest.mark.needs("runtime"), pytest.mark.needs("torch_mlir")]
Function = Callable[[torch.Tensor], object]


def weights(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) / 3


W, V, W1, BIAS = weights(8, 4, 3, 3), weights(8, 4, 3, 3) + 1, weights(8, 8, 1, 1), weights(8)


def then(x: torch.Tensor) -> torch.Tensor:
    """Another convolution: the last op of a model writes in torch's order, outside of any."""
    return F.conv2d(x, W1)


def absorbed(function: Function) -> Graph:
    """The graph after the pass; the compiled program and the interpreter agree with torch."""
    sample = torch.randn(2, 4, 7, 6)
    graph = lower(*trace(function, [sample], [[True, False, True, True]]))
    compiled = compile_ir(graph, host())
    engine = make_engine("t", "disc", compiled.program, compiled.object, compiled.constants, {})
    graph = fuse_conv_epilogue(propagate(graph))
    for x in (sample, torch.randn(1, 4, 3, 3), torch.randn(0, 4, 5, 9)):
        found = function(x)
        want = found if isinstance(found, tuple) else (found,)
        got = engine.try_execute([x])
        assert got is not None, engine.last_error()
        for a, b, c in zip(got, interpret(graph, [x]), want, strict=True):
            torch.testing.assert_close(a, c, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(b, c, rtol=1e-4, atol=1e-4)
    return graph


def convolutions(graph: Graph) -> list[Value]:
    return [v for v in graph.values if v.op == "conv"]


def left(graph: Graph) -> list[str]:
    return [v.op for v in graph.values if v.is_pointwise]


def test_residual_and_activation() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        x = F.conv2d(x, W, BIAS, padding=1).relu()
        return then(F.relu6(F.conv2d(x, W1, BIAS) + x))

    graph = absorbed(function)
    first, second, _ = convolutions(graph)
    assert left(graph) == []
    assert (first.attrs["activation"], second.attrs["activation"]) == ("relu", "relu6")
    assert operands(first).residual is None and operands(second).residual is first


def test_a_sum_of_convolutions_goes_into_the_later_one() -> None:
    graph = absorbed(lambda x: then((F.conv2d(x, W) + F.conv2d(x, V)).relu()))
    first, second, _ = convolutions(graph)
    assert operands(second).residual is first and left(graph) == []
    assert second.attrs["activation"] == "relu"


def test_a_sum_per_channel_is_a_bias() -> None:
    graph = absorbed(lambda x: then(F.conv2d(x, W) + BIAS[:, None, None]))
    conv, _ = convolutions(graph)
    assert operands(conv).bias is not None and left(graph) == []


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (lambda y: (y, y.relu()))(F.conv2d(x, W)),  # read twice
        lambda x: F.conv2d(x, W).relu() + F.conv2d(x, W).relu() + x[:, :1, 2:, 2:],
        lambda x: F.conv2d(x, W).clamp(1),
        lambda x: F.conv2d(x, W).clamp(max=6),
        lambda x: F.conv2d(x, x[:, :, :1, :1].mean(0, keepdim=True)).relu(),  # weights known late
    ],
)
def test_what_stays_outside(function: Function) -> None:
    graph = absorbed(function)
    assert left(graph) and all(operands(c).residual is None for c in convolutions(graph)), graph


def test_an_activation_ends_the_epilogue() -> None:
    graph = absorbed(lambda x: F.conv2d(F.conv2d(x, W, padding=1).relu() + x[:, :1], W1))
    assert left(graph) == ["add"]


def test_nan_stays_nan() -> None:
    graph = absorbed(lambda x: F.conv2d(x, W).relu())
    x = torch.full((1, 4, 3, 3), torch.nan)
    compiled = compile_ir(graph, host())
    engine = make_engine("t", "disc", compiled.program, compiled.object, compiled.constants, {})
    got = engine.try_execute([x])
    assert got is not None and got[0].isnan().all()
