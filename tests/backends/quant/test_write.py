# SPDX-License-Identifier: Apache-2.0
"""Q/DQ written into the graph computes what the simulation does, and the given cluster stays as it was."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from blade.backends.quant.analysis.layers import find_layers
from blade.backends.quant.prepare import prepare
from blade.backends.quant.search.cpu_plans import make_plans
from blade.backends.quant.transforms.insert_qdq import insert_qdq
from blade.config import Config
from blade.config.accuracy import output_error
from blade.core.cluster import Cluster

Make = Callable[..., Cluster]


class Block(nn.Module):
    """Two products read one activation; another activation is a function of both."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.q, self.k, self.o = nn.Linear(32, 64), nn.Linear(32, 64, bias=False), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.o(torch.nn.functional.gelu(self.q(y)) * self.k(y))


class Image(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, groups=4)
        self.c = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.sigmoid(self.b(torch.relu(self.a(x)))).mean((2, 3)))


class Chain(nn.Module):
    """Each layer reads what another makes, nothing between them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(32, 64), nn.Linear(64, 16), nn.Conv1d(7, 7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(self.a(x)))


class Bottleneck(nn.Module):
    """Two blocks with residuals: the first sum and what it adds are read by quantized layers only."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.last = nn.Conv2d(4, 8, 1), nn.Conv2d(8, 8, 1)
        self.a, self.b = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(x))
        y = torch.relu(self.b(torch.relu(self.a(x))) + x)
        return self.last(y) + y


def targets(cluster: Cluster) -> list[str]:
    found = [str(n.target) for n in cluster.gm.graph.nodes if n.op == "call_function"]
    return [t.partition(".")[2].partition(".")[0] for t in found if "quantized_decomposed" in t]


CASES: list[tuple[type[nn.Module], tuple[int, ...], dict[str, Any]]] = [
    (Block, (3, 7, 32), {"quantization_type": "dynamic", "symmetric_activations": True}),
    (Block, (3, 7, 32), {"quantization_type": "dynamic", "symmetric_activations": False}),
    (Block, (3, 7, 32), {"quantization_type": "static"}),
    (Block, (3, 7, 32), {"quantization_type": "static", "symmetric_activations": True}),
    (Block, (3, 7, 32), {"quantization_type": "weight_only"}),
    (Block, (3, 7, 32), {"quantization_type": "weight_only", "weight_bits": 4}),
    (Image, (2, 3, 9, 9), {"quantization_type": "static"}),
    (Image, (2, 3, 9, 9), {}),
    (Bottleneck, (2, 4, 9, 9), {"quantization_type": "static"}),
    (Chain, (3, 7, 32), {}),
    (Chain, (3, 7, 32), {"quantization_type": "static"}),
]


@pytest.mark.parametrize(("model", "shape", "fields"), CASES)
def test_the_graph_computes_what_was_simulated(
    cluster_of: Make, model: type[nn.Module], shape: tuple[int, ...], fields: dict[str, Any]
) -> None:
    cluster = cluster_of(model(), [torch.randn(shape) for _ in range(3)])
    assert {layer.weight.dtype for layer in find_layers(cluster.gm)} == {torch.float32}
    before = str(cluster.gm.graph), [id(b) for b in cluster.gm.buffers()]
    config = Config(enable_int8=True, **fields)
    prepared = prepare(cluster, config)
    plan = next(iter(make_plans(prepared, config)))
    assert set(plan.schemes) == {layer.name for layer in prepared.layers}
    made = insert_qdq(replace(cluster, gm=prepared.gm), prepared.layers, plan.schemes)
    for inputs in prepared.simulation.samples:
        [got], [want] = made.gm(*inputs), prepared.simulation.run(inputs, plan.schemes)
        assert output_error(got, want).relative < 5e-3  # a value between two ints may go either way
        [original] = cluster.gm(*inputs)
        assert 0 < output_error(got, original).relative < 0.2
    assert find_layers(made.gm) == []  # none is left in float
    assert (str(cluster.gm.graph), [id(b) for b in cluster.gm.buffers()]) == before
    for node in made.gm.graph.nodes:
        assert node.op == "output" or "val" in node.meta
    assert len(made.shape_env.guards) == len(cluster.shape_env.guards)


