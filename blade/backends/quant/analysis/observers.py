# SPDX-License-Identifier: Apache-2.0
"""Observers: they see an activation over all samples and choose the range to represent.

    observer = make_observer("entropy")
    for _ in range(observer.passes):         # some need two passes over the samples
        for x in seen: observer.see(x)
        observer.end_of_pass()
    low, high = observer.range()

``entropy`` minimizes the Kullback-Leibler divergence between the values and their clipped, quantized form
(Migacz, "8-bit inference with TensorRT", GTC 2017), ``percentile`` drops a share of the values at each end,
``moving_average`` averages the bounds over samples (Jacob et al., CVPR 2018).
"""

from collections.abc import Callable
from math import inf
from typing import Protocol

import numpy
import torch

BINS = 2048
LEVELS = 128  # quantized magnitudes for the entropy
SHARE = 0.9999  # of the values that "percentile" keeps
MOMENTUM = 0.1  # weight of a sample in the moving average

Range = tuple[float, float]


class Observer(Protocol):
    """Statistics of one activation; the caller of ``see`` rejects values that are not finite."""

    passes: int

    def see(self, x: torch.Tensor) -> None:
        """Record one sample's values."""

    def end_of_pass(self) -> None:
        """End a pass over all samples."""

    def range(self) -> Range:
        """The bounds to represent; (inf, -inf) if nothing was seen."""


class MinMax:
    """The smallest and the largest value."""

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
    """Counts in ``BINS`` equal bins between the extremes, which come from the first pass."""

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
    """The observer for a ``Config.calibration_method``."""
    if method == "min_max":
        return MinMax()
    if method == "moving_average":
        return MovingAverage()
    if method == "percentile":
        return Histogram(percentile_range)
    assert method == "entropy", method
    return Histogram(entropy_range)


def percentile_range(counts: numpy.ndarray, extremes: Range, share: float = SHARE) -> Range:
    """The narrowest bin edges with at most (1 - ``share``) / 2 of the values beyond each."""
    low, high = extremes
    width = (high - low) / len(counts)
    beyond = (1 - share) / 2 * counts.sum()
    first = int(numpy.searchsorted(numpy.cumsum(counts), beyond, side="right"))
    last = int(numpy.searchsorted(numpy.cumsum(counts[::-1]), beyond, side="right"))
    return low + first * width, high - last * width


def entropy_range(counts: numpy.ndarray, extremes: Range) -> Range:
    """The symmetric clipping range of least divergence, limited to the extremes."""
    low, high = extremes
    limit = max(abs(low), abs(high))
    magnitudes = _fold(counts, low, high, limit)
    ends = numpy.arange(LEVELS, len(magnitudes) + 1, LEVELS // 8)
    divergences = [divergence(magnitudes, int(end)) for end in ends]
    threshold = limit * float(ends[int(numpy.argmin(divergences))]) / len(magnitudes)
    return max(low, -threshold), min(high, threshold)


def divergence(magnitudes: numpy.ndarray, end: int) -> float:
    """KL(values clipped at bin ``end`` || these values in ``LEVELS`` steps), both as distributions."""
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
    """``counts`` as probabilities, none of them zero."""
    total = counts.sum() or 1.0
    smooth = counts / total + 1e-9
    return numpy.asarray(smooth / smooth.sum())


def _counts(x: torch.Tensor, low: float, high: float) -> numpy.ndarray:
    values = x.detach().flatten().to(torch.float32)
    counted = torch.histc(values, BINS, low, high if high > low else low + 1)
    return counted.double().numpy()


def _fold(counts: numpy.ndarray, low: float, high: float, limit: float) -> numpy.ndarray:
    """Fold counts over [low, high] into counts of magnitudes over [0, limit]."""
    centers = low + (numpy.arange(len(counts)) + 0.5) * (high - low) / len(counts)
    index = numpy.minimum((numpy.abs(centers) / limit * BINS).astype(int), BINS - 1)
    return numpy.bincount(index, counts, BINS)
