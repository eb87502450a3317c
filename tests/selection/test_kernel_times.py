# SPDX-License-Identifier: Apache-2.0
"""What a report tells of the time of eager mode and of kernels: measured, and without a trace in the module."""

from typing import Any

import pytest
import torch
from fake_backends import Fake, registered
from race import Race
from torch import nn

import blade
from blade.backends.disc.backend import DiscBackend
from blade.capture.capture import capture
from blade.config import Config
from blade.graph.torchscript.extract import extract
from blade.graph.torchscript.view import view
from blade.report import Timing
from blade.selection.kernel_times import kernel_times
from blade.selection.plan import assemble as compose
from blade.selection.plan import select

pytestmark = pytest.mark.needs("runtime", "torch_mlir")


class Counted(nn.Module):
    """Its state says how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.calls = nn.Linear(16, 32), nn.LayerNorm(32), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.norm(torch.relu(self.first(x)))


def test_kernels_are_measured_at_every_sample_and_leave_no_counts() -> None:
    samples = [torch.randn(4, 16), torch.randn(9, 16)]
    captured = capture(Counted().eval(), samples, Config())
    graph = view(captured)
    [extracted] = extract(captured, graph, [range(len(graph.nodes))])
    engine = DiscBackend().convert(extracted.cluster, Config(cache=False))
    found = kernel_times(engine, extracted.samples)
    assert {len(kernel.ms) for kernel in found} == {2}
    assert all(ms > 0 for kernel in found for ms in kernel.ms)
    told = {kernel.name.partition("_")[0]: kernel.ops.split(", ") for kernel in found}
    assert told["gemm"] == [""] and {"row sum", "rsqrt"} <= set(told["stitch"]), told
    assert engine.stats() == {"calls": 0, "engine_runs": 0, "fallbacks": 0}  # type: ignore[attr-defined]


def test_an_engine_of_a_library_has_no_kernels_to_tell() -> None:
    fake, x = Fake("fake"), torch.randn(4, 16)
    with registered(fake):
        optimized = blade.optimize(
            nn.Linear(16, 4).eval(),
            x,
            Config(optimization_pipeline="fake", timing=False, min_cluster_size=1),
        )
    assert kernel_times(optimized.cluster_0.engine, [(x,)]) == ()


def test_eager_mode_is_measured_where_the_module_is(monkeypatch: pytest.MonkeyPatch) -> None:
    race = Race({"fake": 2.0})
    monkeypatch.setattr(select, "measure_all", race.measure_each)
    monkeypatch.setattr(compose, "measure_all", race.measure_all)

    def thrice(module: Any, eager: Any, inputs: Any, rounds: int, **limits: float) -> Timing:
        torch.testing.assert_close(eager(*inputs), module(*inputs))
        return Timing(((4, 16),), original_ms=6.0, engine_ms=2.0, spread=0.0)

    monkeypatch.setattr(compose, "measure", thrice)
    model, x = Counted().eval(), torch.randn(4, 16)
    with registered(Fake("fake")):
        optimized = blade.optimize(
            model, x, Config(optimization_pipeline="fake", min_cluster_size=1)
        )
    report = blade.report(optimized)
    assert report.model == "Counted" and report.date.endswith(" UTC")
    [timing] = report.timings
    # ``engine_ms`` is the race's, the ratio to eager mode is measured
    assert timing.eager_ms == pytest.approx(3 * timing.engine_ms)
    assert "as fast as eager" in str(report)
    assert model.calls == 0
    assert blade.stats(optimized)["cluster_0"]["calls"] == 0
