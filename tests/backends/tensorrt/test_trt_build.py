# SPDX-License-Identifier: Apache-2.0
"""Engines really built, by TensorRT-RTX, which needs no GPU for that (and none of its plans can be run here)."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # registers quantized_decomposed
from trt_clusters import Mlp, Plain, cluster_of

from blade.backends.tensorrt import build, library
from blade.backends.tensorrt.backend import TensorRTBackend
from blade.backends.tensorrt.build import BuiltEngine, build_engine
from blade.backends.tensorrt.payload import from_bytes
from blade.config import Config
from blade.core.reason import Code
from blade.errors import BladeWarning, Refused
from blade.fallback.isolated_convert import convert_isolated

pytestmark = pytest.mark.needs("tensorrt_rtx", "runtime")
UNCACHED = Config(cache=False)


@pytest.fixture(scope="module")
def mlp() -> BuiltEngine:
    return build_engine(cluster_of(Mlp(), torch.randn(8, 64)), UNCACHED)


def test_a_plan_is_built_for_the_inputs_and_outputs_of_the_cluster(mlp: BuiltEngine) -> None:
    assert mlp.head.library == library.find_library().stamp
    assert [(t.name, t.dtype, t.rank) for t in mlp.head.inputs] == [("x0", "FLOAT", 2)]
    assert [(t.name, t.dtype, t.rank) for t in mlp.head.outputs] == [("y0", "FLOAT", 2)]
    assert b"x0" in mlp.plan and b"y0" in mlp.plan  # what the engine calls them
    assert "const_0" not in mlp.head.weights  # not to be left out without a device: all in the plan
    weights = 4 * (64 * 128 + 128 * 32)
    assert len(mlp.plan) > weights
    assert from_bytes(mlp.payload(), len(mlp.constants)).plan == mlp.plan


def test_by_default_sizes_from_one_to_twice_the_largest_seen(mlp: BuiltEngine) -> None:
    [profile] = mlp.head.profiles
    assert profile.opt == ((8, 64),)
    assert profile.min == ((1, 64),) and profile.max == ((32, 64),)  # 11 was probed
    assert "size 0 of input 0 is at most 32" in mlp.program


def test_the_network_says_what_the_profiles_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked of TensorRT's own objects, just before it builds."""
    seen: dict[str, Any] = {}
    trt = library.find_library().trt
    original = trt.Builder.build_serialized_network

    def watched(builder: Any, network: Any, settings: Any) -> Any:
        inputs = [network.get_input(i) for i in range(network.num_inputs)]
        seen["inputs"] = {t.name: tuple(t.shape) for t in inputs}
        seen["outputs"] = [network.get_output(i).name for i in range(network.num_outputs)]
        seen["profiles"] = settings.num_optimization_profiles
        seen["tf32"] = settings.get_flag(trt.BuilderFlag.TF32)
        seen["nans"] = settings.get_flag(trt.BuilderFlag.STRICT_NANS)
        return original(builder, network, settings)

    monkeypatch.setattr(trt.Builder, "build_serialized_network", watched)
    samples = [(torch.randn(n, 64),) for n in (4, 16, 4)]
    built = build_engine(cluster_of(Mlp(), samples), UNCACHED)
    assert seen["inputs"]["x0"][0] == -1 and seen["outputs"] == ["y0"]
    assert seen["profiles"] == len(built.head.profiles) == 2  # one per distinct sample
    assert (seen["tf32"], seen["nans"]) == (False, True)


def test_a_second_build_comes_from_the_cache(
    cluster_cache: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Mlp()
    first = build_engine(cluster_of(model, torch.randn(8, 64)), Config())

    def fail(*anything: Any) -> None:
        raise AssertionError("built again")

    monkeypatch.setattr(build._BuildJob, "_build", fail)
    again = build_engine(cluster_of(model, torch.randn(8, 64)), Config())
    assert again == first
    with torch.no_grad():
        model.first.weight[0, 0] += 1
    with pytest.raises(AssertionError, match="built again"):
        build_engine(cluster_of(model, torch.randn(8, 64)), Config())


def test_half_precision_is_in_the_graph() -> None:
    """A plan with 16-bit weights is half as large; they are what most of it is."""
    model = torch.nn.Sequential(
        torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512)
    )
    cluster = cluster_of(model, torch.randn(8, 512))
    full = build_engine(cluster, UNCACHED)
    half = build_engine(cluster, Config(cache=False, enable_fp16=True))
    assert len(half.plan) < 0.7 * len(full.plan)
    assert [t.dtype for t in half.head.outputs] == ["FLOAT"]
    assert half.program == full.program


