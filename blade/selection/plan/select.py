# SPDX-License-Identifier: Apache-2.0
"""Choose by measurement: an engine serves only if it was measured faster than the original.

    decision = select("cluster_0", original, candidates, samples, config)    # one candidate, or none

``assemble`` times the choices of several clusters together.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from blade.config import Config
from blade.core.attempt import attempt
from blade.core.captured import Captured
from blade.core.reason import Code, Reason, Stage
from blade.errors import ConfigError
from blade.graph.torchscript.extract import Extracted
from blade.process.timing_lock import TIMING_LOCK
from blade.report import Timing
from blade.report.interval import speed
from blade.selection.plan.candidate import Candidate, Weights
from blade.selection.plan.size_dispatch import SizeDispatch, find_size_dispatch
from blade.timing.decision import MIN_ROUNDS, Outcome, SpeedDecision, decide, is_faster
from blade.timing.interleaved import EARLY_EXIT_S, measure_all
from blade.timing.time_budget import UNLIMITED, TimeBudget
from blade.verification.cases import Inputs


@dataclass(frozen=True)
class Decision:
    """``chosen`` is ``None`` where the original stays; ``reasons`` are those against the other candidates.

    ``tried`` holds all candidates with their timings, in the order of the backends; ``winners`` those among
    them that are faster than the original. ``table`` is a size dispatch among several of them, if that pays.
    """

    chosen: Candidate | None
    reasons: tuple[Reason, ...]
    tried: tuple[Candidate, ...] = ()
    winners: tuple[Candidate, ...] = ()
    table: SizeDispatch | None = None


def select(
    name: str,
    original: Callable[..., Any],
    candidates: Sequence[Candidate],
    samples: Sequence[Inputs],
    config: Config,
    weights: Weights = None,
    budget: TimeBudget = UNLIMITED,
) -> Decision:
    """Return the fastest of ``candidates`` if it beats ``original``, the earlier one of two that are as fast;
    without timing, the first one. ``weights`` are those of ``samples``."""
    if not config.timing:
        first = tuple(candidates[:1])
        return Decision(candidates[0] if candidates else None, (), tuple(candidates), first)
    timed, reasons = _timed(name, candidates, original, samples, config, budget)
    winners: list[Candidate] = []
    for one in timed:
        found = decide(one.timings, weights)
        if found.serves:
            winners.append(one)
        else:
            reasons.append(against(one, name, found))
    best = fastest(winners, weights)
    reasons += kept(best, name, weights)
    reasons += [lost(one, best, name, weights) for one in winners if best and one is not best]
    table = find_size_dispatch([one for one in timed if one.engine is not None], samples, weights)
    known = {one.backend: one for one in timed}
    tried = tuple(known.get(one.backend, one) for one in candidates)
    return Decision(best, tuple(reasons), tried, tuple(winners), table)


def fastest(candidates: Sequence[Candidate], weights: Weights = None) -> Candidate | None:
    """Return the first candidate that is as fast as the fastest, within noise."""
    if not candidates or not candidates[0].timings:
        return next(iter(candidates), None)
    speeds = [speed(c.timings, weights) for c in candidates]
    top = max(speeds)
    return next(c for c, s in zip(candidates, speeds, strict=True) if not is_faster(top, s))


def weights_of(extracted: Extracted, config: Config) -> Weights:
    """Weights of the cluster's samples; a user sample that reaches the cluster several times is split."""
    if config.sample_weights is None:
        return None
    times = Counter(extracted.origins)
    return [config.sample_weights[i] / times[i] for i in extracted.origins]


def check_weights(captured: Captured, config: Config) -> None:
    """Raise ``ConfigError`` unless there is one weight per sample."""
    given, count = config.sample_weights, len(captured.samples)
    if given is not None and len(given) != count:
        tuning = " and shapes of dynamic_tuning_shapes" if config.dynamic_tuning_shapes else ""
        raise ConfigError(
            f"Config.sample_weights has {len(given)} entries; there are {count} samples{tuning}."
        )


def _timed(
    name: str,
    candidates: Sequence[Candidate],
    original: Callable[..., Any],
    samples: Sequence[Inputs],
    config: Config,
    budget: TimeBudget,
) -> tuple[list[Candidate], list[Reason]]:
    """Return candidates with timings, and the reasons of those without. Out of time, only the first is
    measured, in few rounds. Candidates with timings (from the cache or the first round) are not measured again."""
    fresh = [one for one in candidates if not one.timings and one.module is not None]
    late: list[Candidate] = []
    if hurry := not budget.left():
        count = int(fresh[:1] == list(candidates[:1]) and not budget.is_cancelled)
        fresh, late = fresh[:count], fresh[count:]
    found = _race(name, fresh, original, samples, config, hurry)
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
    hurry: bool,
) -> dict[str, Candidate | Reason]:
    """Time the candidates in turns, by backend; where one raises, time each on its own. ``hurry``: one round is
    enough where it shows a clear win."""
    if not candidates:
        return {}
    who = candidates[0].backend if len(candidates) == 1 else None
    rounds, early_exit_s = (MIN_ROUNDS, EARLY_EXIT_S) if hurry else (config.timing_repeats, inf)

    def timed() -> list[tuple[Timing, ...]]:
        modules = [one.module for one in candidates if one.module is not None]
        with TIMING_LOCK.timing():
            per_sample = [
                measure_all(
                    modules,
                    original,
                    [x] * (len(modules) + 1),
                    rounds,
                    early_exit_s=early_exit_s,
                )
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
    several = [_race(name, [one], original, samples, config, hurry) for one in candidates]
    return {backend: result for one in several for backend, result in one.items()}


def against(one: Candidate, name: str, found: SpeedDecision) -> Reason:
    """Reason why ``one`` does not serve the cluster called ``name``."""
    if found.outcome is Outcome.UNCLEAR and one.timings:
        detail = f"{found.sentence} It does not serve."
        return Reason(Stage.SELECT, Code.TOO_NOISY, one.backend, name, detail)
    code = Code.SLOWER if found.outcome is Outcome.SLOWER else Code.NOT_FASTEST
    return Reason(Stage.SELECT, code, one.backend, name, found.sentence)


def kept(best: Candidate | None, name: str, weights: Weights = None) -> list[Reason]:
    """Return the reason that ``best`` serves although noise hides by how much it wins, if so."""
    if best is None or not best.timings:
        return []
    found = decide(best.timings, weights)
    if found.outcome is not Outcome.UNCLEAR:
        return []
    detail = f"{best.backend}: {found.sentence} It is kept."
    return [Reason(Stage.SELECT, Code.TOO_NOISY, None, name, detail)]


def lost(loser: Candidate, winner: Candidate, name: str, weights: Weights = None) -> Reason:
    """Reason why ``loser`` does not serve the cluster called ``name``: ``winner`` is faster."""
    (mine, _), (theirs, _) = speed(loser.timings, weights), speed(winner.timings, weights)
    sentence = f"it is {mine:.2f}x the original's speed, {winner.backend} is {theirs:.2f}x."
    return Reason(Stage.SELECT, Code.NOT_FASTEST, loser.backend, name, sentence)
