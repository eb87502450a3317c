# SPDX-License-Identifier: Apache-2.0
"""What measured rounds say: is the engine faster, slower, as fast, or is the machine too noisy to tell?

    ratio = compare(engine_turns, original_turns)    # Ratio: median over the quiet rounds, between its limits
    decide([timing], weights).serves                 # whether the engine may serve; .sentence says why not

All comparisons of speed in this package are decided here, from numbers alone. Time that neighbours take is
added to what a function takes, never subtracted. So rounds that they disturbed are discarded. Where too few
quiet rounds are left, the ratio of the fastest calls is the estimate, and its interval covers all rounds.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from math import comb, sqrt
from statistics import median

from blade.report import Timing, shape_text
from blade.report.interval import Weights, between, speed_interval, together

# Rounds.
MIN_ROUNDS = 5  # the fewest whose smallest and largest ratio bound the median with CONFIDENCE
CONFIDENCE = 0.93  # probability that the median ratio is in its interval; 0.9375 for five rounds

# What makes a turn a disturbed one.
TAKEN = 0.1  # share of a turn that threads waited for a CPU
SLOWDOWN = 1.5  # of the calibrated loop before the round (1.3: a pool's thread spins on the other half of the core)
IDLE = 0.75  # factor to the CPU time per wall time that is usual for the function

# Limits of the decision.
PRECISION = 0.02  # noise of a speed-up at which no further rounds are needed
CLEARLY = 0.95  # a speed-up below this, noise included, is a loss at that sample
LIKELY = 1.1  # a speed-up from which an engine serves where neighbours hide whether it wins
WIDE = 0.25  # relative width of an interval that tells little

Speed = tuple[float, float]
"""A speed-up, and its noise."""


@dataclass(frozen=True)
class Turn:
    """One function in one round: seconds per call (the median of several spans), and of the fastest span.

    ``taken``: share of the turn for which threads waited for a CPU or the hypervisor took it. ``busy``: CPU seconds
    per second. ``slowdown``: of the calibrated loop.
    """

    seconds: float
    fastest: float
    taken: float = 0.0
    busy: float = 0.0
    slowdown: float = 1.0


@dataclass(frozen=True)
class Ratio:
    """How many times as fast a function is as another one, between the limits of its confidence interval.

    ``rounds`` were measured; ``disturbed`` of them do not count, unless too few others are left.
    """

    low: float
    middle: float
    high: float
    rounds: int
    disturbed: int
    seconds: float  # per call of the faster-or-slower function itself

    @property
    def spread(self) -> float:
        """The relative noise, in the direction where it is larger."""
        return max(self.below, self.above)

    @property
    def below(self) -> float:
        return self.middle / self.low - 1

    @property
    def above(self) -> float:
        return self.high / self.middle - 1

    @property
    def quiet(self) -> int:
        return self.rounds - self.disturbed


def compare(engine: Sequence[Turn], original: Sequence[Turn]) -> Ratio:
    """Return how many times as fast ``engine`` is as ``original``, from the rounds that both took part in."""
    pairs = list(zip(engine, original, strict=False))
    flags = zip(_quiet(engine), _quiet(original), strict=False)
    quiet = [pair for pair, both in zip(pairs, flags, strict=True) if all(both)]
    disturbed = len(pairs) - len(quiet)
    if len(quiet) >= MIN_ROUNDS or not disturbed:
        low, middle, high = _interval(quiet)
        own = median(mine.seconds for mine, _ in quiet)
        return Ratio(low, middle, high, len(pairs), disturbed, own)
    own = min(mine.fastest for mine, _ in pairs)
    middle = min(theirs.fastest for _, theirs in pairs) / own
    limits = (middle, *_interval(pairs), *_interval(quiet or pairs))
    return Ratio(min(limits), middle, max(limits), len(pairs), disturbed, own)


def _quiet(turns: Sequence[Turn]) -> list[bool]:
    """Whether no neighbour disturbed each turn.

    Less CPU time than usual tells of one where the function took longer, too: threads of a pool that have nothing to
    do may spin or not.
    """
    ranked = sorted(turn.busy for turn in turns)
    usual = ranked[(3 * len(ranked)) // 4] if ranked else 0.0
    best = min((turn.seconds for turn in turns), default=0.0)

    def is_starved(turn: Turn) -> bool:
        return turn.busy < IDLE * usual and turn.seconds > SLOWDOWN * best

    return [t.taken <= TAKEN and t.slowdown <= SLOWDOWN and not is_starved(t) for t in turns]


def is_quiet(turns: Sequence[Turn]) -> bool:
    """Whether no neighbour disturbed the last of ``turns``."""
    return _quiet(turns)[-1]


def _interval(pairs: Iterable[tuple[Turn, Turn]]) -> tuple[float, float, float]:
    mine, theirs = zip(*((a.seconds, b.seconds) for a, b in pairs), strict=True)
    return interval(mine, theirs)


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
    # of 2**count outcomes, those with at most ``rank`` values below the median
    below, rank = 1.0, 0
    while rank < (count - 1) // 2:
        below += comb(count, rank + 1)
        if 1 - 2 * below / 2**count < CONFIDENCE:
            break
        rank += 1
    return rank


class Outcome(Enum):
    """What is known about an engine's speed. ``UNCLEAR``: neighbours made the interval too wide to tell."""

    FASTER = "faster"
    EQUAL = "equal"
    SLOWER = "slower"
    UNCLEAR = "unclear"


