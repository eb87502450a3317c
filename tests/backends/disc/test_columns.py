# SPDX-License-Identifier: Apache-2.0
"""Reductions over other axes than the last: nothing is written only to be reduced."""

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from disc_programs import legalized
from op_trace import trace

from blade.backends.disc.compiler import compile_ir
from blade.backends.disc.frontend.lower import lower
from blade.backends.disc.fusion.fuse import fuse
from blade.backends.disc.ir.graph import Value
from blade.backends.disc.reference.interpret_graph import interpret
from blade.backends.disc.target.cpu import host
from blade.runtime.engine import make_engine

pytestmark = [pytest.mark.needs("runtime"), pytest.mark.needs("torch_mlir")]
Function = Callable[[torch.Tensor], torch.Tensor]
WEIGHT = torch.randn(8, 4, 1, 1, generator=torch.Generator().manual_seed(0))


def written(function: Function, runs: Sequence[torch.Tensor]) -> list[Value]:
    """Values of full size that kernels write, results included; the answers are checked."""
    dynamic = [True, False, True, True]
    graph = lower(*trace(function, [runs[0]], [dynamic]))
    made = compile_ir(graph, host())
    engine = make_engine("t", "disc", made.program, made.object, list(made.constants), {})
    graph = legalized(graph)
    for x in runs:
        got = engine.try_execute([x])
        assert got is not None, engine.last_error()
        ideal = function(x.double()).float() if "conv" not in str(graph) else function(x)
        torch.testing.assert_close(got[0], ideal, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(interpret(graph, [x])[0], ideal, rtol=1e-4, atol=1e-4)
    stored = fuse(graph).stored
    return [v for v in graph.values if v.id in stored and "s74" in str(v.shape)]


AGAIN = torch.randn(4, 8, 1, 1, generator=torch.Generator().manual_seed(1))
RUNS = [torch.randn(b, 4, h, w) for b, h, w in ((2, 9, 11), (1, 2, 40), (3, 17, 2))]


def squares_of_deviations(x: torch.Tensor) -> torch.Tensor:
    return ((x - x.mean((2, 3), keepdim=True)) ** 2).sum((2, 3)) + x.exp().amax((2, 3))


def over_channels(x: torch.Tensor) -> torch.Tensor:
    return (torch.sin(x) * x).sum(1)


def deviations_after_a_convolution(x: torch.Tensor) -> torch.Tensor:
    x = F.conv2d(x, WEIGHT)
    return (x - x.mean((2, 3), keepdim=True)).square().mean((2, 3))


@pytest.mark.parametrize("function", [squares_of_deviations, deviations_after_a_convolution])
def test_nothing_of_full_size_is_written(function: Function) -> None:
    assert [v for v in written(function, RUNS) if v.op != "cast"] == []


def test_channels() -> None:
    (result,) = written(over_channels, RUNS)
    assert result.op == "reduce" and len(result.shape) == 4


def test_group_norm_writes_its_result_only() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return F.conv2d(F.silu(F.group_norm(F.conv2d(x, WEIGHT), 2)), AGAIN)

    kept = [v.op for v in written(function, RUNS)]  # sums of rows of pixels aside
    assert [op for op in kept if op not in ("cast", "reduce")] == ["mul"]


def test_what_others_read_is_not_computed_twice() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = torch.exp(x)
        return y / y.sum(1, keepdim=True)

    exps = [v for v in written(function, RUNS) if v.op == "exp"]
    assert len(exps) == 1
