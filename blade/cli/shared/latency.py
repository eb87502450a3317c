# SPDX-License-Identifier: Apache-2.0
"""Latency and throughput of two calls in turns: percentiles of single calls, and calls per second of many callers.

mine, theirs = latencies([engine, original], seconds=2.0)      # mine.p99, ms
mine, theirs = throughput([engine, original], callers=8, seconds=2.0)
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy
import torch

from blade.timing.decision import MIN_ROUNDS, Ratio, Turn, compare
from blade.timing.interleaved import rest
from blade.timing.neighbours import NEIGHBOURS

BLOCK_S = 0.05  # seconds of calls of one function before the other's turn
MOST_CALLS = 100_000  # per function, of which latencies are kept

Call = Callable[[], Any]


@dataclass(frozen=True)
class Latency:
    """Percentiles of single calls, in ms; ``calls`` were timed."""

    p50: float
    p90: float
    p99: float
    calls: int


@dataclass(frozen=True)
class Throughput:
    """Calls per second of all callers together (median of windows), and the latency that each saw."""

    calls_per_s: float
    latency: Latency


def percentiles(seconds: Sequence[float]) -> Latency:
    """Return the percentiles of ``seconds``, of which there is at least one."""
    p50, p90, p99 = (1e3 * float(p) for p in numpy.percentile(seconds, (50, 90, 99)))
    return Latency(p50, p90, p99, len(seconds))


def latencies(calls: Sequence[Call], seconds: float) -> list[Latency]:
    """Return the latency of each of ``calls``, which take turns of many single calls."""
    found: list[list[float]] = [[] for _ in calls]
    end = perf_counter() + seconds * len(calls)
    while perf_counter() < end or not found[-1]:
        for call, mine in zip(calls, found, strict=True):
            rest()
            call()
            stop = perf_counter() + BLOCK_S
            while perf_counter() < stop and len(mine) < MOST_CALLS:
                mine.append(_timed(call))
    return [percentiles(mine) for mine in found]


def throughput(
    calls: Sequence[Call], callers: int, seconds: float, streams: int | None = None
) -> tuple[list[Throughput], list[Ratio]]:
    """Return the throughput of each of ``calls`` with so many callers at once, in turns, and how many times that of
    the last one each of the others has.

    On a GPU the callers share ``streams``; by default each has one.
    """
    pool = _streams(callers if streams is None else streams)
    turns: list[list[Turn]] = [[] for _ in calls]
    seen: list[list[float]] = [[] for _ in calls]
    for call in calls:
        _window(call, callers, 0.0, pool)  # warms up
    for k in range(MIN_ROUNDS):
        slowdown = NEIGHBOURS.slowdown()
        order = range(len(calls))
        for i in order if k % 2 else reversed(order):
            rest()
            mark = NEIGHBOURS.mark()
            each = _window(calls[i], callers, seconds / MIN_ROUNDS, pool)
            spent = perf_counter() - mark.wall
            taken, busy = NEIGHBOURS.since(mark)
            taken = taken if callers == 1 else 0.0  # callers wait for each other
            per_call = spent / len(each)
            turns[i].append(Turn(per_call, per_call, taken, busy, slowdown))
            seen[i] += each[:MOST_CALLS]
    found = [
        Throughput(1 / float(numpy.median([t.seconds for t in own])), percentiles(each))
        for own, each in zip(turns, seen, strict=True)
    ]
    return found, [compare(own, turns[-1]) for own in turns[:-1]]


def _window(
    call: Call, callers: int, seconds: float, streams: Sequence[torch.cuda.Stream]
) -> list[float]:
    """Return the seconds of every call of all callers, each of which makes at least one. What one raises passes."""
    start = threading.Barrier(callers)

    def run(k: int) -> list[float]:
        stream = torch.cuda.stream(streams[k % len(streams)]) if streams else nullcontext()
        mine: list[float] = []
        with torch.no_grad(), stream:
            start.wait()
            end = perf_counter() + seconds
            while perf_counter() < end or not mine:
                mine.append(_timed(call))
        return mine

    with ThreadPoolExecutor(callers) as pool:
        found = [pool.submit(run, k) for k in range(callers)]
        return [one for future in found for one in future.result()]


def _timed(call: Call) -> float:
    start = perf_counter()
    call()
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()
    return perf_counter() - start


def _streams(count: int) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream() for _ in range(count)] if torch.cuda.is_initialized() else []
