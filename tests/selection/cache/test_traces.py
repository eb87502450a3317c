# SPDX-License-Identifier: Apache-2.0
"""A graph that was compared with its model before is not compared a second time; what is made of it is."""

from typing import Any

import pytest
import torch
from torch import nn

import blade
from blade.capture import candidate
from blade.config import Config
from blade.selection.cache import decisions
from blade.selection.cache.section import DECISIONS, TRACES, Section, sections_off
from blade.selection.plan import assemble as compose

pytestmark = [pytest.mark.needs("runtime"), pytest.mark.usefixtures("cluster_cache")]
X = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))


class Mlp(nn.Module):
    """``twist`` changes nothing at the sizes and values of ``X``."""

    def __init__(self, twist: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer, self.twist = nn.Linear(16, 32), nn.Linear(32, 8), twist

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.twist == "sizes" and x.shape[0] > 4:
            x = x + 1
        y: torch.Tensor = self.outer(nn.functional.gelu(self.inner(x)))
        return y


class Compared:
    """How many references each part was compared at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.graph: list[int] = []
        self.handed_out: list[int] = []
        for where, counts in ((candidate, self.graph), (compose, self.handed_out)):
            monkeypatch.setattr(where, "find_differences", _counted(where, counts))


def _counted(where: Any, counts: list[int]) -> Any:
    compare = where.find_differences

    def counted(module: Any, references: Any, *more: Any, **named: Any) -> Any:
        counts.append(len(references))
        return compare(module, references, *more, **named)

    return counted


def optimize(model: nn.Module, **fields: Any) -> nn.Module:
    # unmeasured, so that an engine is chosen, and kept, however busy the machine is
    config = Config(timing=False, min_cluster_size=1, **fields)
    optimized = blade.optimize(model.eval(), X, config)
    with torch.no_grad():
        for rows in (4, 1, 9):
            x = torch.randn(rows, 16)
            torch.testing.assert_close(optimized(x), model(x), rtol=1e-4, atol=1e-5)
    return optimized


def test_the_second_time_only_what_is_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = Compared(monkeypatch)
    optimize(Mlp())
    [first, small], [made] = compared.graph, compared.handed_out
    assert first > made >= 3  # other values, too
    assert small == 1
    optimize(Mlp())
    assert compared.graph == [first, small]
    assert compared.handed_out == [made, 2]  # the sample, and a small input


@pytest.mark.parametrize("allow_tracing", [None, True])
def test_a_model_that_differs_at_other_sizes_alone_is_found_out(allow_tracing: Any) -> None:
    """What it computes at the sample's sizes is the same, to the letter."""
    optimize(Mlp(), allow_tracing=allow_tracing)
    optimized = optimize(Mlp("sizes"), allow_tracing=allow_tracing)
    assert len(blade.report(optimized).paths) == 2


@pytest.mark.parametrize("missing", [DECISIONS, TRACES], ids=lambda section: section.kind)
def test_what_is_half_known_is_compared(monkeypatch: pytest.MonkeyPatch, missing: Section) -> None:
    optimize(Mlp())
    compared = Compared(monkeypatch)
    with sections_off(missing):
        optimize(Mlp())
    assert max(compared.graph) > compared.handed_out[0]


def test_what_is_held_to_a_budget_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = Compared(monkeypatch)
    for _ in range(2):
        optimize(Mlp(), enable_fp16=True)
    assert len(set(compared.graph)) == 1


def test_without_a_decision_a_trace_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "_cluster", lambda choice: {"keys": {"": None}})
    compared = Compared(monkeypatch)
    optimize(Mlp())
    first = list(compared.graph)
    optimize(Mlp())
    assert compared.graph == first * 2
