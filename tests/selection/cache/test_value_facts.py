# SPDX-License-Identifier: Apache-2.0
"""What a graph's values look like is read from disk the second time, and only if nothing else has changed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from blade.capture.capture import capture
from blade.config import Config
from blade.graph.torchscript.program import read
from blade.graph.torchscript.view import observe_runs
from blade.selection.cache import decisions
from blade.selection.cache.decisions import value_facts
from blade.selection.cache.fingerprint import WeightDigests

pytestmark = [pytest.mark.needs("runtime"), pytest.mark.usefixtures("cluster_cache")]


class Norms(nn.Module):
    """Sizes that depend on values, and several dtypes."""

    def __init__(self, bias: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(24.0).view(4, 6))
        self.bias = bias

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x @ self.weight + self.bias
        return y.half(), (y > 0).nonzero()


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Grows by one for each graph that is run."""
    made: list[None] = []

    def counted(*inputs: Any) -> Any:
        made.append(None)
        return observe_runs(*inputs)

    monkeypatch.setattr(decisions, "observe_runs", counted)
    return made


def facts(model: nn.Module, inputs: Any, **fields: Any) -> Any:
    config = Config(**fields)
    captured = capture(model.eval(), inputs, config)
    program = read(captured.module.graph)
    found = value_facts(captured, config, WeightDigests(), program)
    assert found == observe_runs(captured, program)
    return found


def test_the_second_time_nothing_runs(runs: list[None]) -> None:
    first = facts(Norms(), X)
    assert len(first) > 1 and {f.dtype for each in first[0].values() for f in each} >= {
        torch.half,
        torch.int64,
        torch.bool,
    }
    assert facts(Norms(), X.clone()) == first
    assert len(runs) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda: (Norms(), -X),
        lambda: (Norms(), X.double().float() * 2),
        lambda: (Norms(), torch.cat([X, X])),
        lambda: (Norms(bias=1.0), X),
        lambda: (other_weights(), X),
    ],
    ids=["values", "scale", "sizes", "graph", "weights"],
)
def test_what_may_change_sizes_is_run(
    runs: list[None], change: Callable[[], tuple[nn.Module, torch.Tensor]]
) -> None:
    facts(Norms(), X)
    facts(*change())
    assert len(runs) == 2


def other_weights() -> nn.Module:
    model = Norms()
    with torch.no_grad():
        model.weight.neg_()
    return model


_FOREIGN = torch.library.Library("blade_known_facts", "DEF")
_FOREIGN.define("double(Tensor x) -> Tensor")
_FOREIGN.impl("double", lambda x: x * 2, "CompositeExplicitAutograd")


class Foreign(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = torch.ops.blade_known_facts.double(x)
        return made + 1


@pytest.mark.parametrize(("model", "fields"), [(Norms, {"cache": False}), (Foreign, {})])
def test_without_a_cache_and_with_foreign_ops_it_runs(
    runs: list[None], model: Callable[[], nn.Module], fields: dict[str, bool]
) -> None:
    facts(model(), X, **fields)
    facts(model(), X, **fields)
    assert len(runs) == 2


def test_what_the_cache_has_may_be_damaged(
    runs: list[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    facts(Norms(), X)
    monkeypatch.setattr(decisions, "_fact", lambda *fact: fact[4])
    facts(Norms(), X)
    assert len(runs) == 2
