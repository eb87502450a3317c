# SPDX-License-Identifier: Apache-2.0
"""The search keeps the budget, reverts the worst layers first, and no more of them than it takes."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from blade.backends.quant.analysis import simulate
from blade.backends.quant.prepare import prepare
from blade.backends.quant.search.cpu_plans import PreparedCluster, QuantPlan, make_plans
from blade.backends.quant.search.within_budget import (
    FEW,
    ErrorsAlone,
    first_that_holds,
    groups_of,
    within_budget,
)
from blade.config import Config
from blade.config.accuracy import AccuracyBudget, parse
from blade.core.cluster import Cluster
from blade.core.reason import Code
from blade.errors import Refused

Make = Callable[..., Cluster]


class Residual(nn.Module):
    """Layers that matter more and more: each adds to the sum with a larger weight."""

    def __init__(self, depth: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for i, layer in enumerate(self.layers):
            y = y + 1.5**i / 10 * layer(x + i)
        return y


@pytest.fixture
def ready(cluster_of: Make) -> tuple[PreparedCluster, QuantPlan]:
    cluster = cluster_of(Residual(), [torch.randn(16, 32) for _ in range(3)])
    config = Config(enable_int8=True, quantization_type="dynamic")
    prepared = prepare(cluster, config)
    return prepared, next(iter(make_plans(prepared, config)))


def test_a_loose_budget_keeps_everything(ready: tuple[PreparedCluster, QuantPlan]) -> None:
    prepared, plan = ready
    found = within_budget(prepared.simulation, plan.schemes, parse(0.5))
    assert found.schemes == plan.schemes
    assert found.reverted == ()
    assert set(found.alone) == set(plan.schemes)


@pytest.mark.parametrize("form", ["relative", "cosine", "snr_db"])
def test_half_the_budget_leaves_visibly_fewer_layers(
    ready: tuple[PreparedCluster, QuantPlan], form: str
) -> None:
    prepared, plan = ready
    error = prepared.simulation.error(plan.schemes)
    whole = {
        "relative": AccuracyBudget("relative", 1.001 * error.relative),
        "cosine": AccuracyBudget("cosine", 1 - 1.001 * (1 - error.cosine)),
        "snr_db": AccuracyBudget("snr_db", error.snr_db - 0.001),
    }[form]
    counts = []
    for budget in (whole, whole.scaled(0.5), whole.scaled(0.25)):
        found = within_budget(prepared.simulation, plan.schemes, budget)
        assert budget.allows(prepared.simulation.error(found.schemes))
        assert budget.allows(found.error)
        counts.append(len(found.schemes))
    assert counts[0] == 8
    assert 0 < counts[2] < counts[1] < 8


def test_the_worst_go_first_and_no_more_than_it_takes(
    ready: tuple[PreparedCluster, QuantPlan],
) -> None:
    prepared, plan = ready
    error = prepared.simulation.error(plan.schemes)
    budget = AccuracyBudget("relative", 0.5 * error.relative)
    found = within_budget(prepared.simulation, plan.schemes, budget)
    kept = [found.alone[name].relative for name in found.schemes]
    gone = [found.alone[name].relative for name in found.reverted]
    assert gone == sorted(gone, reverse=True)
    assert min(gone) >= max(kept)
    more = {**found.schemes, found.reverted[-1]: plan.schemes[found.reverted[-1]]}
    assert not budget.allows(prepared.simulation.error(more))


def test_a_budget_that_no_layer_meets_is_refused_with_the_numbers(
    ready: tuple[PreparedCluster, QuantPlan],
) -> None:
    prepared, plan = ready
    with pytest.raises(Refused, match=r"a relative error of at most 1e-09, and no layer") as caught:
        within_budget(prepared.simulation, plan.schemes, parse(1e-9))
    assert caught.value.code == Code.ACCURACY


@pytest.mark.parametrize("first", range(8))
def test_bisection_finds_the_first(first: int) -> None:
    asked = []

    def holds(k: int) -> bool:
        asked.append(k)
        return k >= first

    assert first_that_holds(1, 6, holds) == (None if first > 6 else max(1, first))
    assert len(asked) <= 4


def test_equal_layers_are_one_group(cluster_of: Make) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 64))
    config = Config(enable_int8=True, quantization_type="dynamic")
    prepared = prepare(cluster_of(model, [torch.randn(4, 8)]), config)
    plan = next(iter(make_plans(prepared, config)))
    groups = groups_of(prepared.layers, plan.schemes)
    assert [[layer.title for layer in g] for g in groups] == [["2"], ["0", "1"]] or [
        len(g) for g in groups
    ] == [1, 2]


class InPlace(nn.Module):
    """What comes before the second layer is changed after it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        z = self.b(y)
        return torch.ops.aten.add_(y, z)


@pytest.mark.parametrize("model", [Residual, InPlace])
@pytest.mark.parametrize("kept", [simulate.KEPT_BYTES, 0])
def test_alone_is_what_a_run_with_that_scheme_says(
    cluster_of: Make,
    model: Callable[[], nn.Module],
    kept: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(simulate, "KEPT_BYTES", kept)
    torch.manual_seed(0)
    config = Config(enable_int8=True, quantization_type="dynamic")
    prepared = prepare(cluster_of(model(), [torch.randn(16, 32) for _ in range(3)]), config)
    [plan] = make_plans(prepared, config)
    simulation = prepared.simulation
    alone = simulation.alone(plan.schemes)
    assert alone == {n: simulation.error({n: s}) for n, s in plan.schemes.items()}
    assert all(error.relative > 0 for error in alone.values())


def test_what_is_known_of_a_scheme_is_not_asked_again(
    ready: tuple[PreparedCluster, QuantPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared, plan = ready
    known: ErrorsAlone = {}
    first = within_budget(prepared.simulation, plan.schemes, parse(0.5), known)
    monkeypatch.setattr(simulate.Simulation, "_values", None)  # nothing is run alone any more
    assert within_budget(prepared.simulation, plan.schemes, parse(0.5), known) == first


def test_few_samples_lead_and_all_decide(cluster_of: Make) -> None:
    """The sample that needs most layers reverted is the last one."""
    torch.manual_seed(0)
    samples = [torch.randn(16, 32) for _ in range(3)]
    samples.append(samples[0] * 20)
    config = Config(enable_int8=True, quantization_type="static")
    prepared = prepare(cluster_of(Residual(), samples), config)
    [plan] = make_plans(prepared, config)
    whole = prepared.simulation.error(plan.schemes).relative
    budget = AccuracyBudget("relative", 0.4 * whole)
    found = within_budget(prepared.simulation, plan.schemes, budget)
    assert budget.allows(prepared.simulation.error(found.schemes))
    assert len(prepared.simulation.samples) > FEW


def test_products_that_hardly_matter_have_no_plan_of_their_own(cluster_of: Make) -> None:
    def names(model: nn.Module, shape: tuple[int, ...]) -> list[str]:
        config = Config(enable_int8=True)
        prepared = prepare(cluster_of(model, [torch.randn(shape)]), config)
        return [plan.name for plan in make_plans(prepared, config)]

    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 8)]
    mostly_convolved = nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU(), *head)
    assert names(mostly_convolved, (32, 8, 8, 8)) == ["mixed"]
    products = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    assert names(products, (32, 8)) == ["mixed", "static"]
    assert names(products, (4, 8)) == ["mixed", "static", "weight_only"]
