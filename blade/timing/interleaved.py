# SPDX-License-Identifier: Apache-2.0
"""Time functions in interleaved rounds, for all comparisons of speed in this package.

    timing = measure(engine, original, inputs, rounds=15)      # Timing: medians, ratio, its noise
    why_slower([timing], weights) is None                       # whether that is a win

Every round calls all functions, in an order that alternates, so that slow phases of the machine affect all of
them. Each turn waits until the threads of the turn before it are idle (thread pools spin after their last
work) and begins with untimed calls. Without that, two libraries in turns take up to 2.5 times as long as each
takes alone.

A function that writes to its inputs or to a state is timed call by call: ``restore`` undoes what each call
wrote, outside the timed span, so that a counter does not run on and a full cache does not overflow.

The median of the ratios per round decides, with its confidence interval (Georges et al., OOPSLA 2007, argue
for intervals). Kernels of one GPU are timed by ``cuda_graph`` instead, where a call is too short for a clock
of the host.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import comb, exp, inf, log, sqrt
from statistics import median
from time import perf_counter, process_time, sleep
from typing import Any

import torch

from blade.core.pytree import tensors_in
from blade.report import Timing, shape_text

# Rounds and their length.
MIN_ROUNDS = 5  # the fewest whose smallest and largest ratio bound the median with CONFIDENCE
BUDGET_S = 1.5  # seconds per sample and pair, beyond MIN_ROUNDS: the wait for one candidate
ROUND_S = 0.004  # seconds of one turn, at least: calls shorter than that are repeated
MORE = 4  # factor to the number of rounds where noise hides a possible win
EARLY_EXIT_S = 0.1  # the early exit of measurements that delay a call of the user

# Rest before a turn, and untimed calls.
REST_S = 0.05  # seconds at most: threads that spin longer are not waited for
STEP_S = 5e-4  # seconds between two checks for working threads
UNTIMED = (
    0.02,
    0.1,
)  # seconds; a turn begins with one untimed call for each of these that a call is shorter than

# Limits of the decision.
CONFIDENCE = 0.93  # probability that the median ratio is in its interval; 0.9375 for five rounds
PRECISION = 0.02  # noise of a speed-up at which no further rounds are needed
EVIDENT = 10.0  # factor to its noise at which a speed-up needs no further rounds
CLEARLY = 0.95  # a speed-up below this, noise included, is a loss at that sample
CLEAR_WIN = 1.1  # a speed-up that a single round shows
HOPELESS = 10.0  # factor to the original's seconds; one call of HOPELESS_S beyond it is enough
HOPELESS_S = 0.2

Inputs = Sequence[Any]
Clock = Callable[[], float]
Fn = Callable[..., Any]
Restore = Callable[[], bool]
"""Undo what calls have written since it was last called; return whether there was anything."""


def measure(
    engine: Fn,
    original: Fn,
    inputs: Inputs,
    rounds: int,
    clock: Clock = perf_counter,
    early_exit_s: float = inf,
    restore: Restore | None = None,
) -> Timing:
    """Measure the median seconds of both on ``inputs``, in at most ``rounds`` interleaved rounds.

    ``early_exit_s``: after these seconds one round is enough if the engine was clearly faster in every round.
    ``restore`` undoes the writes of either.
    """
    both = [inputs] * 2
    [timing] = measure_all([engine], original, both, rounds, clock, early_exit_s, restore)
    return timing


def measure_all(
    engines: Sequence[Fn],
    original: Fn,
    inputs: Sequence[Inputs],
    rounds: int,
    clock: Clock = perf_counter,
    early_exit_s: float = inf,
    restore: Restore | None = None,
) -> list[Timing]:
    """Measure several engines; ``inputs`` are equal ones, for the original and then for each engine.

    An engine that another one has beaten drops out: most rounds are spent on close candidates. ``restore``
    undoes the writes of any of them. What a function raises passes: the caller then restores, too.
    """
    with torch.no_grad():
        functions = [original, *engines]
        sides = [_Side(f, x, clock, restore) for f, x in zip(functions, inputs, strict=True)]
        end = clock() + early_exit_s
        first = sides[0].warm_up(end)
        for side in sides[1:]:
            side.warm_up(end, first)
        seconds = [side.seconds for side in sides]
        racing = [k for k, side in enumerate(sides) if k and not _is_hopeless(side.once, first)]
        left = BUDGET_S * (1 + len(racing)) / 2
        most = rounds
        while racing and len(seconds[0]) < most:
            turn = [0, *racing]
            for k in turn if len(seconds[0]) % 2 else turn[::-1]:
                left -= sides[k].take_turn()
            if len(seconds[0]) >= MIN_ROUNDS:
                racing = _undecided(seconds, racing) if left > 0 else []
                if len(seconds[0]) == rounds and _may_hide_a_win(seconds, racing):
                    most = MORE * rounds
            elif clock() > end and all(_always_faster(seconds, k) for k in racing):
                racing = []
    return [
        _timing(inputs[0], seconds[0] if side.seconds else [first], side.seconds or [side.once])
        for side in sides[1:]
    ]


@dataclass
class _Side:
    """One of the functions that are timed side by side, with the times of its calls."""

    fn: Fn
    inputs: Inputs
    clock: Clock
    restore: Restore | None = None
    once: float = inf  # seconds of a call after warming up
    seconds: list[float] = field(default_factory=list)  # per call, by round
    writes: bool = False  # whether a call left something to restore
    restoring: float = 0.0  # seconds of restoring, for a function that writes

    def __post_init__(self) -> None:
        self._streams = _streams(self.inputs)

    def warm_up(self, end: float, original: float | None = None) -> float:
        """Return the seconds of one call, after the calls in which TorchScript profiles and specializes.

        A function whose second call is far slower than ``original`` is not called again; after ``end`` no
        function is.
        """
        self.once = self._time(1)  # includes lazy loading
        if self.clock() > end:
            return self.once
        self.once = self._time(1)
        if self.clock() > end or (original is not None and _is_hopeless(self.once, original)):
            return self.once
        self._call()
        self.once = self._time(1)
        return self.once

    def take_turn(self) -> float:
        """Add the seconds of one round; return the approximate seconds of all its calls."""
        rest()
        untimed = sum(self.once < limit for limit in UNTIMED)
        repeats = repeats_for(self.once + self.restoring)
        for _ in range(untimed):
            self._call()
        self.seconds.append(self._time(repeats))
        return (untimed + repeats) * (self.seconds[-1] + self.restoring)

    def _call(self) -> None:
        self.fn(*self.inputs)
        self._undo()

    def _time(self, repeats: int) -> float:
        """Return seconds per call; for a GPU until its work is done, not until the launch returns."""
        spans = [1] * repeats if self.writes else [repeats]
        return sum(map(self._time_span, spans)) / repeats

    def _time_span(self, calls: int) -> float:
        self._synchronize()
        start = self.clock()
        for _ in range(calls):
            self.fn(*self.inputs)
        self._synchronize()
        seconds = self.clock() - start
        self._undo()
        return seconds

    def _undo(self) -> None:
        if self.restore is None:
            return
        start = self.clock()
        if self.restore():
            self._synchronize()
            self.writes, self.restoring = True, self.clock() - start

    def _synchronize(self) -> None:
        for stream in self._streams:
            stream.synchronize()


def repeats_for(seconds: float) -> int:
    """Return how many calls of ``seconds`` make a turn long enough to be timed."""
    return max(1, int(ROUND_S / max(seconds, 1e-7)))


def rest() -> None:
    """Wait until no thread of this process works, ``REST_S`` at most."""
    end = perf_counter() + REST_S
    while perf_counter() < end:
        before = process_time()
        sleep(STEP_S)
        if process_time() - before < 0.4 * STEP_S:
            return


def _streams(inputs: Inputs) -> list[torch.cuda.Stream]:
    """Return the current stream of every GPU that ``inputs`` lie on."""
    if not torch.cuda.is_initialized():
        return []
    devices = dict.fromkeys(t.device for t in tensors_in(tuple(inputs)) if t.is_cuda)
    return [torch.cuda.current_stream(device) for device in devices]


def _always_faster(seconds: Sequence[Sequence[float]], k: int) -> bool:
    pairs = zip(seconds[0], seconds[k], strict=True)
    return all(mine * CLEAR_WIN < theirs for theirs, mine in pairs)


def _undecided(seconds: Sequence[Sequence[float]], racing: Sequence[int]) -> list[int]:
    """Return the engines that need further rounds: none, or all unbeaten ones; 0 is the original.

    An engine is beaten if it takes longer than another one over the whole interval of their ratio.
    """
    good = [
        k
        for k in racing
        if all(j == k or interval(seconds[k], seconds[j])[2] > 1 - PRECISION for j in racing)
    ]
    pairs = [(j, k) for j in good for k in good if j < k]
    enough = EVIDENT if len(good) == 1 else inf  # its speed decides no other choice
    settled = all(_is_clear(_ratio(seconds[0], seconds[k]), enough) for k in good) and all(
        _ratio(seconds[j], seconds[k])[1] <= PRECISION for j, k in pairs
    )
    return [] if settled else good


def _may_hide_a_win(seconds: Sequence[Sequence[float]], racing: Sequence[int]) -> bool:
    """Whether no engine is known to be faster than the original, but one may be."""
    found = [interval(seconds[k], seconds[0]) for k in racing]
    return all(low <= 1 for low, _, _ in found) and any(
        middle > 1 + PRECISION for _, middle, _ in found
    )


def why_slower(timings: Sequence[Timing], weights: Sequence[float] | None = None) -> str | None:
    """Return ``None`` if these timings are a win: faster on the geometric mean by more than its noise, and
    clearly slower nowhere. Only noise that makes the engine look faster than it is counts."""
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
    """Return a sentence on the first sample at which the engine loses whatever the noise."""
    for t in timings:
        if t.speedup * (1 + t.spread) < CLEARLY:
            return (
                f"at {shape_text(t.shapes)} it takes {t.engine_ms:.3f} ms and the original {t.original_ms:.3f} ms "
                f"({t.speedup:.2f}x, noise {t.spread:.0%})."
            )
    return None


def speed(timings: Sequence[Timing], weights: Sequence[float] | None = None) -> tuple[float, float]:
    """Return the weighted geometric mean of the speed-ups, and its noise."""
    each = [1.0] * len(timings) if weights is None else list(weights)
    mean = exp(sum(w * log(t.speedup) for t, w in zip(timings, each, strict=True)) / sum(each))
    return mean, _together([t.spread for t in timings], weights)


def _together(noises: Sequence[float], weights: Sequence[float] | None) -> float:
    """Return the noise of a weighted mean of values with independent noises."""
    each = [1.0] * len(noises) if weights is None else list(weights)
    return sqrt(sum((w * n) ** 2 for n, w in zip(noises, each, strict=True))) / sum(each)


def is_faster(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Whether ``one`` (speed, noise) beats ``other`` by more than their noise and a minimal difference."""
    noise = max(PRECISION, sqrt(one[1] ** 2 + other[1] ** 2))
    return one[0] > other[0] * (1 + noise)


