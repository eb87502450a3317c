# SPDX-License-Identifier: Apache-2.0
"""Time functions on the same inputs in turns, so that a machine that slows down slows all of them.

What serves a user runs alone, its weights in the caches and its threads awake. So each turn waits until the
threads of the one before have come to rest (pools spin after their last work), and begins with calls that are
not timed: without that, what two libraries take in turns is up to 2.5 times what each takes alone.

    timing = measure(engine, original, inputs, rounds=15)      # Timing: medians, ratio, its noise
    why_slower([timing], weights) is None                       # whether that is a win

The median of the per-round ratios decides, and between which limits it is likely to lie (Georges et al.,
OOPSLA 2007, argue for intervals).
"""

from collections.abc import Callable, Sequence
from functools import cache
from math import comb, exp, inf, log, sqrt
from statistics import median
from time import perf_counter, process_time, sleep
from typing import Any

import torch

from blade.graph.leaves import tensors_in
from blade.report import Timing, shape_text

BUDGET_S = 1.5  # per sample and candidate; never fewer than MIN_ROUNDS rounds
MIN_ROUNDS = 5
PRECISION = 0.02  # noise of a speed-up at which no further rounds are needed
EVIDENT = 10.0  # times its noise: a speed-up that needs no further rounds
ROUND_S = 0.004  # what one side of a round takes at least: short calls are repeated
UNTIMED = (
    0.02,
    0.1,
)  # a turn of shorter calls than these seconds begins with two, or one, not timed
REST_S = 0.05  # what threads may spin, at most
STEP_S = 5e-4  # between two looks at whether they still do
MORE = 4  # times as many rounds where noise hides what looks like a win
CONFIDENCE = 0.93  # that the median of the ratios lies where it is said to; five rounds have 0.9375
CLEARLY = 0.95  # a speed-up below this, noise included, is a loss at that sample
CLEAR_WIN = 1.1  # a speed-up that one round tells
HOPELESS = 10.0  # times the original's: then one call that took HOPELESS_S tells enough
HOPELESS_S = 0.2

Inputs = Sequence[Any]
Clock = Callable[[], float]
Fn = Callable[..., Any]


def measure(
    engine: Fn,
    original: Fn,
    inputs: Inputs,
    rounds: int,
    clock: Clock = perf_counter,
    hurry_s: float = inf,
) -> Timing:
    """Median time of both on ``inputs``, in interleaved rounds.

    ``hurry_s``: after these seconds one round is enough if the engine was clearly faster in every one.
    """
    [timing] = measure_all([engine], original, [inputs] * 2, rounds, clock, hurry_s)
    return timing


def measure_all(
    engines: Sequence[Fn],
    original: Fn,
    inputs: Sequence[Inputs],
    rounds: int,
    clock: Clock = perf_counter,
    hurry_s: float = inf,
) -> list[Timing]:
    """The same of several; ``inputs`` are equal ones, for the original and then for each engine.

    Who is seen to be beaten by another engine drops out, so that most rounds are spent where two are close.
    """
    with torch.no_grad():
        fns = [original, *engines]
        end = clock() + hurry_s
        first = _warm(original, inputs[0], clock, end=end)
        once = [
            first,
            *(_warm(f, x, clock, first, end) for f, x in zip(engines, inputs[1:], strict=True)),
        ]
        racing = [i for i, t in enumerate(once) if i and not _is_hopeless(t, first)]
        repeats = [max(1, int(ROUND_S / max(t, 1e-7))) for t in once]
        untimed = [sum(t < limit for limit in UNTIMED) for t in once]
        seconds: list[list[float]] = [[] for _ in fns]
        left = BUDGET_S * (1 + len(racing)) / 2
        most = rounds
        while racing and len(seconds[0]) < most:
            turn = [0, *racing]
            for k in turn if len(seconds[0]) % 2 else turn[::-1]:
                _rest()
                for _ in range(untimed[k]):
                    fns[k](*inputs[k])
                seconds[k].append(_time(fns[k], repeats[k], inputs[k], clock))
                left -= (untimed[k] + repeats[k]) * seconds[k][-1]
            if len(seconds[0]) >= MIN_ROUNDS:
                racing = _open(seconds, racing) if left > 0 else []
                if len(seconds[0]) == rounds and _hides_a_win(seconds, racing):
                    most = MORE * rounds
            elif clock() > end and all(_always_faster(seconds, k) for k in racing):
                racing = []
    return [
        _timing(inputs[0], seconds[0], seconds[k])
        if seconds[k]
        else _timing(inputs[0], [first], [once[k]])
        for k in range(1, len(fns))
    ]


