# SPDX-License-Identifier: Apache-2.0
"""decision: quiet and disturbed rounds are told apart, and noise decides in no direction."""

import random
from collections.abc import Callable, Sequence

import pytest
from fake_backends import produces

from blade.config import Config
from blade.core.reason import Code
from blade.report import Report, Timing, Verdict
from blade.report.interval import speed_interval
from blade.selection.plan import select as module
from blade.selection.plan.candidate import Candidate
from blade.selection.plan.select import select
from blade.timing.decision import Outcome, Turn, compare, decide, decide_plan, is_unclear

Arm = list[Turn]


def quiet_arm(seconds: float, rounds: int, draw: random.Random, noise: float = 0.01) -> Arm:
    each = [seconds * draw.lognormvariate(0, noise) for _ in range(rounds)]
    return [Turn(s, 0.98 * s, busy=1.0) for s in each]


def stalled(turn: Turn, draw: random.Random, worst: float = 100.0) -> Turn:
    """The same work while neighbours run: most calls wait, few of them do not."""
    factor = draw.uniform(2.0, worst)
    fastest = turn.seconds * draw.uniform(0.98, 1.1)
    return Turn(turn.seconds * factor, fastest, taken=1 - 1 / factor, busy=0.4)


def timing_of(engine: Sequence[Turn], original: Sequence[Turn]) -> Timing:
    ratio = compare(engine, original)
    return Timing(
        ((2, 3),),
        1e3 * ratio.seconds * ratio.middle,
        1e3 * ratio.seconds,
        ratio.spread,
        ratio.below,
        above=ratio.above,
        rounds=ratio.rounds,
        disturbed=ratio.disturbed,
    )


def arms(speedup: float, rounds: int, draw: random.Random) -> tuple[Arm, Arm]:
    return quiet_arm(1e-3, rounds, draw), quiet_arm(speedup * 1e-3, rounds, draw)


def test_quiet_rounds_give_a_narrow_interval() -> None:
    t = timing_of(*arms(1.75, 15, random.Random(0)))
    assert t.low < 1.75 < t.high and t.high / t.low < 1.04
    assert (t.rounds, t.disturbed) == (15, 0)
    assert decide([t]).outcome is Outcome.FASTER


@pytest.mark.parametrize("arm", [0, 1])
@pytest.mark.parametrize("share", [0.2, 0.6])
def test_disturbed_rounds_are_discarded_whichever_function_they_hit(arm: int, share: float) -> None:
    draw = random.Random(arm)
    both = arms(1.75, 30, draw)
    hit = set(draw.sample(range(30), int(share * 30)))
    both[arm][:] = [stalled(t, draw) if i in hit else t for i, t in enumerate(both[arm])]
    t = timing_of(*both)
    assert t.disturbed == len(hit)
    assert t.low < 1.75 < t.high and t.high / t.low < 1.05
    assert decide([t]).serves


@pytest.mark.parametrize("speedup", [1.75, 3.0])
def test_where_all_rounds_are_disturbed_no_winner_is_dropped(speedup: float) -> None:
    for seed in range(30):
        draw = random.Random(seed)
        t = timing_of(*([stalled(t, draw) for t in arm] for arm in arms(speedup, 15, draw)))
        assert t.low <= speedup * 1.1 and t.high >= speedup * 0.9
        found = decide([t])
        assert found.serves and decide_plan([t]).serves
        if found.outcome is Outcome.UNCLEAR:
            assert "15 of 15 rounds" in found.sentence


@pytest.mark.parametrize("speedup", [0.49, 0.8])
def test_where_all_rounds_are_disturbed_no_loser_serves(speedup: float) -> None:
    for seed in range(30):
        draw = random.Random(seed)
        t = timing_of(*([stalled(t, draw) for t in arm] for arm in arms(speedup, 15, draw)))
        assert not decide([t]).serves and not decide_plan([t]).serves


