# SPDX-License-Identifier: Apache-2.0
"""Quantization from end to end: what is asked for happens, what is not does not, and the report tells which."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_backends import produces
from torch import nn

import blade
from blade.backends.quant.backend import check_is_portable
from blade.config import Config
from blade.config.accuracy import output_error
from blade.core.reason import Code, Reason, Stage
from blade.errors import ConfigError, Refused
from blade.report import LayerPrecision, Report, report
from blade.report.layer_notes import (
    annotated,
    kernel_ops_of,
    precision_of,
    with_kernel_ops,
)
from blade.verification import reduced_precision as lossy

pytestmark = pytest.mark.needs("runtime", "torch_mlir")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Blows(nn.Module):
    """Its second layer reads an infinity."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.log(torch.relu(self.up(x))))


class Constant(nn.Module):
    """Its only layer reads zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.a(torch.relu(-x.square())) + x)


def samples(count: int = 4) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    return [torch.randn(8, 64, generator=rng) for _ in range(count)]


def quantized(model: nn.Module, inputs: Any, **fields: Any) -> torch.jit.ScriptModule:
    named = {"optimization_pipeline": "quant", "timing": False, **fields}
    return blade.optimize(model.eval(), inputs, blade.Config(enable_int8=True, **named))


def reasons(optimized: torch.nn.Module, code: Code) -> list[Reason]:
    return [r for r in report(optimized).all_reasons() if r.code is code]


@pytest.mark.parametrize("kind", ["auto", "static", "dynamic", "weight_only"])
def test_a_model_is_quantized_and_the_report_says_how(kind: str) -> None:
    model = Block()
    optimized = quantized(model, samples(), quantization_type=kind)
    [cluster] = report(optimized).clusters
    assert cluster.backend == "quant"
    word = {"auto": "dynamic", "weight_only": "weight-only"}.get(kind, kind)
    assert [p.precision for p in cluster.precision] == [f"int8 {word}"] * 2
    assert [p.layer for p in cluster.precision] == ["up", "down"]
    assert all(p.error is not None and 0 < p.error < 0.1 for p in cluster.precision)
    assert "2 of 2 layers quantized" in str(report(optimized))
    assert Report.from_json(report(optimized).to_json()) == report(optimized)
    for x in (samples(1)[0], torch.randn(3, 64), torch.randn(1, 64)):
        error = output_error(optimized(x), model(x))
        assert 0 < error.relative < 0.05


def test_samples_may_come_from_a_generator() -> None:
    made: list[int] = []

    def generate() -> Iterator[torch.Tensor]:
        for i, x in enumerate(samples(50)):
            made.append(i)
            yield x

    optimized = quantized(Block(), generate(), calibration_samples=6, quantization_type="static")
    assert made == list(range(6))
    [cluster] = report(optimized).clusters
    assert len(cluster.precision) == 2


@produces(Code.ACCURACY)
def test_a_budget_that_nothing_meets_leaves_the_original() -> None:
    optimized = quantized(Block(), samples(), accuracy_budget=1e-7)
    [reason] = reasons(optimized, Code.ACCURACY)
    assert reason.stage is Stage.CONVERT
    assert (
        "a relative error of at most 9.5e-08, and no layer meets it: all 2 together"
        in reason.detail
    )
    [cluster] = report(optimized).clusters
    assert cluster.backend == "torchscript"
    x = samples(1)[0]
    assert output_error(optimized(x), Block().eval()(x)).relative >= 0


def test_half_the_budget_quantizes_fewer_layers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)))
    whole = quantized(model, samples())
    error = max(output_error(whole(x), model(x)).relative for x in samples())
    counts = []
    for budget in (1.2 * error, 0.6 * error):
        [cluster] = report(quantized(model, samples(), accuracy_budget=budget)).clusters
        kept = [p for p in cluster.precision if p.precision != "fp32"]
        counts.append(len(kept))
        assert all(p.why.startswith("reverted") for p in cluster.precision if p not in kept)
    assert counts[0] == 8
    assert 0 < counts[1] < 8


def test_a_search_that_does_not_fit_into_the_time_is_not_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BLADE_BACKENDS", "disc,quant")
    model = Block().eval()
    config = blade.Config(enable_int8=True, time_budget=0.1, cache=False)
    optimized = blade.optimize(model, samples(), config)
    [reason] = [r for r in report(optimized).all_reasons() if r.backend == "quant"]
    assert reason.code is Code.TIME_BUDGET


@produces(Code.CALIBRATION)
def test_what_cannot_be_calibrated_is_left_alone() -> None:
    [reason] = reasons(quantized(Constant(), samples()), Code.CALIBRATION)
    assert "what it reads is the constant 0 in every sample" in reason.detail


def test_a_layer_that_reads_infinities_stays_float() -> None:
    [cluster] = report(quantized(Blows(), samples(), accuracy_budget=0.9)).clusters
    by_name = {p.layer: p for p in cluster.precision}
    if cluster.backend == "quant":
        assert by_name["down"].precision == "fp32"
        assert by_name["down"].why == "it reads a NaN or an infinity in at least one sample"


def test_a_saved_file_needs_nothing_of_quantization(tmp_path: Path) -> None:
    model = Block()
    optimized = quantized(model, samples())
    x = samples(1)[0]
    torch.jit.save(optimized, tmp_path / "model.pt")
    torch.save((x, optimized(x)), tmp_path / "answer.pt")
    code = (
        "import sys, torch, blade\n"
        f"model = torch.jit.load({str(tmp_path / 'model.pt')!r})\n"
        f"x, want = torch.load({str(tmp_path / 'answer.pt')!r})\n"
        "assert torch.equal(model(x), want)\n"
        "[counts] = blade.stats(model).values()\n"
        "assert counts['engine_runs'] == 1, counts\n"
        "assert not any(name.startswith('blade.backends.quant') for name in sys.modules)\n"
        "assert [p.precision for p in blade.report(model).clusters[0].precision] == ['int8 dynamic'] * 2\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_nothing_is_lost_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLADE_BACKENDS", "disc,quant")
    model = Block().eval()
    optimized = blade.optimize(model, samples(), blade.Config(timing=False))
    assert all(c.backend != "quant" and not c.precision for c in report(optimized).clusters)
    [reason] = [r for r in report(optimized).all_reasons() if r.backend == "quant"]
    assert (reason.code, reason.stage) == (Code.BACKEND_UNAVAILABLE, Stage.SUPPORT)
    assert "which Config(enable_int8=True) allows" in reason.detail
    with pytest.raises(ConfigError, match="allow that with enable_int8=True"):
        blade.optimize(model, samples(), blade.Config(optimization_pipeline="quant"))


def test_a_model_without_layers_is_refused_once() -> None:
    class Pointwise(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x).exp() + x

    [reason] = reasons(quantized(Pointwise(), samples()), Code.UNSUPPORTED_OP)
    assert "no layer to quantize" in reason.detail


def argmax_agrees(outputs: Any, labels: Any) -> float:
    right = [float((out.argmax(-1) == label).float().mean()) for out, label in zip(outputs, labels)]
    return sum(right) / len(right)


@pytest.mark.parametrize("drop", [0.0, 0.5])
def test_a_metric_bounds_what_the_whole_model_loses(drop: float) -> None:
    model = nn.Sequential(Block(), nn.Linear(64, 100)).eval()
    labelled = [(x, model(x).argmax(-1)) for x in samples(8)]
    budget = {"metric": argmax_agrees, "samples": labelled, "drop": drop}
    optimized = quantized(model, samples(), accuracy_budget=budget, optimization_pipeline="auto")
    outputs = [optimized(x) for x, _ in labelled]
    assert argmax_agrees(outputs, [label for _, label in labelled]) >= 1.0 - drop


def test_a_metric_that_nothing_keeps_leaves_the_exact_model() -> None:
    model = Block().eval()
    exact = [(x, model(x)) for x in samples()]

    def nearness(outputs: Any, labels: Any) -> float:
        return -max(output_error(a, b).relative for a, b in zip(outputs, labels))

    budget = {"metric": nearness, "samples": exact, "drop": 1e-5}
    optimized = blade.optimize(
        model,
        samples(),
        blade.Config(enable_int8=True, timing=False, accuracy_budget=budget),  # type: ignore[arg-type]
    )
    assert nearness([optimized(x) for x, _ in exact], [y for _, y in exact]) > -1e-5


def test_a_metric_returns_a_number() -> None:
    budget = {
        "metric": lambda outputs, labels: "good",
        "samples": [(samples(1)[0], 0)],
        "drop": 0.1,
    }
    with pytest.raises(ConfigError, match="return a number"):
        quantized(Block(), samples(), accuracy_budget=budget, optimization_pipeline="auto")


def test_an_engine_that_needs_torch_ao_is_refused() -> None:
    line = (
        "call quantized_decomposed::quantize_per_tensor.default 6 t:0 f:0.5 i:0 i:0 i:255 dt:u8 1 1"
    )
    check_is_portable("blade.disc 1\ncall aten::add.Tensor 3 t:0 t:1 i:1 1 2\nend\n")
    with pytest.raises(Refused, match=r"no form for quantized_decomposed::quantize_per_tensor"):
        check_is_portable(f"blade.disc 1\n{line}\nend\n")


def test_notes_travel_in_the_program() -> None:
    layers = (
        LayerPrecision("a.b", "linear", "int8 static", 0.01, 0.5),
        LayerPrecision("c", "conv", "fp32", why="no"),
    )
    program = "blade.disc 1\noutputs 0\nend\n"
    assert precision_of(annotated(program, layers)) == layers
    assert precision_of(program) == ()
    both = annotated(with_kernel_ops(program, {"loop_1": "add"}), layers)
    assert precision_of(both) == layers and kernel_ops_of(both) == {"loop_1": "add"}
    assert kernel_ops_of(annotated(program, layers)) == {}
    assert lossy.has_reduced_precision("quant", Config())
    assert not lossy.has_reduced_precision("disc", Config())