def _always_faster(seconds: Sequence[Sequence[float]], k: int) -> bool:
    pairs = zip(seconds[0], seconds[k], strict=True)
    return all(mine * CLEAR_WIN < theirs for theirs, mine in pairs)


def _open(seconds: Sequence[Sequence[float]], racing: Sequence[int]) -> list[int]:
    """Who needs further rounds, against the original (0) or against each other: none, or all that are not
    beaten. Beaten is who takes longer than another one in all that is likely of the ratio of their times."""
    good = [
        k
        for k in racing
        if all(j == k or interval(seconds[k], seconds[j])[2] > 1 - PRECISION for j in racing)
    ]
    pairs = [(j, k) for j in good for k in good if j < k]
    enough = EVIDENT if len(good) == 1 else inf  # its speed decides nothing else
    settled = all(_is_clear(_ratio(seconds[0], seconds[k]), enough) for k in good) and all(
        _ratio(seconds[j], seconds[k])[1] <= PRECISION for j, k in pairs
    )
    return [] if settled else good


def _hides_a_win(seconds: Sequence[Sequence[float]], racing: Sequence[int]) -> bool:
    """Nobody was seen to be faster than the original, but somebody may be."""
    found = [interval(seconds[k], seconds[0]) for k in racing]
    return all(low <= 1 for low, _, _ in found) and any(
        middle > 1 + PRECISION for _, middle, _ in found
    )


def why_slower(timings: Sequence[Timing], weights: Sequence[float] | None = None) -> str | None:
    """``None`` if these timings are a win: faster on the geometric mean by more than the noise of
    measuring it, and clearly slower nowhere. Noise that may make it faster still speaks for nothing else."""
    if not timings:
        return "it could not be measured: there is no sample."
    if (sentence := why_clearly_slower(timings)) is not None:
        return sentence
    mean, _ = speed(timings, weights)
    noise = _together([t.shortfall for t in timings], weights)
    if mean <= 1 + noise:
        return (
            f"over {len(timings)} sample(s) its speed is {mean:.2f}x the original's on the geometric "
            f"mean, which is no more than 1 + the noise of measuring it ({noise:.1%})."
        )
    return None


def why_clearly_slower(timings: Sequence[Timing]) -> str | None:
    """A sentence on the first sample at which the engine loses whatever the noise."""
    for t in timings:
        if t.speedup * (1 + t.spread) < CLEARLY:
            return (
                f"at {shape_text(t.shapes)} it takes {t.engine_ms:.3f} ms and the original {t.original_ms:.3f} ms "
                f"({t.speedup:.2f}x, noise {t.spread:.0%})."
            )
    return None


def speed(timings: Sequence[Timing], weights: Sequence[float] | None = None) -> tuple[float, float]:
    """Weighted geometric mean of the speed-ups, and the noise of measuring it."""
    each = [1.0] * len(timings) if weights is None else list(weights)
    mean = exp(sum(w * log(t.speedup) for t, w in zip(timings, each, strict=True)) / sum(each))
    return mean, _together([t.spread for t in timings], weights)


