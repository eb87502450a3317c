# SPDX-License-Identifier: Apache-2.0
"""What the report of an fp32 model says about bf16 and int8."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from race import Race

import blade
from blade.backends.disc.target.cpu import host
from blade.config import Config
from blade.report import ClusterReport, KernelTime
from blade.selection import kernel_times
from blade.selection import precision_gains as gains
from blade.selection.plan import assemble, select
from blade.selection.precision_gains import precision_gains


def served(**ms: float) -> tuple[ClusterReport, ...]:
    kernels = tuple(KernelTime(name, 1, (one,)) for name, one in ms.items())
    return (ClusterReport("cluster_0", {"aten::linear": 1}, "disc", kernels=kernels),)


@pytest.fixture
def able(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The precisions that this machine has instructions for."""
    found = {"bf16", "int8"}
    monkeypatch.setattr(gains, "_can", found.__contains__)
    return found


def test_what_products_take_becomes_shorter(able: set[str]) -> None:
    told = precision_gains(served(gemm_f32=6.0, attention_f32=2.0, loop_1=2.0), Config())
    assert "80% of the time" in told
    assert "bf16 about 1.6x as fast (Config(enable_bf16=True))" in told  # 10 / (2 + 8 / 1.8)
    assert "int8 about 2.1x as fast (Config(enable_int8=True))" in told  # 10 / (2 + 8 / 2.8)
    able.remove("bf16")
    told = precision_gains(served(gemm_f32=6.0, loop_1=2.0), Config())
    assert "bf16" not in told and "int8" in told


def test_nothing_is_told_where_nothing_gains(able: set[str]) -> None:
    assert precision_gains(served(loop_1=2.0, gemm_f32=0.1), Config()) == ""
    assert precision_gains(served(), Config()) == ""
    assert precision_gains(served(gemm_bf16=2.0), Config()) == ""
    assert precision_gains(served(gemm_f32=2.0), Config(enable_int8=True)) == ""


def without_clocks(engine: Any, inputs: Sequence[Any]) -> tuple[list[str], list[float]]:
    """The engine's instructions: products take 1 ms, the others 0.1 ms."""
    texts, _ = engine.profile(list(inputs), 1)
    return texts, [1e-3 if "gemm_f32" in text else 1e-4 for text in texts]


@pytest.mark.needs("torch_mlir", "runtime")
def test_the_report_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    race = Race({"disc": 2.0})
    monkeypatch.setattr(select, "measure_all", race.measure_each)
    monkeypatch.setattr(assemble, "measure_all", race.measure_all)
    monkeypatch.setattr(kernel_times, "profile", without_clocks)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256)]
    config = Config(optimization_pipeline="disc", time_budget=None, cache=False)
    fast = blade.optimize(torch.nn.Sequential(*layers).eval(), torch.randn(64, 256), config)
    report = blade.report(fast)
    if not any("vnni" in flag or "bf16" in flag for flag in host().isa):
        assert report.gains == ""
        return
    assert "Config.accuracy_budget" in report.gains
    assert " ".join(report.gains.split()) in " ".join(str(report).split())
    assert type(report).from_json(report.to_json()).gains == report.gains
