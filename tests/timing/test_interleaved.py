# SPDX-License-Identifier: Apache-2.0
"""interleaved: what is measured, for how long, and what counts as a win, with a clock that is ours."""

import random
from collections.abc import Callable

import pytest
import torch
from fake_clock import Clock

from blade.report import Timing
from blade.timing.decision import MIN_ROUNDS, interval, why_slower
from blade.timing.interleaved import FEW_ROUNDS, measure, measure_all
from blade.timing.neighbours import Mark

X = (torch.ones(2, 3),)


def timing(speedup: float, spread: float = 0.0) -> Timing:
    return Timing(((2, 3),), speedup, 1.0, spread)


def test_measure_gives_medians_and_no_spread_for_steady_functions() -> None:
    clock = Clock()
    t = measure(clock.costs(0.010), clock.costs(0.030), X, 15, clock)
    assert t.shapes == ((2, 3),)
    assert t.engine_ms == pytest.approx(10)
    assert t.original_ms == pytest.approx(30)
    assert t.speedup == pytest.approx(3)
    assert t.spread == pytest.approx(0, abs=1e-9)


def test_measure_is_not_fooled_by_an_outlier_and_tells_noise() -> None:
    clock = Clock()
    steady = measure(clock.costs(*[0.01] * 12, 1.0), clock.costs(0.02), X, 13, clock)
    assert steady.speedup == pytest.approx(2)
    noisy = measure(clock.costs(0.008, 0.012, 0.01, 0.011), clock.costs(0.02), X, 15, clock)
    assert noisy.spread > 0.05


def test_after_the_early_exit_a_clear_win_needs_one_round_and_no_other_result_does() -> None:
    slow = 1.0
    for engine, rounds in ((0.25, 1), (1.25, MIN_ROUNDS)):
        clock = Clock()
        t = measure(clock.costs(engine), clock.costs(slow), X, 15, clock, early_exit_s=0.5)
        assert t.speedup == pytest.approx(slow / engine)
        assert clock.now == pytest.approx(
            (slow + engine) * (1 + rounds)
        )  # one call each to warm up


def test_with_no_time_to_warm_up_a_round_begins_at_once() -> None:
    clock = Clock()
    t = measure(clock.costs(0.3), clock.costs(0.5), X, 1, clock, early_exit_s=0.0)
    assert t.speedup == pytest.approx(0.5 / 0.3) and t.rounds == 1
    assert clock.now == pytest.approx(0.8)
    lost = measure(clock.costs(0.5), clock.costs(0.3), X, 1, clock, early_exit_s=0.0)
    assert lost.speedup == pytest.approx(0.6) and lost.rounds == 1


@pytest.mark.parametrize(("fast", "rounds"), [(0.001, MIN_ROUNDS), (0.009, 15)])
def test_what_is_many_times_its_noise_needs_few_rounds(fast: float, rounds: int) -> None:
    clock = Clock()
    calls: list[float] = []
    original = clock.costs(0.010, 0.013, 0.011, 0.012, 0.010, 0.013, 0.011)

    def counted(*inputs: torch.Tensor) -> None:
        calls.append(clock.now)
        original()

    measure(clock.costs(fast), counted, X, 15, clock)
    assert len(calls) == 4 + 3 * rounds  # those that warm it up; two of a turn are not timed


@pytest.mark.parametrize(("original", "rounds"), [(0.015, MIN_ROUNDS), (0.012, 15)])
def test_a_win_that_is_sure_in_every_round_needs_no_narrow_interval(
    original: float, rounds: int
) -> None:
    clock = Clock()
    varies = (original, 1.5 * original, original, 1.2 * original, 1.5 * original)
    t = measure(clock.costs(0.010), clock.costs(*varies), X, 15, clock)
    assert t.spread > 0.1
    assert t.rounds == rounds


@pytest.mark.parametrize(("original", "rounds"), [(2.0, FEW_ROUNDS), (1.2, MIN_ROUNDS)])
def test_where_rounds_are_longer_than_the_budget_two_show_a_sure_win(
    original: float, rounds: int
) -> None:
    clock = Clock()
    t = measure(clock.costs(1.0), clock.costs(original), X, 15, clock)
    assert t.speedup == pytest.approx(original)
    assert t.rounds == rounds


def test_of_two_long_candidates_no_win_is_known_early() -> None:
    """Which of them is the faster one is not known from few rounds."""
    clock = Clock()
    engines = [clock.costs(1.0), clock.costs(1.1)]
    found = measure_all(engines, clock.costs(3.0), [X] * 3, 15, clock)
    assert [t.rounds for t in found] == [MIN_ROUNDS, MIN_ROUNDS]


def test_after_the_early_exit_two_disturbed_rounds_show_a_sure_win() -> None:
    class Disturbed:
        def mark(self) -> Mark:
            return Mark(0.0, 0.0, 0.0, {})

        def since(self, mark: Mark) -> tuple[float, float]:
            return 0.5, 1.0

        def slowdown(self) -> float:
            return 1.0

    clock = Clock()
    engine, original = clock.costs(0.1), clock.costs(0.2)
    t = measure(engine, original, X, 15, clock, early_exit_s=0.5, machine=Disturbed())
    assert (t.rounds, t.disturbed) == (FEW_ROUNDS, FEW_ROUNDS)


