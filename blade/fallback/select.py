# SPDX-License-Identifier: Apache-2.0
"""Choose by measurement: an engine serves only where it was seen to be faster than the original.

    decision = select(original, candidates, samples, config)    # Decision: one candidate, or none

Engine and original are timed in turns, so that a machine that slows down slows both; the median of
the per-round ratios and its standard error decide (Georges et al., OOPSLA 2007, argue for as much).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import exp, log, sqrt
from statistics import median
from time import perf_counter
from typing import Any

import torch

from blade.config import Config
from blade.fallback.cases import Inputs
from blade.reason import Code, Reason, Stage
from blade.report import Timing, Verdict, shape_text

BUDGET_S = 2.0  # per sample and candidate; never fewer than MIN_ROUNDS rounds
MIN_ROUNDS = 5
PRECISION = 0.02  # noise of a speed-up at which no further rounds are needed
ROUND_S = 0.002  # what one side of a round takes at least: short calls are repeated
CLEARLY = 0.95  # a speed-up below this, noise included, is a loss at that sample


@dataclass(frozen=True)
class Candidate:
    """A verified engine and the module that calls it, with the original inside as its fallback."""

    backend: str
    engine: torch.ScriptObject
    module: torch.jit.ScriptModule
    verdict: Verdict
    timings: tuple[Timing, ...] = ()
    key: str | None = None  # what it is stored under (``stored``)
    recalled: bool = False  # it was stored, with the timings that speak for it


@dataclass(frozen=True)
class Decision:
    """``chosen`` is ``None`` where the original stays; ``reasons`` are those against the others."""

    chosen: Candidate | None
    reasons: tuple[Reason, ...]
    tried: tuple[Candidate, ...] = ()  # with their timings


def select(
    name: str,
    original: Callable[..., Any],
    candidates: Sequence[Candidate],
    samples: Sequence[Inputs],
    config: Config,
) -> Decision:
    """The fastest of ``candidates`` if it beats ``original``; unmeasured, the first one."""
    if not config.timing:
        return Decision(candidates[0] if candidates else None, (), tuple(candidates))
    tried: list[Candidate] = []
    reasons: list[Reason] = []
    best: Candidate | None = None
    for candidate in candidates:
        timed = _timed(candidate, original, samples, config.timing_repeats)
        tried.append(timed)
        if sentence := why_slower(timed.timings):
            reasons.append(_reason(timed, name, sentence))
        elif best is None or _geomean(timed.timings) > _geomean(best.timings):
            reasons += [_lost(best, timed, name)] if best else []
            best = timed
        else:
            reasons.append(_lost(timed, best, name))
    return Decision(best, tuple(reasons), tuple(tried))


def measure(
    engine: Callable[..., Any],
    original: Callable[..., Any],
    inputs: Inputs,
    rounds: int,
    clock: Callable[[], float] = perf_counter,
) -> Timing:
    """Median time of both on ``inputs``, in interleaved rounds."""
    with torch.no_grad():
        once = [_warm(fn, inputs, clock) for fn in (original, engine)]
        repeats = [max(1, int(ROUND_S / max(t, 1e-7))) for t in once]
        per_round = sum(max(t, ROUND_S) for t in once)
        rounds = max(min(rounds, MIN_ROUNDS), min(rounds, int(BUDGET_S / per_round)))
        pairs = []
        for i in range(rounds):
            theirs, mine = (original, repeats[0]), (engine, repeats[1])
            first, second = (theirs, mine) if i % 2 else (mine, theirs)
            a, b = _time(*first, inputs, clock), _time(*second, inputs, clock)
            pairs.append((a, b) if i % 2 else (b, a))
            if len(pairs) >= MIN_ROUNDS and _is_clear(timing := _timing(inputs, pairs)):
                return timing
    return _timing(inputs, pairs)


def _is_clear(timing: Timing) -> bool:
    """Known well enough, and no more rounds of such noise would turn a win into a loss."""
    return timing.spread <= PRECISION and abs(log(timing.speedup)) > 2 * timing.spread


def why_slower(timings: Sequence[Timing]) -> str | None:
    """``None`` if these timings are a win: faster on the geometric mean by more than the noise of
    measuring it, and clearly slower nowhere."""
    if not timings:
        return "it could not be measured: there is no sample."
    for t in timings:
        if t.speedup * (1 + t.spread) < CLEARLY:
            return (
                f"at {shape_text(t.shapes)} it takes {t.engine_ms:.3f} ms and the original {t.original_ms:.3f} ms "
                f"({t.speedup:.2f}x, noise {t.spread:.0%})."
            )
    mean = _geomean(timings)
    noise = sqrt(sum(t.spread**2 for t in timings)) / len(timings)
    if mean <= 1 + noise:
        return (
            f"over {len(timings)} sample(s) its speed is {mean:.2f}x the original's on the geometric "
            f"mean, which is no more than 1 + the noise of measuring it ({noise:.1%})."
        )
    return None


def _timed(
    candidate: Candidate, original: Callable[..., Any], samples: Sequence[Inputs], rounds: int
) -> Candidate:
    if candidate.recalled:
        return candidate
    timings = tuple(measure(candidate.module, original, one, rounds) for one in samples)
    return replace(candidate, timings=timings)


def _warm(fn: Callable[..., Any], inputs: Inputs, clock: Callable[[], float]) -> float:
    """Seconds of one call, after those in which TorchScript profiles and specializes."""
    for _ in range(3):
        fn(*inputs)
    return _time(fn, 1, inputs, clock)


def _time(
    fn: Callable[..., Any], repeats: int, inputs: Inputs, clock: Callable[[], float]
) -> float:
    _synchronize(inputs)
    start = clock()
    for _ in range(repeats):
        fn(*inputs)
    _synchronize(inputs)
    return (clock() - start) / repeats


def _synchronize(inputs: Inputs) -> None:
    if any(t.is_cuda for t in inputs):
        torch.cuda.synchronize()


def _timing(inputs: Inputs, pairs: Sequence[tuple[float, float]]) -> Timing:
    """From (original, engine) seconds per round; ``spread`` is two standard errors of the median ratio."""
    ratios = [a / b for a, b in pairs]
    middle = median(ratios)
    deviation = 1.4826 * median(abs(r - middle) for r in ratios) / middle
    engine = median(b for _, b in pairs)
    return Timing(
        shapes=tuple(tuple(t.shape) for t in inputs),
        original_ms=1e3 * engine * middle,
        engine_ms=1e3 * engine,
        spread=2 * 1.2533 * deviation / sqrt(len(ratios)),
    )


def _geomean(timings: Sequence[Timing]) -> float:
    return exp(sum(log(t.speedup) for t in timings) / len(timings))


def _lost(loser: Candidate, winner: Candidate, name: str) -> Reason:
    mine, theirs = _geomean(loser.timings), _geomean(winner.timings)
    sentence = f"it is {mine:.2f}x the original's speed, {winner.backend} is {theirs:.2f}x."
    return _reason(loser, name, sentence)


def _reason(candidate: Candidate, name: str, sentence: str) -> Reason:
    return Reason(Stage.SELECT, Code.SLOWER, candidate.backend, name, sentence)