def test_readers_of_one_activation_share_its_quantization(cluster_of: Make) -> None:
    cluster = cluster_of(Block(), [torch.randn(3, 7, 32)])
    config = Config(enable_int8=True, quantization_type="dynamic", symmetric_activations=True)
    prepared = prepare(cluster, config)
    plan = next(iter(make_plans(prepared, config)))
    made = insert_qdq(replace(cluster, gm=prepared.gm), prepared.layers, plan.schemes)
    found = targets(made)
    assert found.count("choose_qparams_per_token") == 2  # of the norm, and of the product of both
    assert found.count("dequantize_per_channel") == 3
    floats = [b for b in made.gm.buffers() if b.dtype == torch.float32 and b.dim() == 2]
    assert floats == []  # no weight is kept twice


def test_only_the_layers_with_a_scheme_change(cluster_of: Make) -> None:
    cluster = cluster_of(Block(), [torch.randn(3, 7, 32)])
    config = Config(enable_int8=True, quantization_type="static")
    prepared = prepare(cluster, config)
    plan = next(iter(make_plans(prepared, config)))
    some = dict(list(plan.schemes.items())[2:])
    made = insert_qdq(replace(cluster, gm=prepared.gm), prepared.layers, some)
    assert targets(made) == [
        "quantize_per_tensor",
        "dequantize_per_tensor",
        "dequantize_per_channel",
    ]


def test_a_residual_is_read_in_bytes_where_nobody_else_reads_floats(cluster_of: Make) -> None:
    """Of two sums the first: the last one is returned, and so what it adds stays in float."""
    cluster = cluster_of(Bottleneck(), [torch.randn(2, 4, 9, 9)])
    config = Config(enable_int8=True, quantization_type="static")
    prepared = prepare(cluster, config)
    plan = next(iter(make_plans(prepared, config)))
    made = insert_qdq(replace(cluster, gm=prepared.gm), prepared.layers, plan.schemes)
    sums = [n for n in made.gm.graph.nodes if n.target is torch.ops.aten.add.Tensor]
    read = [[str(a.target) for a in n.args if isinstance(a, torch.fx.Node)] for n in sums]
    dequantized = ["quantized_decomposed.dequantize_per_tensor.default" in each for each in read]
    assert dequantized == [True, False]
    assert targets(made).count("quantize_per_tensor") == 4  # nothing is quantized twice
    first = {n: s for n, s in plan.schemes.items() if n == next(iter(plan.schemes))}
    assert prepared.simulation.residuals(first) == {}


@pytest.mark.parametrize("method", ["min_max", "moving_average", "percentile", "entropy"])
def test_every_method_calibrates(cluster_of: Make, method: str) -> None:
    samples = [torch.randn(3, 7, 32) for _ in range(4)]
    samples[3] = samples[3] * 3
    cluster = cluster_of(Block(), samples)
    config = Config(enable_int8=True, quantization_type="static", calibration_method=method)  # type: ignore[arg-type]
    prepared = prepare(cluster, config)
    assert prepared.seen.samples == 4
    plan = next(iter(make_plans(prepared, config)))
    assert prepared.simulation.error(plan.schemes).relative < 0.1


def test_no_more_samples_than_asked_for_calibrate(cluster_of: Make) -> None:
    cluster = cluster_of(Block(), [torch.randn(3, 7, 32) for _ in range(6)])
    assert (len(cluster.samples), len(list(cluster.calibration))) == (1, 5)
    prepared = prepare(cluster, Config(enable_int8=True, calibration_samples=4))
    assert prepared.seen.samples == 4