def test_long_calls_are_few() -> None:
    """One that is longer than the untimed calls of a turn needs none of them, and two to warm up."""
    calls = []
    clock = Clock()

    def counted(*inputs: torch.Tensor) -> None:
        calls.append(1)
        clock.now += 0.3

    timing = measure(clock.costs(0.1), counted, X, 15, clock)
    assert timing.speedup == pytest.approx(3.0)
    assert len(calls) == 2 + timing.rounds


@pytest.mark.parametrize(
    ("engine", "original", "calls"),
    [
        ((0.4, 0.2), (0.6, 0.6), 2 + 2),
        ((0.4, 0.2), (0.6, 0.8, 0.6), 2 + 3),  # the original's second call compiles
        ((0.8, 0.8, 0.2), (0.6, 0.6), 3 + 2),  # the engine's
    ],
)
def test_a_long_call_that_compiles_is_followed_by_another_before_it_is_timed(
    engine: tuple[float, ...], original: tuple[float, ...], calls: int
) -> None:
    clock = Clock()
    done = []

    def counted(costs: tuple[float, ...]) -> Callable[..., None]:
        fn = clock.costs(*costs, *costs[-1:] * 100)

        def call(*inputs: torch.Tensor) -> None:
            done.append(1)
            fn()

        return call

    t = measure(counted(engine), counted(original), X, 15, clock)
    assert t.speedup == pytest.approx(3.0)
    assert len(done) == calls + 2 * t.rounds


@pytest.mark.parametrize(("original", "rounds"), [(0.5, FEW_ROUNDS), (0.38, MIN_ROUNDS)])
def test_warming_up_is_part_of_the_wait_for_a_sure_win_alone(original: float, rounds: int) -> None:
    clock = Clock()
    t = measure(clock.costs(0.32), clock.costs(original), X, 15, clock)
    assert t.speedup == pytest.approx(original / 0.32)
    assert t.rounds == rounds


def test_short_calls_are_repeated_and_long_ones_bounded() -> None:
    clock = Clock()
    calls = []

    def short(*inputs: torch.Tensor) -> None:
        calls.append(1)
        clock.now += 1e-5

    measure(short, clock.costs(1e-5), X, 15, clock)
    assert len(calls) > 15 * 100
    clock = Clock()
    measure(clock.costs(1.0), clock.costs(1.0), X, 15, clock)
    assert clock.now <= 2 * (4 + MIN_ROUNDS) + 1


@pytest.mark.parametrize(
    ("timings", "wins"),
    [
        ([timing(1.5)], True),
        ([timing(1.01)], True),
        ([timing(1.0)], False),
        ([timing(0.8)], False),
        ([timing(1.02, spread=0.05)], False),  # within the noise
        ([timing(2.0), timing(0.97)], True),  # not clearly slower there
        ([timing(2.0), timing(0.9)], False),
        ([timing(2.0), timing(0.9, spread=0.08)], True),  # could be noise
        ([], False),
    ],
)
def test_what_is_a_win(timings: list[Timing], wins: bool) -> None:
    assert (why_slower(timings) is None) is wins


def test_the_sentence_has_the_numbers() -> None:
    sentence = why_slower([timing(0.5)])
    assert sentence == ("at 2x3 it takes 1.000 ms and the original 0.500 ms (0.50x, noise 0%).")


def test_what_is_hopeless_is_called_twice_and_several_are_timed_together() -> None:
    clock = Clock()
    hopeless, fast = clock.costs(3.0), clock.costs(0.05)
    slow, good = measure_all([hopeless, fast], clock.costs(0.1), [X] * 3, 15, clock)
    assert (slow.speedup, slow.spread) == (pytest.approx(1 / 30), 0)
    assert good.speedup == pytest.approx(2)
    assert clock.now < 2 * 3.0 + (4 + 15) * 0.15 + 0.01


def test_a_second_call_that_compiles_is_not_what_an_engine_takes() -> None:
    clock = Clock()
    engine = clock.costs(0.5, 0.3, *[0.005] * 1000)
    t = measure(engine, clock.costs(0.01), X, 15, clock)
    assert t.speedup == pytest.approx(2)


def test_measuring_ends_as_soon_as_the_speed_up_is_known() -> None:
    clock = Clock()
    measure(clock.costs(0.010), clock.costs(0.030), X, 15, clock)
    steady = clock.now
    clock = Clock()
    measure(clock.costs(0.010), clock.costs(0.010), X, 15, clock)  # never clear which is faster
    # the same warm-up, then a round, two calls or one of each untimed, as often as needed, and in all 15
    assert steady == pytest.approx(4 * 0.04 + MIN_ROUNDS * (3 * 0.01 + 2 * 0.03))
    assert clock.now == pytest.approx((4 + 15 * 3) * 0.02)


