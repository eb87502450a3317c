# SPDX-License-Identifier: Apache-2.0
"""What quantizing saves: variants of a cluster timed in turns, and each group of layers in its place.

    medians = race([run_a, run_b], inputs)                    # seconds per call of each
    gains = measured_gain(without, whole, samples)            # what a group saves at each sample

A group is timed by what the cluster takes without it: what quantizing costs its neighbours, and what
they share with it, counts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import median
from time import perf_counter

import torch

from blade.backends.quant.simulate import Inputs

Run = Callable[[Inputs], object]
ROUNDS = 9
ROUND_S = 0.001  # what one side of a round takes at least
NOISE = 2.0  # standard errors that a gain has to exceed
Clock = Callable[[], float]


@dataclass(frozen=True)
class Gain:
    """Seconds per call that something saves, and the standard error of knowing it."""

    seconds: float
    error: float

    @property
    def is_one(self) -> bool:
        return self.seconds > NOISE * self.error


def race(
    runs: Sequence[Run], inputs: Inputs, clock: Clock = perf_counter, rounds: int = ROUNDS
) -> list[list[float]]:
    """Seconds per call of each of ``runs``, a list of one per round; every round runs all of them."""
    repeats = []
    with torch.no_grad():
        for run in runs:
            for _ in range(2):
                run(inputs)
            repeats.append(max(1, int(ROUND_S / max(_time(run, 1, inputs, clock), 1e-7))))
        seconds: list[list[float]] = [[] for _ in runs]
        for number in range(rounds):
            order = [(k + number) % len(runs) for k in range(len(runs))]
            for k in order:
                seconds[k].append(_time(runs[k], repeats[k], inputs, clock))
    return seconds


def gain(slow: Sequence[float], fast: Sequence[float]) -> Gain:
    """From seconds of both in the same rounds: the median difference."""
    saved = [a - b for a, b in zip(slow, fast, strict=True)]
    middle = median(saved)
    deviation = 1.4826 * median(abs(s - middle) for s in saved)
    return Gain(middle, 1.2533 * deviation / sqrt(len(saved)))


def measured_gain(
    without: Run, whole: Run, samples: Sequence[Inputs], clock: Clock = perf_counter
) -> tuple[Gain, ...]:
    """What ``whole`` saves against ``without`` at each of ``samples``."""
    return tuple(gain(*race([without, whole], inputs, clock)) for inputs in samples)


def is_worth_it(gains: Sequence[Gain]) -> bool:
    """Whether time is won at some sample and, clearly, lost at none."""
    lost = any(-g.seconds > NOISE * g.error for g in gains)
    return any(g.is_one for g in gains) and not lost


def _time(run: Run, repeats: int, inputs: Inputs, clock: Clock) -> float:
    start = clock()
    for _ in range(repeats):
        run(inputs)
    if any(tensor.is_cuda for tensor in inputs):  # launched is not done
        torch.cuda.current_stream().synchronize()
    return (clock() - start) / repeats
