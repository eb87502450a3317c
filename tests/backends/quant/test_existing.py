# SPDX-License-Identifier: Apache-2.0
"""Models that are quantized already: fake quantization becomes Q/DQ, quantized modules stay what they are."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import blade
from blade.backends.base import Cluster
from blade.backends.quant.existing import accept, given_layers, grid_of
from blade.budget import output_error

Make = Callable[..., Cluster]
pytestmark = pytest.mark.needs("runtime", "torch_mlir")


class FakeQuantized(nn.Module):
    """As quantization-aware training leaves it, with observers switched off."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 64), nn.Linear(64, 8)
        self.register_buffer("scales", self.a.weight.detach().abs().amax(1) / 127)
        self.register_buffer("zeros", torch.zeros(64, dtype=torch.int32))
        self.register_buffer("scale", torch.tensor([0.02]))
        self.register_buffer("zero", torch.tensor([128], dtype=torch.int32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.fake_quantize_per_tensor_affine(x, 0.03, 120, 0, 255)
        w = torch.fake_quantize_per_channel_affine(
            self.a.weight, self.scales, self.zeros, 0, -127, 127
        )
        y = torch.relu(nn.functional.linear(x, w, self.a.bias))
        y = torch.fake_quantize_per_tensor_affine(y, self.scale, self.zero, 0, 255)
        w = torch.fake_quantize_per_tensor_affine(self.b.weight, 0.001, 0, -128, 127)
        return nn.functional.linear(y, w, self.b.bias)


def test_fake_quantization_becomes_explicit(cluster_of: Make) -> None:
    cluster = cluster_of(FakeQuantized(), [torch.randn(5, 32)])
    accepted = accept(cluster)
    assert accepted is not None
    left = [str(n.target) for n in accepted.gm.graph.nodes if "fake" in str(n.target)]
    assert left == []
    held = {n: b for n, b in accepted.gm.named_buffers() if b.dtype == torch.int8}
    assert sorted(tuple(b.shape) for b in held.values()) == [(8, 64), (64, 32)]
    for x in (torch.randn(5, 32), torch.randn(9, 32)):
        [got], [want] = accepted.gm(x), cluster.gm(x)
        assert output_error(got, want).relative < 1e-2  # ties round differently
    assert [p.precision for p in given_layers(accepted.gm)] == ["int8 as given"] * 2


@pytest.mark.parametrize("shape", [(16, 24), (8, 4, 3, 3)])
def test_a_grid_is_found_again(shape: tuple[int, ...]) -> None:
    rng = torch.Generator().manual_seed(0)
    levels = torch.randint(-100, 101, shape, generator=rng)
    levels.flatten(1)[:, 0], levels.flatten(1)[:, 1] = 100, 1
    scales = torch.rand(shape[0], generator=rng) + 0.01
    weight = levels * scales.view(-1, *[1] * (len(shape) - 1))
    found = grid_of(weight)
    assert found is not None
    assert torch.equal(found.values, levels.to(torch.int8))
    torch.testing.assert_close(found.scales, scales)
    assert grid_of(torch.randn(shape, generator=rng)) is None


def test_a_model_without_any_is_not_touched(cluster_of: Make) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    assert accept(cluster_of(model, [torch.randn(2, 8)])) is None


@pytest.mark.parametrize("int8", [True, False])
def test_a_fake_quantized_model_is_served(int8: bool) -> None:
    model = FakeQuantized().eval()
    x = torch.randn(6, 32)
    named = {"optimization_pipeline": "quant"} if int8 else {}
    optimized = blade.optimize(model, x, blade.Config(enable_int8=int8, timing=False, **named))  # type: ignore[arg-type]
    [cluster] = blade.report(optimized).clusters
    assert cluster.backend == ("quant" if int8 else "disc")
    assert [p.precision for p in cluster.precision] == ["int8 as given"] * 2 * int8
    assert output_error(optimized(x), model(x)).relative < 1e-2


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(32, 64), nn.Linear(64, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.norm(torch.sigmoid(self.b(torch.relu(self.a(x))))) * 2 + 1, -1)


@pytest.mark.parametrize("int8", [True, False])
def test_dynamically_quantized_modules_stay_what_they_are(int8: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantize: Any = torch.ao.quantization.quantize_dynamic
        model = quantize(Dense().eval(), {nn.Linear}, dtype=torch.qint8).eval()
    x = torch.randn(6, 32)
    optimized = blade.optimize(model, x, blade.Config(enable_int8=int8, timing=False))
    assert output_error(optimized(x), model(x)).relative < 1e-2
    assert output_error(optimized(x[:3]), model(x[:3])).relative < 1e-2
