# SPDX-License-Identifier: Apache-2.0
"""A cluster quantized as for a GPU, compiled, and run in the interpreter: what its plans promise is what it answers."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from run_program import compile_to_program
from torch import nn
from torch.nn import functional

from blade.backends.disc.frontend.lower import lower
from blade.backends.disc.gpu.passes.pipeline import FORMS as DISC_FORMS
from blade.backends.quant import quantize as quantizing
from blade.backends.quant.device_dtypes import EIGHT_BIT_DTYPES
from blade.backends.quant.prepare import prepare
from blade.backends.quant.search.cpu_plans import QuantPlan
from blade.backends.quant.search.gpu_plans import make_gpu_plans
from blade.backends.quant.transforms.insert_qdq import insert_qdq
from blade.capture.capture import capture
from blade.config import Config
from blade.config.accuracy import output_error
from blade.core.cluster import Cluster
from blade.errors import Refused
from blade.graph.torchscript.extract import extract
from blade.graph.torchscript.view import view

pytestmark = pytest.mark.needs("triton_interpreter")
F16, F32 = torch.float16, torch.float32


class Mlp(nn.Module):
    """``odd``: has a number of columns that no product of 8 bits takes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 96), nn.Linear(96, 64)
        self.odd = nn.Linear(64, 10, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(functional.gelu(self.up(self.norm(x))))
        y: torch.Tensor = self.odd(x)
        return y


def cluster_of(dtype: torch.dtype) -> Cluster:
    torch.manual_seed(0)
    samples = [torch.randn(n, 5, 64).to(dtype) for n in (2, 3)]
    captured = capture(Mlp().to(dtype).eval(), samples, Config(enable_fp8=True))
    graph = view(captured)
    [extracted] = extract(captured, graph, [range(len(graph.nodes))])
    return extracted.cluster


def plans_of(cluster: Cluster, **fields: object) -> dict[str, QuantPlan]:
    config = Config(enable_fp8=True, enable_int8=True, **fields)
    return {
        plan.name: plan
        for plan in make_gpu_plans(prepare(cluster, config, True), config, EIGHT_BIT_DTYPES)
    }


def by_title(plan: QuantPlan, cluster: Cluster) -> Mapping[str, str]:
    layers = prepare(cluster, Config(enable_fp8=True), True).layers
    return {
        layer.title: plan.schemes[layer.name].precision if layer.name in plan.schemes else ""
        for layer in layers
    }


def test_what_is_proposed() -> None:
    cluster = cluster_of(F16)
    plans = plans_of(cluster)
    assert list(plans) == [
        f"{form} {kind}" for form in EIGHT_BIT_DTYPES for kind in ("mixed", "dynamic", "static")
    ]
    assert by_title(plans["fp8 mixed"], cluster) == {
        "up": "fp8 dynamic",  # a norm makes what it reads
        "down": "fp8 static",
        "odd": "",
    }
    assert set(by_title(plans["int8 dynamic"], cluster).values()) == {"int8 dynamic", ""}
    [why] = plans["int8 static"].against.values()
    assert why == "its weight is 10 x 64, and products of 8 bits take multiples of 16"
    only = plans_of(cluster, quantization_type="static")
    assert list(only) == ["fp8 static", "int8 static"]


@pytest.mark.parametrize(
    "name", ["fp8 dynamic", "fp8 mixed", "fp8 static", "int8 dynamic", "int8 static"]
)
@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
def test_a_program_answers_as_the_simulation_says(name: str, dtype: torch.dtype) -> None:
    cluster = cluster_of(dtype)
    config = Config(enable_fp8=True, enable_int8=True)
    prepared = prepare(cluster, config, True)
    [plan] = [p for p in make_gpu_plans(prepared, config, EIGHT_BIT_DTYPES) if p.name == name]
    moved = replace(cluster, gm=prepared.gm)  # of float32, scales may have been
    quantized = insert_qdq(moved, prepared.layers, plan.schemes)
    program = compile_to_program(lower(quantized.gm, quantized.shape_env, forms=DISC_FORMS))
    narrow = "f8" if name.startswith("fp8") else "i8"
    slots = [line.split() for line in program.text.splitlines() if line.startswith("slot ")]
    assert sum(words[2:4] == ["arena", narrow] for words in slots) == 2  # what both layers read
    for (x,), want in zip(cluster.samples, prepared.simulation.wanted, strict=True):
        [got] = program(x)
        [simulated] = prepared.simulation.run((x,), plan.schemes)
        assert output_error(got, simulated).relative < 0.01
        assert 1e-4 < output_error(got, want[0]).relative < 0.08


def test_layers_that_differ_in_their_weights_and_scales_alone_share_their_code() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x)) * 2
            return x

    captured = capture(Two().half().eval(), [torch.randn(2, 5, 64).half()], Config(enable_fp8=True))
    [extracted] = extract(captured, graph := view(captured), [range(len(graph.nodes))])
    config = Config(enable_fp8=True, quantization_type="static")
    prepared = prepare(extracted.cluster, config, True)
    [plan] = make_gpu_plans(prepared, config, {"fp8": torch.float8_e4m3fn})
    assert len({s.activation for s in plan.schemes.values()}) == 4
    quantized = insert_qdq(extracted.cluster, prepared.layers, plan.schemes)
    program = compile_to_program(lower(quantized.gm, quantized.shape_env, forms=DISC_FORMS))
    launched = [word for word in program.text.split() if word.startswith("linear_")]
    one = len(launched) // 4  # for each range of rows
    first, second, third, last = (launched[k * one : (k + 1) * one] for k in range(4))
    assert one > 1 and first == second == third != last  # which quantizes nothing


@pytest.mark.parametrize("budget", [0.2, 0.0085])
def test_a_cluster_on_a_gpu_is_quantized_as_far_as_the_budget_goes(
    monkeypatch: pytest.MonkeyPatch, budget: float
) -> None:
    """All but the device: what is compiled is one plan's program, and every layer is accounted for."""
    monkeypatch.setattr(quantizing, "device_of", lambda _: torch.device("cuda"))
    monkeypatch.setattr(quantizing, "device_dtypes", lambda *_: {"fp8": torch.float8_e4m3fn})
    cluster = cluster_of(F16)
    config = Config(enable_fp8=True, timing=False, accuracy_budget=budget)
    gm, layers = quantizing.quantize(cluster, config, lambda quantized: quantized.gm)
    said = {layer.layer: layer for layer in layers}
    assert list(said) == ["up", "down", "odd"] and said["odd"].precision == "fp16"
    assert "multiples of 16" in said["odd"].why and said["up"].error is not None
    count = sum("dequantize_channels" in str(node.target) for node in gm.graph.nodes)
    assert count == sum(layer.precision.startswith("fp8") for layer in layers)
    assert count == (2 if budget == 0.2 else 1)
    reverted = [layer.layer for layer in layers if "does not hold" in layer.why]
    errors = {name: said[name].error or 0 for name in ("up", "down")}
    assert reverted == ([] if count == 2 else [max(errors, key=lambda name: errors[name])])
    with pytest.raises(Refused, match="weight_only"):
        only = config.evolve(quantization_type="weight_only")
        quantizing.quantize(cluster, only, lambda quantized: quantized.gm)
