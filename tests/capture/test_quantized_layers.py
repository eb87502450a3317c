# SPDX-License-Identifier: Apache-2.0
"""Layers of GPTQ, AWQ and torchao: read exactly, and multiplied as the integers that they are."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import blade
from blade.capture.checkpoint_formats import weight_of
from blade.capture.quantized_layers import QuantizedLinear, read_quantized_layers
from blade.config import Config
from blade.report import engines_of

DISC = Config(optimization_pipeline="disc", timing=False, min_cluster_size=1)
IN, OUT, SIZE = 64, 48, 16


class Packed(nn.Module):
    """A layer as a checkpoint has it; ``reference`` [out, in] is the weight that was packed."""

    def __init__(self, reference: torch.Tensor, **held: Any) -> None:
        super().__init__()
        self.in_features, self.out_features = reference.shape[1], reference.shape[0]
        for name, value in held.items():
            if isinstance(value, torch.Tensor):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)
        self.reference = reference
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = getattr(self, "bias", None)
        bias = None if bias is None else bias.to(x.dtype)
        return nn.functional.linear(x, self.reference.to(x.dtype), bias)


def _packed_along(numbers: list[list[int]], bits: int) -> list[list[int]]:
    """Each 32 / bits numbers of a row as one signed word, the first in the lowest bits."""
    per = 32 // bits
    words = []
    for row in numbers:
        made = []
        for start in range(0, len(row), per):
            word = sum(n << (bits * k) for k, n in enumerate(row[start : start + per]))
            made.append(word - 2**32 if word >= 2**31 else word)
        words.append(made)
    return words


def _random(bits: int, order: list[int] | None = None) -> tuple[Any, Any, Any, Any]:
    """Integers [in, out], zero points and scales [groups, out], and the weight [out, in] that they are."""
    draw = torch.Generator().manual_seed(bits)
    q = torch.randint(0, 2**bits, (IN, OUT), generator=draw).tolist()
    z = torch.randint(1, 2**bits, (IN // SIZE, OUT), generator=draw).tolist()
    s = (torch.rand(IN // SIZE, OUT, generator=draw) + 0.1).half()
    group = [(order[i] if order else i) // SIZE for i in range(IN)]
    w = torch.zeros(OUT, IN)
    for i in range(IN):
        for o in range(OUT):
            w[o, i] = (q[i][o] - z[group[i]][o]) * float(s[group[i]][o])
    return q, z, s, w


def _gptq(bits: int, version: int = 1, order: list[int] | None = None, bias: bool = True) -> Packed:
    q, z, s, w = _random(bits, order)
    columns = [list(c) for c in zip(*q)]
    words = _packed_along(columns, bits)  # [out][words of in]
    stored = [[n - (1 if version == 1 else 0) for n in row] for row in z]
    held: dict[str, Any] = {
        "qweight": torch.tensor(words, dtype=torch.int32).T.contiguous(),
        "qzeros": torch.tensor(_packed_along(stored, bits), dtype=torch.int32),
        "scales": s,
        "bits": bits,
        "group_size": SIZE,
    }
    held["g_idx"] = torch.tensor(
        [(order[i] if order else i) // SIZE for i in range(IN)], dtype=torch.int32
    )
    if version == 2:
        held["qzero_format"] = lambda: 2
    if bias:
        held["bias"] = torch.linspace(-1, 1, OUT)
    return Packed(w, **held)


def _awq() -> Packed:
    q, z, s, w = _random(4)

    def interleaved(rows: list[list[int]]) -> list[list[int]]:
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        return [[row[8 * (k // 8) + order[k % 8]] for k in range(len(row))] for row in rows]

    held: dict[str, Any] = {
        "qweight": torch.tensor(_packed_along(interleaved(q), 4), dtype=torch.int32),
        "qzeros": torch.tensor(_packed_along(interleaved(z), 4), dtype=torch.int32),
        "scales": s,
        "w_bit": 4,
        "group_size": SIZE,
    }
    return Packed(w, **held)


def _program(optimized: Any) -> str:
    return "\n".join(engine.program() for _, engine in engines_of(optimized))


def _shuffled() -> list[int]:
    return torch.randperm(IN, generator=torch.Generator().manual_seed(7)).tolist()  # type: ignore[no-any-return]


LAYERS: dict[str, Callable[[], Packed]] = {
    "gptq-2": lambda: _gptq(2),
    "gptq-4": lambda: _gptq(4),
    "gptq-8": lambda: _gptq(8, bias=False),
    "gptq-v2": lambda: _gptq(4, version=2),
    "gptq-act-order": lambda: _gptq(4, order=_shuffled()),
    "awq": _awq,
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_weight_is_the_one_that_was_packed(name: str) -> None:
    layer = LAYERS[name]()
    found = weight_of(layer)
    assert found is not None and found.values.dtype == torch.int8
    scripted = torch.jit.script(QuantizedLinear(found, None))
    x = torch.randn(2, IN)
    torch.testing.assert_close(scripted(x), x @ layer.reference.T, rtol=1e-5, atol=1e-3)
    assert (found.order is not None) == ("order" in name)
    assert torch.equal(found.dequantize(), layer.reference)


@pytest.mark.parametrize("name", ["gptq-4", "gptq-8", "gptq-act-order", "awq"])
def test_an_engine_multiplies_the_integers(name: str) -> None:
    layer = LAYERS[name]()
    model = nn.Sequential(layer, nn.ReLU(), nn.Linear(OUT, 8)).eval()
    x = torch.randn(5, IN)
    optimized = blade.optimize(model, x, DISC)
    with torch.no_grad():
        torch.testing.assert_close(optimized(x), model(x), rtol=1e-4, atol=1e-4)
        y = torch.randn(3, IN)
        torch.testing.assert_close(optimized(y), model(y), rtol=1e-4, atol=1e-4)
    assert blade.stats(optimized)["cluster_0"]["fallbacks"] == 0
    bits = 8 if name == "gptq-8" else 4
    assert f"widen{bits}_gemm" in _program(optimized)
    floats = [b.numel() for b in optimized.buffers() if b.is_floating_point()]
    assert max(floats) < IN * OUT  # neither the engine nor its fallback holds the weight in floats
    assert isinstance(model[0], Packed)


def test_what_is_not_known_stays_with_a_reason() -> None:
    three = _gptq(4)
    three.bits = 3
    ragged = _gptq(4)
    ragged.g_idx = torch.zeros(IN, dtype=torch.int32)
    other = _gptq(4)
    other.reference = other.reference + 1
    model = nn.ModuleDict({"three": three, "ragged": ragged, "other": other, "good": _awq()}).eval()
    reasons = read_quantized_layers(model)
    assert [r.subject for r in reasons] == ["three", "ragged", "other"]
    assert "relative difference" in reasons[2].detail and "not known" in reasons[0].detail
    assert isinstance(model["good"], QuantizedLinear) and model["three"] is three


@torch.no_grad()
def test_beside_halves_the_report_tells_that_weights_are_dequantized() -> None:
    model = nn.Sequential(_awq(), nn.Linear(OUT, 8)).eval().bfloat16()
    x = torch.randn(3, IN, dtype=torch.bfloat16)
    optimized = blade.optimize(model, x, DISC)
    torch.testing.assert_close(optimized(x), model(x), rtol=5e-2, atol=5e-2)
    [why] = [r for r in blade.report(optimized).reasons if "in integers" in r.detail]
    assert "torch.bfloat16" in why.detail


AO_CONFIGS = {
    "int8": lambda ao: ao.Int8WeightOnlyConfig(),
    "intx-4": lambda ao: ao.IntxWeightOnlyConfig(
        weight_dtype=torch.int4, granularity=ao.PerGroup(16)
    ),
    "intx-4-asymmetric": lambda ao: ao.IntxWeightOnlyConfig(
        weight_dtype=torch.int4,
        granularity=ao.PerGroup(16),
        mapping_type=ao.MappingType.ASYMMETRIC,
    ),
}


@pytest.mark.parametrize("name", AO_CONFIGS)
@torch.no_grad()
def test_weights_of_torchao(name: str) -> None:
    pytest.importorskip("torchao")
    import torchao.quantization as ao

    model = nn.Sequential(nn.Linear(IN, OUT), nn.ReLU(), nn.Linear(OUT, 32)).eval()
    ao.quantize_(model, AO_CONFIGS[name](ao))
    first = model[0].weight
    found = weight_of(model[0])
    assert found is not None
    torch.testing.assert_close(found.dequantize(), first.dequantize(), rtol=1e-6, atol=1e-6)
    x = torch.randn(5, IN)
    optimized = blade.optimize(model, x, DISC)
    torch.testing.assert_close(optimized(x), model(x), rtol=1e-4, atol=1e-5)
    bits = 8 if name == "int8" else 4
    assert f"widen{bits}_gemm" in _program(optimized)
    fast = blade.accelerate(model, x, DISC)
    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
    assert blade.stats(fast)["original"]["calls"] == 0 and type(model[0].weight) is type(first)


@torch.no_grad()
def test_weights_of_torchao_for_torchs_int4_product() -> None:
    opaque = pytest.importorskip("torchao.prototype.quantization.int4.int4_opaque_tensor")
    model = nn.Sequential(nn.Linear(128, 64), nn.ReLU()).eval()
    weight = opaque.Int4OpaqueTensor.from_hp(model[0].weight.detach(), [1, 32])
    model[0].weight = nn.Parameter(weight, requires_grad=False)
    x = torch.randn(5, 128)
    found = weight_of(model[0])
    assert found is not None and found.values.min() == -8 and found.values.max() == 7
    optimized = blade.optimize(model, x, DISC)
    torch.testing.assert_close(optimized(x), model(x), rtol=1e-4, atol=1e-4)
    assert "widen4_gemm" in _program(optimized)
