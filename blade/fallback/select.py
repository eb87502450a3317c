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
from blade.fallback.measure import is_faster, measure, speed, why_slower
from blade.fallback.table import Table, find_table
from blade.fallback.time_budget import UNLIMITED, TimeBudget
from blade.graph.extract import Extracted
from blade.reason import Code, Reason, Stage
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
    tried: list[Candidate] = []
    reasons: list[Reason] = []
    winners: list[Candidate] = []
    for i, candidate in enumerate(candidates):
        own = budget if i or budget.is_cancelled else UNLIMITED
        timed = _timed(name, candidate, original, samples, config, own)
        if isinstance(timed, Reason):
            tried.append(candidate)
            reasons.append(timed)
            continue
        tried.append(timed)
        if sentence := why_slower(timed.timings, weights):
            reasons.append(_reason(timed, name, sentence))
        else:
            winners.append(timed)
    best = fastest(winners, weights)
    reasons += [_lost(one, best, name, weights) for one in winners if best and one is not best]
    table = find_table(tried, samples, weights)
    return Decision(best, tuple(reasons), tuple(tried), tuple(winners), table)


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
    candidate: Candidate,
    original: Callable[..., Any],
    samples: Sequence[Inputs],
    config: Config,
    budget: TimeBudget,
) -> Candidate | Reason:
    if candidate.recalled:
        return candidate
    if not budget.left():
        why = budget.why_ended("it was measured")
        return Reason(Stage.SELECT, Code.TIME_BUDGET, candidate.backend, name, why)

    def timed() -> Candidate:
        with TURNS.timing():
            rounds = config.timing_repeats
            timings = [measure(candidate.module, original, one, rounds) for one in samples]
        return replace(candidate, timings=tuple(timings))

    return attempt(Stage.SELECT, candidate.backend, name, timed, config.strict, Code.ENGINE_RAISED)


def _lost(loser: Candidate, winner: Candidate, name: str, weights: Weights) -> Reason:
    (mine, _), (theirs, _) = speed(loser.timings, weights), speed(winner.timings, weights)
    sentence = f"it is {mine:.2f}x the original's speed, {winner.backend} is {theirs:.2f}x."
    return _reason(loser, name, sentence)


def _reason(candidate: Candidate, name: str, sentence: str) -> Reason:
    return Reason(Stage.SELECT, Code.SLOWER, candidate.backend, name, sentence)
