# SPDX-License-Identifier: Apache-2.0
"""Choose by measurement: an engine serves only where it was seen to be faster than the original.

    decision = select("cluster_0", original, candidates, samples, config)    # one candidate, or none

What a choice of several clusters is worth together is another question: ``compose``.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from blade.config import Config
from blade.fallback.attempt import attempt
from blade.fallback.candidate import Candidate, Weights
from blade.fallback.cases import Inputs
from blade.fallback.measure import is_faster, measure_all, speed, why_slower
from blade.fallback.table import Table, find_table
from blade.fallback.time_budget import UNLIMITED, TimeBudget
from blade.graph.extract import Extracted
from blade.reason import Code, Reason, Stage
from blade.report import Timing
from blade.turns import TURNS


@dataclass(frozen=True)
class Decision:
    """``chosen`` is ``None`` where the original stays; ``reasons`` are those against the others.

    ``tried`` are all, with their timings, in the order of the backends; ``winners`` those among them that
    are faster than the original. ``table`` is what several of them would make by size, if that pays.
    """

    chosen: Candidate | None
    reasons: tuple[Reason, ...]
    tried: tuple[Candidate, ...] = ()
    winners: tuple[Candidate, ...] = ()
    table: Table | None = None


def select(
    name: str,
    original: Callable[..., Any],
    candidates: Sequence[Candidate],
    samples: Sequence[Inputs],
    config: Config,
    weights: Weights = None,
    budget: TimeBudget = UNLIMITED,
) -> Decision:
    """The fastest of ``candidates`` if it beats ``original``, the earlier one of two that are as fast;
    unmeasured, the first one. ``weights`` are those of ``samples``."""
    if not config.timing:
        first = tuple(candidates[:1])
        return Decision(candidates[0] if candidates else None, (), tuple(candidates), first)
    timed, reasons = _timed(name, candidates, original, samples, config, budget)
    winners: list[Candidate] = []
    for one in timed:
        if sentence := why_slower(one.timings, weights):
            reasons.append(_reason(one, name, sentence))
        else:
            winners.append(one)
    best = fastest(winners, weights)
    reasons += [_lost(one, best, name, weights) for one in winners if best and one is not best]
    table = find_table([one for one in timed if one.engine is not None], samples, weights)
    known = {one.backend: one for one in timed}
    tried = tuple(known.get(one.backend, one) for one in candidates)
    return Decision(best, tuple(reasons), tried, tuple(winners), table)


def fastest(candidates: Sequence[Candidate], weights: Weights = None) -> Candidate | None:
    """The first of those that no other one beats beyond noise, compared with the fastest of all."""
    if not candidates or not candidates[0].timings:
        return next(iter(candidates), None)
    speeds = [speed(c.timings, weights) for c in candidates]
    top = max(speeds)
    return next(c for c, s in zip(candidates, speeds, strict=True) if not is_faster(top, s))


def weights_of(extracted: Extracted, config: Config) -> Weights:
    """Those of the cluster's samples: a sample of the user that reached it several times is split."""
    if config.sample_weights is None:
        return None
    times = Counter(extracted.origins)
    return [config.sample_weights[i] / times[i] for i in extracted.origins]


def _timed(
    name: str,
    candidates: Sequence[Candidate],
    original: Callable[..., Any],
    samples: Sequence[Inputs],
    config: Config,
    budget: TimeBudget,
) -> tuple[list[Candidate], list[Reason]]:
    """Those with timings, and the reasons of those without. Out of time, the first one is measured alone; what
    has timings already (from the cache, or from ``scouts``) is not measured again."""
    fresh = [one for one in candidates if not one.timings and one.module is not None]
    late: list[Candidate] = []
    if not budget.left():
        count = int(fresh[:1] == list(candidates[:1]) and not budget.is_cancelled)
        fresh, late = fresh[:count], fresh[count:]
    found = _race(name, fresh, original, samples, config)
    why = budget.why_ended("it was measured") if late else ""
    found |= {
        one.backend: Reason(Stage.SELECT, Code.TIME_BUDGET, one.backend, name, why) for one in late
    }
    results = [found.get(one.backend, one) for one in candidates]
    reasons = [one for one in results if isinstance(one, Reason)]
    return [one for one in results if isinstance(one, Candidate)], reasons


def _race(
    name: str,
    candidates: Sequence[Candidate],
    original: Callable[..., Any],
    samples: Sequence[Inputs],
    config: Config,
) -> dict[str, Candidate | Reason]:
    """By backend, measured in turns with each other; where one raises, each on its own."""
    if not candidates:
        return {}
    who = candidates[0].backend if len(candidates) == 1 else None

    def timed() -> list[tuple[Timing, ...]]:
        modules = [one.module for one in candidates if one.module is not None]
        with TURNS.timing():
            per_sample = [
                measure_all(modules, original, [x] * (len(modules) + 1), config.timing_repeats)
                for x in samples
            ]
        return list(zip(*per_sample, strict=True))

    alone = who is not None
    found = attempt(Stage.SELECT, who, name, timed, config.strict and alone, Code.ENGINE_RAISED)
    if not isinstance(found, Reason):
        pairs = zip(candidates, found, strict=True)
        return {one.backend: replace(one, timings=timings) for one, timings in pairs}
    if alone:
        return {candidates[0].backend: found}
    several = [_race(name, [one], original, samples, config) for one in candidates]
    return {backend: result for one in several for backend, result in one.items()}


def _lost(loser: Candidate, winner: Candidate, name: str, weights: Weights) -> Reason:
    (mine, _), (theirs, _) = speed(loser.timings, weights), speed(winner.timings, weights)
    sentence = f"it is {mine:.2f}x the original's speed, {winner.backend} is {theirs:.2f}x."
    return _reason(loser, name, sentence)


def _reason(candidate: Candidate, name: str, sentence: str) -> Reason:
    return Reason(Stage.SELECT, Code.SLOWER, candidate.backend, name, sentence)