def _together(noises: Sequence[float], weights: Sequence[float] | None) -> float:
    """What independent noises do to a weighted mean."""
    each = [1.0] * len(noises) if weights is None else list(weights)
    return sqrt(sum((w * n) ** 2 for n, w in zip(noises, each, strict=True))) / sum(each)


def is_faster(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Whether ``one`` (speed, noise) beats ``other`` by more than their noise and what is worth telling."""
    noise = max(PRECISION, sqrt(one[1] ** 2 + other[1] ** 2))
    return one[0] > other[0] * (1 + noise)


def _is_clear(ratio: tuple[float, float], enough: float) -> bool:
    """Known well enough, or ``enough`` times its noise; and more rounds of such noise turn no win into a loss."""
    middle, spread = ratio
    return abs(log(middle)) > (2 if spread <= PRECISION else enough) * spread


def _is_hopeless(seconds: float, original: float) -> bool:
    return seconds > HOPELESS_S and seconds > HOPELESS * original


def _warm(
    fn: Fn, inputs: Inputs, clock: Clock, original: float | None = None, end: float = inf
) -> float:
    """Seconds of one call, after those in which TorchScript profiles and specializes.

    What is far slower than ``original`` in its second call is not called again, nor is anything after ``end``.
    """
    first = _time(fn, 1, inputs, clock)  # loads what is loaded late
    if clock() > end:
        return first
    again = _time(fn, 1, inputs, clock)
    if clock() > end or (original is not None and _is_hopeless(again, original)):
        return again
    fn(*inputs)
    return _time(fn, 1, inputs, clock)


def _time(fn: Fn, repeats: int, inputs: Inputs, clock: Clock) -> float:
    _synchronize(inputs)
    start = clock()
    for _ in range(repeats):
        fn(*inputs)
    _synchronize(inputs)
    return (clock() - start) / repeats


def _rest() -> None:
    """Wait until no thread of this process works any more."""
    end = perf_counter() + REST_S
    while perf_counter() < end:
        before = process_time()
        sleep(STEP_S)
        if process_time() - before < 0.4 * STEP_S:
            return


def _synchronize(inputs: Inputs) -> None:
    if torch.cuda.is_initialized() and any(t.is_cuda for t in tensors_in(tuple(inputs))):
        torch.cuda.current_stream().synchronize()


def _timing(inputs: Inputs, original: Sequence[float], engine: Sequence[float]) -> Timing:
    """From seconds per round of both, the first rounds being the same ones."""
    ratio, spread = _ratio(original, engine)
    low, middle, _ = interval(engine, original)
    milliseconds = 1e3 * median(engine)
    return Timing(
        shapes=tuple(tuple(t.shape) for t in tensors_in(tuple(inputs))),
        original_ms=milliseconds * ratio,
        engine_ms=milliseconds,
        spread=spread,
        below=middle / low - 1,
    )


def _ratio(one: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """How many times as long ``one`` takes, and how far off that may be, as a part of it."""
    low, middle, high = interval(other, one)
    return middle, max(middle / low, high / middle) - 1


def interval(engine: Sequence[float], original: Sequence[float]) -> tuple[float, float, float]:
    """Median of the ratios (original over engine) round by round, between its limits of confidence.

    These are order statistics, which hold for whatever distribution (Conover, Practical Nonparametric
    Statistics, 3.2): of five rounds the least and the largest ratio, of fifteen the fourth from either end.
    """
    ratios = sorted(a / b for a, b in zip(original, engine, strict=False))
    rank = _rank(len(ratios))
    return ratios[rank], median(ratios), ratios[-1 - rank]


@cache
def _rank(count: int) -> int:
    """The position of the lower limit among ``count`` values: the largest with ``CONFIDENCE``."""
    below, rank = (
        1.0,
        0,
    )  # how many of 2**count outcomes have at most ``rank`` values below the median
    while rank < (count - 1) // 2:
        below += comb(count, rank + 1)
        if 1 - 2 * below / 2**count < CONFIDENCE:
            break
        rank += 1
    return rank
