# SPDX-License-Identifier: Apache-2.0
"""Moved scales: the function stays the same, outliers stop costing the others, and only where it is exact."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from blade.backends.quant.analysis.affine import affine_of, quantize_weight
from blade.backends.quant.analysis.calibrate import calibrate
from blade.backends.quant.analysis.layers import find_layers
from blade.backends.quant.transforms.smoothquant import find_migrations, scales_of, smoothquant
from blade.core.cluster import Cluster

Make = Callable[..., Cluster]


def outliers(size: int) -> torch.Tensor:
    """What layer norms of large models learn: a few features a hundred times larger."""
    weight = torch.ones(size)
    weight[::16] = 100.0
    return weight


class PreNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.q, self.k = nn.Linear(64, 32), nn.Linear(64, 32, bias=False)
        self.norm.weight = nn.Parameter(outliers(64))
        self.norm.bias = nn.Parameter(torch.randn(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x[..., :32] + self.q(y) * self.k(y)


class Chain(nn.Module):
    """An RMS norm, then products with nothing or a ReLU between them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(outliers(64))
        self.a, self.b, self.c = nn.Linear(64, 48), nn.Linear(48, 48), nn.Linear(48, 8)
        self.a.weight = nn.Parameter(self.a.weight * outliers(48).unsqueeze(1))
        self.b.weight = nn.Parameter(self.b.weight * outliers(48).unsqueeze(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scale
        return self.c(torch.relu(self.b(self.a(x))))


class PostNorm(nn.Module):
    """The norm's result is also the residual: dividing it would change what is added."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a = nn.LayerNorm(64), nn.Linear(64, 64)
        self.norm.weight = nn.Parameter(outliers(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return y + self.a(y)


class ThroughGelu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 8)
        self.a.weight = nn.Parameter(self.a.weight * outliers(64).unsqueeze(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(nn.functional.gelu(self.a(x)))


def smoothed(cluster: Cluster, per_token: bool) -> tuple[torch.fx.GraphModule, list[str]]:
    layers = find_layers(cluster.gm)
    seen = calibrate(cluster.gm, layers, cluster.samples, "min_max")
    return smoothquant(cluster.gm, layers, seen, per_token)


@pytest.mark.parametrize("per_token", [True, False])
@pytest.mark.parametrize(("model", "moved"), [(PreNorm(), 1), (Chain(), 3)])
def test_the_function_stays_the_same(
    cluster_of: Make, model: nn.Module, moved: int, per_token: bool
) -> None:
    cluster = cluster_of(model, [torch.randn(32, 64)])
    gm, names = smoothed(cluster, per_token)
    assert len(names) == moved
    x = torch.randn(7, 64)
    [got], [want] = gm(x), cluster.gm(x)
    assert (got - want).norm() < 1e-6 * want.norm()  # what float32 rounds in the weights
    assert {n.name for n in gm.graph.nodes if n.op != "get_attr"} == {
        n.name for n in cluster.gm.graph.nodes if n.op not in ("get_attr",) and not _is_view(n)
    }


def _is_view(node: torch.fx.Node) -> bool:
    return "aten.t" in str(node.target)


def test_int8_is_nearer_afterwards(cluster_of: Make) -> None:
    cluster = cluster_of(PreNorm(), [torch.randn(64, 64)])
    gm, _ = smoothed(cluster, per_token=False)
    x = torch.randn(64, 64)

    def error(of: torch.fx.GraphModule) -> float:
        [layer, _] = find_layers(of)
        values = {}
        torch.fx.Interpreter(of)  # the features, by running up to the layer
        made = _Recorder(of, values)
        made.run(x)
        features = values[layer.x.name]
        affine = affine_of(float(features.min()), float(features.max()), False)
        got = affine.round_trip(features) @ quantize_weight(layer.weight).dequantize().t()
        want = features @ layer.weight.t()
        return float((got - want).norm() / want.norm())

    assert error(gm) < 0.5 * error(cluster.gm)


class _Recorder(torch.fx.Interpreter):
    def __init__(self, gm: torch.fx.GraphModule, values: dict[str, torch.Tensor]) -> None:
        super().__init__(gm)
        self.values = values

    def run_node(self, n: torch.fx.Node) -> object:
        made = super().run_node(n)
        self.values[n.name] = made
        return made


@pytest.mark.parametrize("model", [PostNorm(), ThroughGelu()])
def test_nothing_moves_where_it_would_change_the_function(
    cluster_of: Make, model: nn.Module
) -> None:
    cluster = cluster_of(model, [torch.randn(32, 64)])
    assert find_migrations(cluster.gm, find_layers(cluster.gm)) == []
    gm, names = smoothed(cluster, per_token=False)
    assert gm is cluster.gm
    assert names == []


def test_nothing_moves_where_nothing_is_gained(cluster_of: Make) -> None:
    model = PreNorm()
    model.norm.weight = nn.Parameter(torch.ones(64))
    model.norm.bias = nn.Parameter(torch.zeros(64))
    cluster = cluster_of(model, [torch.randn(32, 64)])
    assert smoothed(cluster, per_token=True)[1] == []


def test_scales_are_those_of_the_paper() -> None:
    peaks = torch.tensor([4.0, 0.0, 100.0, 1.0])
    weights = [torch.tensor([[1.0, 2.0, 0.5, 0.0], [-2.0, 1.0, 0.25, 0.0]])]
    got = scales_of(peaks, weights, 0.25)
    assert got.tolist() == pytest.approx([4**0.25 / 2**0.75, 1.0, 100**0.25 / 0.5**0.75, 1.0])
