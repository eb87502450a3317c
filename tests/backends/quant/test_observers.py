# SPDX-License-Identifier: Apache-2.0
"""Observers against what their definitions say, computed the slow way."""

import math
from collections.abc import Sequence

import numpy
import pytest
import torch

from blade.backends.quant.analysis.observers import (
    BINS,
    LEVELS,
    MOMENTUM,
    Range,
    divergence,
    entropy_range,
    make_observer,
    percentile_range,
)

METHODS = ("min_max", "moving_average", "percentile", "entropy")


def samples(count: int = 5, outlier: float = 0.0) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    every = [torch.randn(400, 100, generator=rng) * (1 + i) for i in range(count)]
    every[-1][0, 0] += outlier
    return every


def observed(method: str, seen: Sequence[torch.Tensor]) -> Range:
    observer = make_observer(method)
    for _ in range(observer.passes):
        for x in seen:
            observer.see(x)
        observer.end_of_pass()
    return observer.range()


def test_min_max_is_that_of_everything() -> None:
    every = torch.cat(samples())
    assert observed("min_max", samples()) == (float(every.min()), float(every.max()))


def test_moving_average_follows_sample_by_sample() -> None:
    low, high = (float(f(samples()[0])) for f in (torch.min, torch.max))
    for x in samples()[1:]:
        low = (1 - MOMENTUM) * low + MOMENTUM * float(x.min())
        high = (1 - MOMENTUM) * high + MOMENTUM * float(x.max())
    assert observed("moving_average", samples()) == pytest.approx((low, high))


def test_percentile_leaves_out_that_share_at_each_end() -> None:
    every = torch.cat(samples(outlier=1000.0)).flatten().double().numpy()
    low, high = observed("percentile", samples(outlier=1000.0))
    width = (every.max() - every.min()) / BINS
    assert low == pytest.approx(numpy.quantile(every, 0.00005), abs=2 * width)
    assert high == pytest.approx(numpy.quantile(every, 0.99995), abs=2 * width)
    assert high < 100


def test_percentile_of_counts() -> None:
    counts = numpy.array([1.0, 0, 5, 88, 5, 0, 1])
    assert percentile_range(counts, (0.0, 7.0), share=0.99) == (0.0, 7.0)
    assert percentile_range(counts, (0.0, 7.0), share=0.97) == (2.0, 5.0)
    assert percentile_range(counts, (0.0, 7.0), share=1.0) == (0.0, 7.0)


def slow_divergence(counts: Sequence[float], end: int) -> float:
    """As in Migacz' slides, one bin at a time."""
    p = list(counts[:end])
    p[-1] += sum(counts[end:])
    q = [0.0] * end
    for level in range(LEVELS):
        bins = range(level * end // LEVELS, (level + 1) * end // LEVELS)
        filled = [b for b in bins if counts[b] > 0]
        for b in filled:
            q[b] = sum(counts[i] for i in bins) / len(filled)

    def smooth(values: Sequence[float]) -> list[float]:
        shares = [v / (sum(values) or 1.0) + 1e-9 for v in values]
        return [s / sum(shares) for s in shares]

    return sum(a * math.log(a / b) for a, b in zip(smooth(p), smooth(q), strict=True))


@pytest.mark.parametrize("end", [LEVELS, 200, 777, BINS])
def test_divergence_is_that_of_the_definition(end: int) -> None:
    rng = numpy.random.default_rng(0)
    counts = rng.poisson(1000 * numpy.exp(-numpy.arange(BINS) / 200.0)).astype(float)
    assert divergence(counts, end) == pytest.approx(slow_divergence(counts.tolist(), end))


def test_entropy_clips_an_outlier_and_keeps_an_even_distribution() -> None:
    low, high = observed("entropy", samples(outlier=200.0))
    assert high < 60
    assert low >= float(torch.cat(samples()).min())
    rng = torch.Generator().manual_seed(1)
    even = [torch.rand(100, 100, generator=rng)]
    assert observed("entropy", even) == pytest.approx((0.0, 1.0), abs=0.05)


def test_entropy_takes_the_least_divergence() -> None:
    rng = numpy.random.default_rng(1)
    counts = rng.poisson(500 * numpy.exp(-numpy.arange(BINS) / 100.0)).astype(float)
    _, high = entropy_range(counts, (0.0, 1.0))
    ends = range(LEVELS, BINS + 1, LEVELS // 8)
    folded = counts  # all of it is positive already
    best = min(ends, key=lambda end: slow_divergence(folded.tolist(), end))
    assert high == pytest.approx(best / BINS, abs=LEVELS / 8 / BINS)


@pytest.mark.parametrize("method", METHODS)
def test_constants_and_nothing(method: str) -> None:
    assert observed(method, [torch.full((3,), 2.5)]) == (2.5, 2.5)
    low, high = observed(method, [torch.empty(0, 4)])
    assert low > high
