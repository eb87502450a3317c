# SPDX-License-Identifier: Apache-2.0
"""An engine's time is found again layer by layer, whatever was merged or packed."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from blade.backends import registry
from blade.backends.quant.prepare import prepare
from blade.backends.quant.search.cpu_plans import make_plans
from blade.backends.quant.search.layer_profile import LayerProfile, _ConstantReaders, profile_layers
from blade.backends.quant.search.layer_savings import LayerSavings, measure_savings
from blade.backends.quant.transforms.insert_qdq import insert_qdq
from blade.config import Config
from blade.core.cluster import Cluster

Make = Callable[..., Cluster]
pytestmark = pytest.mark.needs("runtime", "torch_mlir")


class Attention(nn.Module):
    """Three products of one operand, which become one, and two that stay."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.softmax(self.q(x) @ self.k(x).transpose(-1, -2), -1) @ self.v(x) + x
        return self.down(torch.relu(self.up(x)))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(16, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x)))


@pytest.mark.parametrize(
    ("model", "shape", "kind"),
    [
        (Attention, (2, 12, 32), "dynamic"),
        (Attention, (2, 12, 32), "static"),
        (Attention, (2, 12, 32), "weight_only"),
        (Convolutions, (1, 8, 12, 12), "static"),
    ],
)
def test_every_layer_is_found_in_both_engines(
    cluster_of: Make, model: Callable[[], nn.Module], shape: tuple[int, ...], kind: str
) -> None:
    torch.manual_seed(0)
    cluster = cluster_of(model(), [torch.randn(shape) for _ in range(2)])
    config = Config(enable_int8=True, quantization_type=kind, accuracy_budget=0.5)  # type: ignore[arg-type]
    prepared = prepare(cluster, config)
    [plan] = make_plans(prepared, config)
    compiler = registry.load("disc")
    names = [layer.name for layer in prepared.layers]
    for schemes in ({}, plan.schemes):
        engine = compiler.convert(
            insert_qdq(replace(cluster, gm=prepared.gm), prepared.layers, schemes), config
        )
        weights = {
            layer.name: schemes[layer.name].weight.values if schemes else layer.weight
            for layer in prepared.layers
        }
        taken = profile_layers(engine, weights, cluster.samples[0])
        assert sorted(taken.layers) == sorted(names)
        assert all(seconds > 0 for seconds in taken.layers.values())
        assert taken.rest >= 0


def test_the_rest_is_shared_by_what_is_read(cluster_of: Make) -> None:
    """q, k and v read x, ``down`` four times as much as ``up``."""
    cluster = cluster_of(Attention(), [torch.randn(2, 12, 32)])
    prepared = prepare(cluster, Config(enable_int8=True))
    int8 = {layer.name: layer.weight.to(torch.int8) for layer in prepared.layers}

    def profile(engine: str, weights: object, inputs: object) -> LayerProfile:
        return LayerProfile(
            dict.fromkeys(int8, 2.0 if engine == "exact" else 1.0),
            9.0 if engine == "exact" else 3.0,
        )

    worth = measure_savings(
        prepared.layers, int8, "exact", "int8", prepared.simulation, cluster.samples, profile
    )
    extra = 6.0 / 6  # of six volumes: x, what up reads, and four of it for down
    want = {
        "q": 1 + extra / 3,
        "k": 1 + extra / 3,
        "v": 1 + extra / 3,
        "up": 1 + extra,
        "down": 1 + 4 * extra,
    }
    got = {layer.title: worth.saved[layer.name] for layer in prepared.layers}
    assert got == {name: (pytest.approx(value),) for name, value in want.items()}


def test_a_layer_that_no_instruction_shows_is_doubtful(cluster_of: Make) -> None:
    prepared = prepare(cluster_of(Attention(), [torch.randn(2, 12, 32)]), Config(enable_int8=True))
    first, *others = prepared.layers
    known = {layer.name: (1.0, 1.0) for layer in others}
    worth = LayerSavings(known, dict.fromkeys(known, (2.0, 2.0)))
    assert worth.doubtful([(layer,) for layer in prepared.layers]) == [(first,)]
    slow = LayerSavings(
        {**known, first.name: (1.0, 0.1)}, dict.fromkeys([*known, first.name], (2.0, 2.0))
    )
    assert slow.doubtful([(layer,) for layer in prepared.layers]) == [(first,)]


def test_what_launches_read_under_a_condition_or_not() -> None:
    program = """slots 3
slot 0 const 0
slot 1 const 1
slot 2 input 0
end"""
    readers = _ConstantReaders(program, 2)
    assert readers.constants("launch linear_1 7 8 8 3 2 1 2 1 9") == [1]
    assert readers.constants("when 5 launch linear_1 7 8 8 3 2 0 1 1 9") == [0, 1]
    assert readers.constants("when 5 call aten::mm.out 3 t:2 t:1 t:2 0") == [1]
