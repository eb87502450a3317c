# SPDX-License-Identifier: Apache-2.0
"""select: which candidate serves, and why the others do not."""

import math
import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from fake_clock import Clock

from blade.config import Config
from blade.core.reason import Code, Stage
from blade.report import Timing, Verdict
from blade.selection.plan import select as module
from blade.selection.plan.candidate import Candidate
from blade.selection.plan.select import select
from blade.timing.decision import MIN_ROUNDS
from blade.timing.interleaved import EARLY_EXIT_S, measure_all
from blade.timing.time_budget import UNLIMITED, TimeBudget

X = (torch.ones(2, 3),)


def timing(speedup: float, spread: float = 0.0) -> Timing:
    return Timing(((2, 3),), speedup, 1.0, spread)


def candidate(backend: str, fn: Any) -> Candidate:
    return Candidate(backend, None, fn, Verdict(1, 0, 0.0))  # type: ignore[arg-type]


def test_the_fastest_is_chosen_and_the_others_get_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = {"original": 1.0, "slow": 1.25, "good": 0.5, "best": 0.25}

    def fake(engines: list[str], *_: Any, **given: Any) -> list[Timing]:
        return [Timing(((2, 3),), times["original"], times[engine], 0.0) for engine in engines]

    monkeypatch.setattr(module, "measure_all", fake)
    several = [candidate(name, name) for name in ("slow", "good", "best")]
    decision = select("cluster_0", "original", several, [X], Config())  # type: ignore[arg-type]
    assert decision.chosen is not None
    assert decision.chosen.backend == "best"
    assert decision.chosen.timings[0].speedup == 4
    reasons = {r.backend: r for r in decision.reasons}
    assert set(reasons) == {"slow", "good"}
    assert all(r.stage is Stage.SELECT for r in decision.reasons)
    assert (reasons["slow"].code, reasons["good"].code) == (Code.SLOWER, Code.NOT_FASTEST)
    assert reasons["good"].detail == "it is 2.00x the original's speed, best is 4.00x."


def test_without_timing_the_first_is_taken_unmeasured() -> None:
    several = [candidate("a", None), candidate("b", None)]
    decision = select("cluster_0", None, several, [X], Config(timing=False))  # type: ignore[arg-type]
    assert decision.chosen is several[0]
    assert select("cluster_0", None, [], [X], Config(timing=False)).chosen is None  # type: ignore[arg-type]


def test_a_toss_up_goes_to_the_first_whatever_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, where ratios vary by a half, the last of three equal ones is no winner by luck."""
    draw = random.Random(1)
    clock = Clock()

    def noisy(*inputs: torch.Tensor) -> None:
        clock.now += 0.01 * draw.lognormvariate(0, 0.3)

    monkeypatch.setattr(module, "measure_all", partial(measure_all, clock=clock))
    several = [candidate(name, noisy) for name in ("first", "second", "third")]
    chosen = []
    for _ in range(40):
        decision = select("c", clock.costs(0.05), several, [X], Config())  # type: ignore[arg-type]
        assert decision.chosen is not None
        chosen.append(decision.chosen.backend)
    assert chosen.count("first") >= 32


def test_what_has_timings_is_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(engines: list[str], *_: Any, **given: Any) -> list[Timing]:
        assert engines == ["new"]
        return [timing(3.0)]

    monkeypatch.setattr(module, "measure_all", fake)
    lost = replace(candidate("lost", "lost"), timings=(timing(0.5),)).released()
    known = replace(candidate("known", "known"), timings=(timing(2.0),))
    decision = select("c", "o", [lost, known, candidate("new", "new")], [X], Config())  # type: ignore[arg-type]
    assert decision.chosen is not None
    assert decision.chosen.backend == "new"
    assert [one.backend for one in decision.tried] == ["lost", "known", "new"]
    assert [one.backend for one in decision.winners] == ["known", "new"]


def test_one_that_raises_costs_the_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(engines: list[str], *_: Any, **given: Any) -> list[Timing]:
        if "bad" in engines:
            raise RuntimeError("no")
        return [timing(2.0) for _ in engines]

    monkeypatch.setattr(module, "measure_all", fake)
    several = [candidate("bad", "bad"), candidate("good", "good")]
    decision = select("c", "o", several, [X], Config())  # type: ignore[arg-type]
    assert decision.chosen is not None
    assert decision.chosen.backend == "good"
    [reason] = decision.reasons
    assert (reason.backend, reason.code) == ("bad", Code.ENGINE_RAISED)


def test_out_of_time_the_first_is_measured_in_few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def fake(engines: list[str], *given: Any, early_exit_s: float) -> list[Timing]:
        seen.append((engines, given[-1], early_exit_s))
        return [timing(2.0) for _ in engines]

    monkeypatch.setattr(module, "measure_all", fake)
    several = [candidate("first", "first"), candidate("second", "second")]
    config = Config()
    for budget in (UNLIMITED, TimeBudget(0.0)):
        select("c", "o", several, [X], config, budget=budget)  # type: ignore[arg-type]
    assert seen == [
        (["first", "second"], config.timing_repeats, math.inf),
        (["first"], MIN_ROUNDS, EARLY_EXIT_S),
    ]