def test_a_composition_of_half_the_speed_is_not_taken_for_its_noise() -> None:
    """Without neighbours that are known, too: noise of 2952 % made 0.49x no clear loss."""
    t = Timing(((1,),), 0.49, 1.0, 29.52, 29.52)
    assert not decide_plan([t]).serves
    assert decide_plan([Timing(((1,),), 0.97, 1.0, 0.05)]).serves


def test_neighbours_that_come_and_go_shift_no_median() -> None:
    """Both functions take up to three times as long for stretches of rounds, in which the loop is slow, too."""
    draw = random.Random(3)
    engine, original = arms(1.2, 40, draw)
    for i in range(40):
        slow = 1 + 2 * (i // 8 % 2)
        for arm in (engine, original):
            t = arm[i]
            slower = draw.uniform(1, slow)
            arm[i] = Turn(t.seconds * slower, t.fastest * slower, busy=1.0, slowdown=slow)
    t = timing_of(engine, original)
    assert t.disturbed == 16
    assert t.low < 1.2 < t.high and decide([t]).outcome is Outcome.FASTER


def test_a_function_that_uses_less_cpu_than_it_did_was_disturbed() -> None:
    """Where the system does not tell who waited: of two threads that spin, one had no CPU."""
    draw = random.Random(4)
    engine, original = arms(2.0, 12, draw)
    original = [
        Turn(t.seconds * 40, t.fastest * 40, busy=1.1)
        if i % 2
        else Turn(t.seconds, t.fastest, busy=1.98)
        for i, t in enumerate(original)
    ]
    t = timing_of(engine, original)
    assert t.disturbed == 6 and t.high < 2.1


def test_two_equal_functions_under_noise_have_no_clear_winner() -> None:
    wins = 0
    for seed in range(200):
        draw = random.Random(seed)
        both = arms(1.0, 15, draw)
        both = tuple([stalled(t, draw) if draw.random() < 0.3 else t for t in arm] for arm in both)
        wins += decide([timing_of(*both)]).outcome is Outcome.FASTER
    assert wins < 0.08 * 200


def test_the_interval_of_several_samples_is_narrower_than_each() -> None:
    each = [Timing(((n,),), 2.0, 1.0, 0.2, 0.1, above=0.2) for n in range(4)]
    mean, low, high = speed_interval(each)
    assert mean == pytest.approx(2.0)
    assert each[0].low < low < 2.0 < high < each[0].high
    assert not is_unclear(each)


def noisy(speedup: float) -> Timing:
    return Timing(((2, 3),), speedup, 1.0, 29.0, 29.0, above=29.0, rounds=30, disturbed=30)


def fake_measure(*speedups: float) -> Callable[..., list[Timing]]:
    return lambda modules, *_, **__: [noisy(s) for s in speedups[: len(modules)]]


@produces(Code.TOO_NOISY)
@pytest.mark.parametrize(("speedup", "backend"), [(1.75, "disc"), (0.9, None)])
def test_the_report_says_what_was_kept_where_noise_hides_the_winner(
    monkeypatch: pytest.MonkeyPatch, speedup: float, backend: str | None
) -> None:
    monkeypatch.setattr(module, "measure_all", fake_measure(speedup, 1.4))
    several = [
        Candidate(name, None, name, Verdict(1, 0, 0.0))  # type: ignore[arg-type]
        for name in (("disc", "other") if backend else ("disc",))
    ]
    decision = select("cluster_0", "original", several, [()], Config())  # type: ignore[arg-type]
    assert (decision.chosen and decision.chosen.backend) == backend
    [told] = [r for r in decision.reasons if r.code is Code.TOO_NOISY]
    assert told.backend == (None if backend else "disc")
    assert f"{speedup:.2f}x" in told.detail and "30 of 30 rounds" in told.detail
    assert ("It is kept" in told.detail) == bool(backend)


def test_reports_of_older_files_have_an_interval_too() -> None:
    t = Timing(((2, 3),), 3.0, 1.0, 0.5)
    assert (t.low, t.high) == (2.0, 4.5)
    assert Report.from_json(Report().to_json()) == Report()
