# SPDX-License-Identifier: Apache-2.0
"""Which range of an activation to represent: what was seen of it over all samples -> two bounds.

    observer = make_observer("entropy")
    for _ in observer.passes:                # some have to see the samples twice
        for x in seen: observer.see(x)
        observer.end_of_pass()
    low, high = observer.range()

``entropy`` minimizes the Kullback-Leibler divergence between the values and their clipped, quantized form
(Migacz, "8-bit inference with TensorRT", GTC 2017), ``percentile`` leaves out a share of the values at
each end, ``moving_average`` follows the bounds from sample to sample (Jacob et al., CVPR 2018).
"""

from collections.abc import Callable
from math import inf
from typing import Protocol

import numpy
import torch

BINS = 2048
LEVELS = 128  # of the quantized magnitude that the entropy is taken of
SHARE = 0.9999  # of the values that "percentile" keeps
MOMENTUM = 0.1  # what a sample counts in a moving average

Range = tuple[float, float]


class Observer(Protocol):
    """What is known of one activation; values that are not finite raise in ``see``'s caller."""

    passes: int

    def see(self, x: torch.Tensor) -> None:
        """Take note of one sample's values."""

    def end_of_pass(self) -> None:
        """All samples were seen once (more)."""

    def range(self) -> Range:
        """The bounds to represent; (inf, -inf) if nothing was seen."""


class MinMax:
    """The smallest and the largest value of all."""

    passes = 1

    def __init__(self) -> None:
        self.low, self.high = inf, -inf

    def see(self, x: torch.Tensor) -> None:
        if x.numel():
            low, high = torch.aminmax(x)
            self._take(float(low), float(high))

    def _take(self, low: float, high: float) -> None:
        self.low, self.high = min(self.low, low), max(self.high, high)

    def end_of_pass(self) -> None: ...

    def range(self) -> Range:
        return self.low, self.high


class MovingAverage(MinMax):
    """The bounds of the first sample, moved by ``MOMENTUM`` towards those of each later one."""

    def _take(self, low: float, high: float) -> None:
        if self.low > self.high:
            self.low, self.high = low, high
            return
        self.low += MOMENTUM * (low - self.low)
        self.high += MOMENTUM * (high - self.high)


class Histogram:
    """Counts in ``BINS`` equal bins between the extremes, which the first pass finds."""

    passes = 2

    def __init__(self, choose: Callable[[numpy.ndarray, Range], Range]) -> None:
        self._choose = choose
        self._extremes = MinMax()
        self._counts: numpy.ndarray | None = None

    def see(self, x: torch.Tensor) -> None:
        if self._counts is None:
            self._extremes.see(x)
        elif x.numel():
            low, high = self._extremes.range()
            self._counts += _counts(x, low, high)

    def end_of_pass(self) -> None:
        if self._counts is None:
            self._counts = numpy.zeros(BINS)

    def range(self) -> Range:
        low, high = self._extremes.range()
        if self._counts is None or not self._counts.sum() or low == high:
            return low, high
        return self._choose(self._counts, (low, high))


def make_observer(method: str) -> Observer:
    """For ``Config.calibration_method``."""
    if method == "min_max":
        return MinMax()
    if method == "moving_average":
        return MovingAverage()
    if method == "percentile":
        return Histogram(percentile_range)
    assert method == "entropy", method
    return Histogram(entropy_range)


def percentile_range(counts: numpy.ndarray, extremes: Range, share: float = SHARE) -> Range:
    """The narrowest bins' edges with at most (1 - ``share``) / 2 of the values beyond either one."""
    low, high = extremes
    width = (high - low) / len(counts)
    beyond = (1 - share) / 2 * counts.sum()
    first = int(numpy.searchsorted(numpy.cumsum(counts), beyond, side="right"))
    last = int(numpy.searchsorted(numpy.cumsum(counts[::-1]), beyond, side="right"))
    return low + first * width, high - last * width


def entropy_range(counts: numpy.ndarray, extremes: Range) -> Range:
    """The clipping threshold, the same on both sides of zero, of least divergence; within the extremes."""
    low, high = extremes
    limit = max(abs(low), abs(high))
    magnitudes = _fold(counts, low, high, limit)
    ends = numpy.arange(LEVELS, len(magnitudes) + 1, LEVELS // 8)
    divergences = [divergence(magnitudes, int(end)) for end in ends]
    threshold = limit * float(ends[int(numpy.argmin(divergences))]) / len(magnitudes)
    return max(low, -threshold), min(high, threshold)


def divergence(magnitudes: numpy.ndarray, end: int) -> float:
    """KL(values clipped at bin ``end`` || the same in ``LEVELS`` steps), both as distributions."""
    clipped = magnitudes[:end].astype(numpy.float64)
    quantized = clipped.copy()
    clipped[-1] += magnitudes[end:].sum()
    edges = numpy.arange(LEVELS + 1) * end // LEVELS
    level = numpy.repeat(numpy.arange(LEVELS), numpy.diff(edges))
    filled = quantized > 0
    sums = numpy.bincount(level, quantized, LEVELS)
    wide = numpy.bincount(level, filled, LEVELS)
    spread = numpy.where(filled, sums[level] / numpy.maximum(wide[level], 1), 0)
    p, q = _smooth(clipped), _smooth(spread)
    return float((p * numpy.log(p / q)).sum())


def _smooth(counts: numpy.ndarray) -> numpy.ndarray:
    """As probabilities, none of them zero."""
    total = counts.sum() or 1.0
    smooth = counts / total + 1e-9
    return numpy.asarray(smooth / smooth.sum())


def _counts(x: torch.Tensor, low: float, high: float) -> numpy.ndarray:
    values = x.detach().flatten().to(torch.float32)
    counted = torch.histc(values, BINS, low, high if high > low else low + 1)
    return counted.double().numpy()


def _fold(counts: numpy.ndarray, low: float, high: float, limit: float) -> numpy.ndarray:
    """Counts over [low, high] as counts of magnitudes over [0, limit]."""
    centers = low + (numpy.arange(len(counts)) + 0.5) * (high - low) / len(counts)
    index = numpy.minimum((numpy.abs(centers) / limit * BINS).astype(int), BINS - 1)
    return numpy.bincount(index, counts, BINS)