@dataclass(frozen=True)
class SpeedDecision:
    """Whether the engine may serve. ``sentence`` says why not, or why it is unclear; "" for a clear win."""

    outcome: Outcome
    serves: bool
    sentence: str = ""


def decide(timings: Sequence[Timing], weights: Weights = None) -> SpeedDecision:
    """Decide whether an engine serves: it is faster on the geometric mean by more than its noise, and clearly
    slower nowhere. Only noise that makes it look faster than it is counts.

    Where neighbours hide whether it wins, it serves if it is ``LIKELY`` to: noise drops no engine that is
    probably much faster.
    """
    if not timings:
        return SpeedDecision(
            Outcome.UNCLEAR, False, "it could not be measured: there is no sample."
        )
    if (sentence := why_clearly_slower(timings)) is not None:
        return SpeedDecision(Outcome.SLOWER, False, sentence)
    mean, low, high = speed_interval(timings, weights)
    if low > 1:
        return SpeedDecision(Outcome.FASTER, True)
    if is_unclear(timings, weights):
        return SpeedDecision(Outcome.UNCLEAR, mean >= LIKELY, _too_noisy(timings, weights))
    noise = together([t.shortfall for t in timings], weights)
    sentence = (
        f"over {len(timings)} sample(s) its speed is {mean:.2f}x the original's on the geometric "
        f"mean, which is no more than 1 + the noise of measuring it ({noise:.1%})."
    )
    return SpeedDecision(Outcome.SLOWER if high < 1 else Outcome.EQUAL, False, sentence)


def decide_plan(timings: Sequence[Timing], weights: Weights = None) -> SpeedDecision:
    """Decide whether a plan serves whose clusters have won by more than noise each: the whole only must not be
    slower than the original, nor look so where neighbours hide what it is."""
    if (sentence := why_clearly_slower(timings)) is not None:
        return SpeedDecision(Outcome.SLOWER, False, sentence)
    mean, low, high = speed_interval(timings, weights)
    if high < 1:
        sentence = (
            f"its speed is {mean:.2f}x the original's on the geometric mean ({between(low, high)})."
        )
        return SpeedDecision(Outcome.SLOWER, False, sentence)
    if low <= 1 and is_unclear(timings, weights):
        return SpeedDecision(Outcome.UNCLEAR, mean >= CLEARLY, _too_noisy(timings, weights))
    if mean < CLEARLY:
        sentence = (
            f"it was measured at {mean:.2f}x the original's speed, and up to {high:.2f}x is noise."
        )
        return SpeedDecision(Outcome.SLOWER, False, sentence)
    return SpeedDecision(Outcome.FASTER if low > 1 else Outcome.EQUAL, True)


def why_slower(timings: Sequence[Timing], weights: Weights = None) -> str | None:
    """Return ``None`` if the engine may serve, else a sentence on why not."""
    found = decide(timings, weights)
    return None if found.serves else found.sentence


def why_clearly_slower(timings: Sequence[Timing]) -> str | None:
    """Return a sentence on the first sample at which the engine loses whatever the noise."""
    for t in timings:
        if t.high < CLEARLY:
            return (
                f"at {shape_text(t.shapes)} it takes {t.engine_ms:.3f} ms and the original {t.original_ms:.3f} ms "
                f"({t.speedup:.2f}x, noise {t.spread:.0%})."
            )
    return None


def is_unclear(timings: Sequence[Timing], weights: Weights = None) -> bool:
    """Whether neighbours disturbed the rounds, and the interval of the speed-up tells little."""
    _, low, high = speed_interval(timings, weights)
    return any(t.disturbed for t in timings) and high > (1 + WIDE) * low


def is_faster(one: Speed, other: Speed) -> bool:
    """Whether ``one`` (speed, noise) beats ``other`` by more than their noise and a minimal difference."""
    noise = max(PRECISION, sqrt(one[1] ** 2 + other[1] ** 2))
    return one[0] > other[0] * (1 + noise)


def _too_noisy(timings: Sequence[Timing], weights: Weights) -> str:
    mean, low, high = speed_interval(timings, weights)
    rounds, disturbed = (
        sum(n) for n in zip(*((t.rounds, t.disturbed) for t in timings), strict=True)
    )
    return (
        f"the machine is too noisy to tell: its fastest calls are at {mean:.2f}x the original's speed, all at "
        f"{between(low, high)}; other processes disturbed {disturbed} of {rounds} rounds."
    )