CONVS = torch.nn.Sequential(
    torch.nn.Conv2d(3, 16, 3, padding=1),
    torch.nn.BatchNorm2d(16),
    torch.nn.ReLU(),
    torch.nn.MaxPool2d(2),
    torch.nn.Conv2d(16, 8, 3, stride=2),
    torch.nn.AdaptiveAvgPool2d(1),
    torch.nn.Flatten(),
)


class Quantized(torch.nn.Module):
    """A linear layer with explicit quantization of its input and of its weight, as PT2E writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(512, 512))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ops = torch.ops.quantized_decomposed
        form = 0, -128, 127, torch.int8
        x = ops.dequantize_per_tensor(ops.quantize_per_tensor(x, 0.05, *form), 0.05, *form)
        w = ops.quantize_per_tensor(self.weight, 0.03, *form)
        return torch.nn.functional.linear(x, ops.dequantize_per_tensor(w, 0.03, *form)).relu()


def windows(x: torch.Tensor) -> torch.Tensor:
    """Exists for multiples of 7 only."""
    return x.reshape(x.shape[0] // 7, 7, 8).softmax(1).transpose(0, 1) + 1


@pytest.mark.parametrize(
    ("model", "sample", "low", "high"),
    [
        (CONVS, torch.randn(2, 3, 32, 32), None, None),
        (Quantized(), torch.randn(4, 512), None, None),
        (Plain(windows), torch.randn(21, 8), 7, 42),
        (torch.nn.GRU(8, 16, batch_first=True), torch.randn(2, 5, 8), None, None),
    ],
    ids=["convolutions", "int8", "windows", "recurrent"],
)
def test_models_of_other_kinds(
    model: torch.nn.Module, sample: torch.Tensor, low: int | None, high: int | None
) -> None:
    built = build_engine(cluster_of(model, sample), UNCACHED)
    assert built.plan
    if low is not None and high is not None:
        [profile] = built.head.profiles
        assert profile.min[0][0] % 7 == 0 and profile.max[0][0] % 7 == 0


@pytest.mark.needs("minilm")
def test_the_real_minilm(
    minilm: torch.nn.Module, minilm_inputs: Callable[..., dict[str, torch.Tensor]]
) -> None:
    config = Config(
        cache=False, dynamic_shapes={name: {0: (1, 8), 1: (4, 64)} for name in minilm_inputs(2, 16)}
    )
    cluster = cluster_of(minilm, minilm_inputs(2, 16), config)
    built = build_engine(cluster, config)
    weights = sum(p.numel() * 4 for n, p in minilm.named_parameters() if "pooler" not in n)
    assert len(built.plan) > 0.9 * weights
    assert {p.max for p in built.head.profiles} == {tuple((8, 64) for _ in built.head.inputs)}


def test_a_type_that_tensorrt_has_not_is_refused() -> None:
    with pytest.raises(Refused, match="float64") as refused:
        build_engine(cluster_of(Mlp().double(), torch.randn(8, 64).double()), UNCACHED)
    assert refused.value.code == Code.UNSUPPORTED_DTYPE


def test_an_op_that_the_parser_does_not_take_is_refused_by_name() -> None:
    model = Plain(lambda x: (x @ x.mT).det().exp() + 1)
    with pytest.raises(Refused, match=r"tensorrt_rtx .* does not take it: .*Det") as refused:
        build_engine(cluster_of(model, torch.randn(3, 4, 4)), UNCACHED)
    assert refused.value.code == Code.UNSUPPORTED_OP


def test_conversion_in_a_process_apart_and_load_time_fallback_here() -> None:
    """The engine of a machine without a GPU: built, carried over, not loadable, and it says why."""
    cluster = cluster_of(Mlp(), torch.randn(8, 64))
    engine: Any = convert_isolated(TensorRTBackend(), cluster, Config(cache=False))
    with pytest.warns(BladeWarning, match="the original runs"):
        assert engine.try_execute([torch.randn(8, 64)]) is None
    assert engine.stats() == {
        "calls": 1,
        "engine_runs": 0,
        "fallbacks": 1,
        "backend_unavailable": 1,
    }
    assert "TensorRT engines run on CUDA devices" in engine.why_unavailable()
    outside = engine.try_execute([torch.randn(64, 64)])
    assert outside is None
