# SPDX-License-Identifier: Apache-2.0
"""The speed-up of several samples, and the interval that the rounds leave for it.

mean, low, high = speed_interval(timings, weights)      # 2.03, 1.98, 2.09
between(low, high)                                      # "1.98x to 2.09x"
"""

from collections.abc import Sequence
from math import exp, expm1, log, log1p, sqrt

from blade.report import Timing

Weights = Sequence[float] | None


def speed(timings: Sequence[Timing], weights: Weights = None) -> tuple[float, float]:
    """Return the weighted geometric mean of the speed-ups, and its noise."""
    each = [1.0] * len(timings) if weights is None else list(weights)
    mean = exp(sum(w * log(t.speedup) for t, w in zip(timings, each, strict=True)) / sum(each))
    return mean, together([t.spread for t in timings], weights)


def speed_interval(
    timings: Sequence[Timing], weights: Weights = None
) -> tuple[float, float, float]:
    """Return the weighted geometric mean of the speed-ups, and the limits of its interval."""
    mean, _ = speed(timings, weights)
    below = together([t.shortfall for t in timings], weights)
    above = together([t.excess for t in timings], weights)
    return mean, mean / (1 + below), mean * (1 + above)


def together(noises: Sequence[float], weights: Weights) -> float:
    """Return the noise of a weighted geometric mean of values with independent noises."""
    each = [1.0] * len(noises) if weights is None else list(weights)
    squares = sum((w * log1p(n)) ** 2 for n, w in zip(noises, each, strict=True))
    return expm1(sqrt(squares) / sum(each))


def is_known(timings: Sequence[Timing]) -> bool:
    """Whether there is an interval: older files, and speeds that tests make up, have none."""
    return any(t.rounds or t.spread for t in timings)


def between(low: float, high: float) -> str:
    """``1.98x to 2.09x``"""
    return f"{low:.2f}x to {high:.2f}x"


def disturbed_text(timings: Sequence[Timing]) -> str:
    """A sentence on the rounds that neighbours disturbed, if those are the most; else ""."""
    rounds, disturbed = sum(t.rounds for t in timings), sum(t.disturbed for t in timings)
    if 2 * disturbed <= rounds:
        return ""
    return f"Other processes disturbed {disturbed} of {rounds} rounds of timing; the intervals say what that leaves."