def test_an_original_that_is_slow_at_times_makes_no_win_doubtful() -> None:
    """What varies is by how much the engine wins: on a busy machine the original was kept for that."""
    clock = Clock()
    t = measure(clock.costs(0.010), clock.costs(0.024, 0.075, 0.024, 0.075, 0.024), X, 15, clock)
    assert t.speedup < 1 + t.spread  # as a noise of both directions it would be no win
    assert t.shortfall == pytest.approx(0, abs=1e-9)
    assert why_slower([t]) is None
    other = measure(
        clock.costs(0.010, 0.075, 0.010, 0.075, 0.010), clock.costs(0.024), X, 15, clock
    )
    assert other.shortfall > 1
    assert why_slower([other]) is not None


def test_where_noise_hides_a_win_there_are_more_rounds() -> None:
    def rounds(*seconds: float) -> int:
        clock, calls = Clock(), []
        costs = clock.costs(*seconds)

        def counted(*inputs: torch.Tensor) -> None:
            calls.append(1)
            costs()

        measure(counted, clock.costs(0.0053), X, 7, clock)
        return (len(calls) - 4) // 3  # those that warm it up; two of a round are not timed

    varies = (0.0041, 0.0082, 0.0041, 0.0082, 0.0041)
    assert rounds(*varies) == 4 * 7
    assert rounds(0.0053) == 7  # no win is in sight
    assert rounds(*(2 * s for s in varies)) == 7


def test_who_is_beaten_drops_out_and_two_that_are_close_are_measured_further() -> None:
    clock = Clock()
    rounds: list[str] = []

    def counted(name: str, *seconds: float) -> Callable[..., None]:
        costs = clock.costs(*seconds)

        def fn(*inputs: torch.Tensor) -> None:
            rounds.append(name)
            costs()

        return fn

    noise = (0.0100, 0.0104, 0.0098, 0.0101, 0.0096, 0.0103, 0.0099)
    one, two, far = measure_all(
        [
            counted("one", *noise),
            counted("two", *(s * 1.01 for s in noise[::-1])),
            counted("far", *(s * 1.5 for s in noise)),
        ],
        clock.costs(0.03),
        [X] * 4,
        15,
        clock,
    )
    turn = 2 + 1  # two that are not timed
    assert rounds.count("far") == 4 + MIN_ROUNDS * turn  # those that warm it up, and the fewest
    assert rounds.count("one") == rounds.count("two") == 4 + 15 * turn
    assert one.speedup == pytest.approx(3, rel=0.04)
    assert two.speedup == pytest.approx(3, rel=0.04)
    assert far.speedup == pytest.approx(2, rel=0.04)


def test_noise_is_an_interval_that_holds() -> None:
    """Of many measurements of two equally fast functions, nearly all have 1 within their noise."""
    draw = random.Random(0)
    held = 0
    for _ in range(200):
        engine = [
            draw.lognormvariate(0, 0.2) * (5 if draw.random() < 0.1 else 1) for _ in range(15)
        ]
        original = [draw.lognormvariate(0, 0.2) for _ in range(15)]
        low, middle, high = interval(engine, original)
        assert low <= middle <= high
        held += low <= 1 <= high
    assert held > 0.85 * 200  # the outliers hit one side only
    assert interval([2.0] * 5, [1.0, 3.0, 2.0, 4.0, 2.0]) == (0.5, 1.0, 2.0)


@pytest.mark.parametrize("seconds", [1e-4, 0.3])
def test_what_a_call_writes_is_undone_before_the_next_one_and_not_timed(seconds: float) -> None:
    clock = Clock()
    cache, position = torch.zeros(4), torch.zeros((), dtype=torch.long)
    calls = {1.0: 0, 3.0: 0}

    def step(times: float) -> Callable[..., None]:
        def fn(*_: torch.Tensor) -> None:
            assert position == 0 and not cache.any()
            cache.index_copy_(0, position[None], torch.ones(1))
            position.add_(1)
            clock.now += times * seconds
            calls[times] += 1

        return fn

    def restore() -> bool:
        written = bool(position)
        cache.zero_()
        position.zero_()
        clock.now += 0.01
        return written

    t = measure(step(1.0), step(3.0), X, 15, clock, restore=restore)
    assert t.engine_ms == pytest.approx(1e3 * seconds)
    assert t.speedup == pytest.approx(3.0)
    assert min(calls.values()) > 3 and position == 0


def test_of_functions_that_write_nothing_many_calls_are_one_span() -> None:
    clock, begun = Clock(), []

    def fn(*_: torch.Tensor) -> None:
        clock.now += 1e-4
        begun.append(clock.now)

    measure(fn, clock.costs(2e-4), X, 15, clock, restore=lambda: False)
    readings = len(begun)
    begun.clear()
    measure(fn, clock.costs(2e-4), X, 15, clock)
    assert readings == len(begun) > 15 * 10