def _is_clear(ratio: tuple[float, float], enough: float) -> bool:
    """Whether the ratio is known to ``PRECISION``, or its logarithm is ``enough`` times its noise. Either way
    further rounds of such noise turn no win into a loss."""
    middle, spread = ratio
    return abs(log(middle)) > (2 if spread <= PRECISION else enough) * spread


def _is_hopeless(seconds: float, original: float) -> bool:
    return seconds > HOPELESS_S and seconds > HOPELESS * original


def _timing(inputs: Inputs, original: Sequence[float], engine: Sequence[float]) -> Timing:
    """Make a Timing from seconds per round of both, whose first rounds are the same ones."""
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
    """Return how many times as long ``one`` takes, and the relative noise of that ratio."""
    low, middle, high = interval(other, one)
    return middle, max(middle / low, high / middle) - 1


def interval(engine: Sequence[float], original: Sequence[float]) -> tuple[float, float, float]:
    """Return the median of the ratios (original over engine) per round, between its confidence limits.

    The limits are order statistics, valid for any distribution (Conover, Practical Nonparametric Statistics,
    3.2): of five rounds the least and the largest ratio, of fifteen the fourth from either end.
    """
    ratios = sorted(a / b for a, b in zip(original, engine, strict=False))
    rank = _rank(len(ratios))
    return ratios[rank], median(ratios), ratios[-1 - rank]


@cache
def _rank(count: int) -> int:
    """Return the position of the lower limit among ``count`` values: the largest with ``CONFIDENCE``."""
    below, rank = (
        1.0,
        0,
    )  # of 2**count outcomes, those with at most ``rank`` values below the median
    while rank < (count - 1) // 2:
        below += comb(count, rank + 1)
        if 1 - 2 * below / 2**count < CONFIDENCE:
            break
        rank += 1
    return rank
