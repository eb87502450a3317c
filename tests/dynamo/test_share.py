# SPDX-License-Identifier: Apache-2.0
"""Equal nodes of a joint graph become one, and nothing that only looks equal."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from blade.dynamo.cse import eliminate_common_subexpressions

aten = torch.ops.aten


def twice(op: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], Any]:
    return lambda x: op(x).sin() + op(x).cos()


SHARED: dict[str, tuple[Callable[[torch.Tensor], Any], str, int]] = {
    "equal": (twice(torch.exp), "exp", 1),
    "equal lists": (twice(lambda x: x.sum([0, 1])), "sum", 1),
    "parts": (twice(lambda x: torch.std_mean(x)[1]), "std_mean", 1),
    "numbers of two kinds": (lambda x: (x * 1).sin() + (x * 1.0).cos(), "mul", 2),
    "zeros of two signs": (lambda x: (x + 0.0).sin() + (x + -0.0).cos(), "add", 3),
    "draws": (twice(torch.bernoulli), "bernoulli", 2),
    "results": (lambda x: (x.exp(), x.exp()), "exp", 2),
    "a view of a result": (lambda x: (x.exp().view(-1), x.exp().sin()), "exp", 2),
}


@pytest.mark.parametrize("name", SHARED)
def test_what_is_one(name: str) -> None:
    function, op, count = SHARED[name]
    x = torch.rand(3, 4)
    traced = make_fx(function, tracing_mode="fake")(x)
    eliminate_common_subexpressions(traced.graph)
    traced.graph.lint()
    traced.recompile()
    left = [n for n in traced.graph.nodes if str(n.target).startswith(f"aten.{op}.")]
    assert len(left) == count
    if op != "bernoulli":
        torch.testing.assert_close(traced(x), function(x))


def test_what_is_read_before_and_after_a_write_is_two() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        before = aten.exp.default(x)
        aten.copy_.default(x, y)
        return before + aten.exp.default(x)

    traced = make_fx(function, tracing_mode="fake")(torch.rand(3), torch.rand(3))
    eliminate_common_subexpressions(traced.graph)
    traced.recompile()
    x, y = torch.rand(3), torch.rand(3)
    torch.testing.assert_close(traced(x.clone(), y), x.exp() + y.exp())
