# SPDX-License-Identifier: Apache-2.0
"""Models that are quantized already: fake quantization becomes Q/DQ, quantized modules stay what they are."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import blade
from blade.backends.quant.prepare import prepare
from blade.backends.quant.search.cpu_plans import make_plans
from blade.backends.quant.transforms.accept_quantized import accept, given_layers, grid_of
from blade.backends.quant.transforms.insert_qdq import ops
from blade.config import Config
from blade.config.accuracy import output_error
from blade.core.cluster import Cluster

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


class Explicit(nn.Module):
    """The calls that torchao's convert_pt2e leaves of two layers and what lies between them."""

    def __init__(self, conv: bool) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(0)
        self.call = torch.conv2d if conv else nn.functional.linear
        shapes = [(16, 8, 3, 3), (8, 16, 3, 3)] if conv else [(64, 32), (8, 64)]
        for i, shape in enumerate(shapes):
            self.register_buffer(
                f"weight_{i}", torch.randint(-127, 128, shape, generator=rng, dtype=torch.int8)
            )
            self.register_buffer(f"scale_{i}", 0.01 * torch.rand(shape[0], generator=rng) + 1e-3)
            self.register_buffer(f"zero_{i}", torch.zeros(shape[0], dtype=torch.int64))
            self.register_buffer(f"bias_{i}", torch.randn(shape[0], generator=rng))

    def layer(self, i: int, x: torch.Tensor, scale: float, zero: int) -> torch.Tensor:
        form = (scale, zero, 0, 255, torch.uint8)
        x = ops.dequantize_per_tensor.default(ops.quantize_per_tensor.default(x, *form), *form)
        held = (getattr(self, f"{name}_{i}") for name in ("weight", "scale", "zero"))
        w = ops.dequantize_per_channel.default(*held, 0, -128, 127, torch.int8)
        return self.call(x, w, getattr(self, f"bias_{i}"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.layer(1, torch.relu(self.layer(0, x, 0.03, 111)), 0.05, 0), -1)


@pytest.mark.parametrize("int8", [True, False])
@pytest.mark.parametrize(("conv", "shape"), [(False, (6, 32)), (True, (2, 8, 12, 12))])
def test_explicit_quantization_is_taken_at_its_word(
    conv: bool, shape: tuple[int, ...], int8: bool
) -> None:
    """Nothing is rounded that the model does not round: int8 engines answer as its own ops do."""
    torch.manual_seed(0)
    model, x = Explicit(conv).eval(), torch.randn(shape)
    named = {"optimization_pipeline": "quant"} if int8 else {}
    optimized = blade.optimize(model, x, blade.Config(enable_int8=int8, timing=False, **named))  # type: ignore[arg-type]
    [cluster] = blade.report(optimized).clusters
    assert cluster.backend == ("quant" if int8 else "disc")
    assert [p.precision for p in cluster.precision] == ["int8 as given"] * 2 * int8
    [engine] = _engines(optimized)
    kernels = [line for line in engine.program().splitlines() if line.startswith("kernel int8_")]
    assert (
        len(kernels) == 2 * int8
    )  # without the permission freezing has made floats of the weights
    for y in (x, torch.randn(1, *shape[1:])):
        assert output_error(optimized(y), model(y)).relative < 1e-5


@pytest.mark.parametrize("mode", [True, False])
def test_an_exported_graph_has_no_mode(mode: bool) -> None:
    """What convert_pt2e returns says that it is in training mode, and cannot be told otherwise."""
    x = torch.randn(6, 32)
    exported = torch.export.export(Explicit(conv=False).eval(), (x,)).module()
    for module in exported.modules():
        module.training = mode
    optimized = blade.optimize(exported, x, blade.Config(timing=False))
    assert [c.backend for c in blade.report(optimized).clusters] == ["disc"]
    assert output_error(optimized(x), exported(x)).relative < 1e-5
    assert all(module.training == mode for module in exported.modules())


class Stubbed(nn.Module):
    """For torch.ao's static quantization, whose modules compute in quantized tensors."""

    def __init__(self) -> None:
        super().__init__()
        ao: Any = torch.ao.quantization
        self.quant, self.dequant = ao.QuantStub(), ao.DeQuantStub()
        self.a, self.relu, self.b = nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.dequant(self.b(self.relu(self.a(self.quant(x)))))
        return torch.softmax(y.exp() * 2 + 1, -1)


@pytest.mark.parametrize("int8", [True, False])
def test_quantized_tensors_stay_with_the_original(int8: bool) -> None:
    x = torch.randn(6, 32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ao: Any = torch.ao.quantization
        model = Stubbed().eval()
        model.qconfig = ao.get_default_qconfig("fbgemm")
        observed = ao.prepare(model)
        observed(x)
        model = ao.convert(observed).eval()
    optimized = blade.optimize(model, x, blade.Config(enable_int8=int8, timing=False))
    found = blade.report(optimized)
    assert found.outside["quantized::linear"] == 2
    why = [r.detail for r in found.all_reasons() if "quantized::linear" in r.subject]
    assert why and all("quantized::linear is not an ATen operator" in one for one in why)
    for y in (x, torch.randn(3, 32)):
        torch.testing.assert_close(optimized(y), model(y))


def test_weights_that_were_int8_are_int8_again(cluster_of: Make) -> None:
    """torchao's weight-only modules dequantize a constant, which freezing does once."""
    rng = torch.Generator().manual_seed(0)
    model = nn.Linear(48, 16)
    levels = torch.randint(-110, 111, (16, 48), generator=rng)
    levels[:, :2] = torch.tensor([110, 1])
    model.weight.data = levels * (torch.rand(16, 1, generator=rng) + 0.1)
    config = Config(enable_int8=True, quantization_type="dynamic")
    prepared = prepare(cluster_of(model, [torch.randn(6, 48)]), config)
    [plan] = make_plans(prepared, config)
    [scheme] = plan.schemes.values()
    torch.testing.assert_close(scheme.weight.dequantize(), model.weight.data)
    assert torch.equal(scheme.weight.values, levels.to(torch.int8))


@pytest.mark.needs("torchao")
@pytest.mark.parametrize("dynamic", [False, True])
def test_what_torchao_converts_is_served(dynamic: bool) -> None:
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    x = torch.randn(6, 32)
    exported = torch.export.export(Dense().eval(), (x,)).module()
    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config(is_dynamic=dynamic))
    observed = prepare_pt2e(exported, quantizer)
    observed(x)
    model = convert_pt2e(observed)
    optimized = blade.optimize(model, x, blade.Config(enable_int8=True, timing=False))
    assert [c.backend for c in blade.report(optimized).clusters] == ["disc"]
    assert output_error(optimized(x), model(x)).relative < 1e-5


@pytest.mark.needs("torchao")
def test_weights_of_a_class_of_their_own_are_exported() -> None:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    model = Dense().eval()
    quantize_(model, Int8DynamicActivationInt8WeightConfig())
    optimized = blade.optimize(model, torch.randn(6, 32), blade.Config(timing=False))
    for rows in (1, 6, 9):
        x = torch.randn(rows, 32)
        assert output_error(optimized(x), model(x)).relative < 1e-4


def _engines(module: torch.nn.Module) -> list[Any]:
    return [child.engine for child in module.children() if hasattr(child, "engine")]


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
