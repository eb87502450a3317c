# SPDX-License-Identifier: Apache-2.0
"""Calibration tells how far it is, and says what it cannot use."""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from blade.backends.quant.analysis import calibrate as module
from blade.backends.quant.analysis.calibrate import LONG, CalibrationStats, calibrate
from blade.backends.quant.analysis.layers import find_layers
from blade.core.cluster import Cluster
from blade.core.progress import Step, watched
from blade.core.reason import Code
from blade.errors import Refused

Make = Callable[..., Cluster]


@pytest.fixture
def cluster(cluster_of: Make) -> Cluster:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    return cluster_of(model, [torch.randn(4, 8)])


def calibrated(
    cluster: Cluster, samples: list[torch.Tensor], method: str = "min_max"
) -> CalibrationStats:
    return calibrate(cluster.gm, find_layers(cluster.gm), [(x,) for x in samples], method)


def drawn(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> io.StringIO:
    """What is drawn on stderr, were that a terminal, or were it not."""
    file = io.StringIO()

    def console(**options: Any) -> Console:
        assert options == {"stderr": True}
        return Console(file=file, force_terminal=terminal, width=100)

    monkeypatch.setattr(module, "Console", console)
    return file


@pytest.mark.parametrize(("method", "passes"), [("min_max", 1), ("entropy", 2)])
def test_whoever_watches_is_told_of_every_run(cluster: Cluster, method: str, passes: int) -> None:
    steps: list[Step] = []
    with watched(steps.append):
        calibrated(cluster, [torch.randn(4, 8) for _ in range(LONG)], method)
    total = passes * LONG
    assert steps == [Step("calibrate", done, total) for done in range(total + 1)]


def test_a_bar_is_drawn_on_a_terminal(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    file = drawn(monkeypatch, terminal=True)
    calibrated(cluster, [torch.randn(4, 8) for _ in range(LONG)])
    assert "calibrating" in file.getvalue()
    assert "100%" in file.getvalue()


@pytest.mark.parametrize(("terminal", "count"), [(False, LONG), (True, LONG - 1)])
def test_no_bar_elsewhere_nor_for_what_is_short(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, terminal: bool, count: int
) -> None:
    file = drawn(monkeypatch, terminal)
    seen = calibrated(cluster, [torch.randn(4, 8) for _ in range(count)])
    assert "calibrating" not in file.getvalue()
    assert seen.samples == count


def test_without_a_sample_it_says_where_to_give_some(cluster: Cluster) -> None:
    with pytest.raises(Refused, match="no sample to calibrate on: give some in `inputs`") as caught:
        calibrated(cluster, [])
    assert caught.value.code is Code.CALIBRATION


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_one_value_that_is_not_finite_speaks_against_what_reads_it(
    cluster: Cluster, bad: float
) -> None:
    spoilt = torch.randn(4, 8)
    spoilt[2, 3] = bad
    seen = calibrated(cluster, [torch.randn(4, 8), spoilt, torch.randn(4, 8)])
    first = find_layers(cluster.gm)[0].x.name
    assert seen.against[first] == "it reads a NaN or an infinity in at least one sample"
    assert first not in seen.ranges


@pytest.mark.parametrize("method", ["min_max", "moving_average", "entropy", "percentile"])
def test_constants_and_empty_tensors_have_no_range(cluster: Cluster, method: str) -> None:
    first = find_layers(cluster.gm)[0].x.name
    constant = calibrated(cluster, [torch.full((4, 8), 0.5)] * 3, method)
    assert constant.against[first] == "what it reads is the constant 0.5 in every sample"
    empty = calibrated(cluster, [torch.empty(0, 8)], method)
    assert empty.against[first] == "it reads a tensor without elements in every sample"
