# SPDX-License-Identifier: Apache-2.0
"""First round: time each backend at its largest group. Backends that lose clearly are not tried at others.

    losers, reasons = first_round(task, builder)

Each backend has a partition of its own, which may have dozens of groups. Drop a backend that needs longer for
a subset of the ops than a rival needs for all of them, or that is 1.5x slower on (nearly) the same ops. A
backend that fails at its largest group is dropped as well: it may do better at others, but to find out would
cost a conversion each.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from blade.core.backend import Backend
from blade.core.reason import Code, Reason, Stage
from blade.partition.assignment import first_round_groups
from blade.report import Timing
from blade.report.interval import speed, speed_interval
from blade.selection.candidate_builder import CandidateBuilder
from blade.selection.plan.built import ClusterCandidates
from blade.selection.plan.select import Decision
from blade.selection.select_engines import select_engines
from blade.selection.task import Task
from blade.timing.decision import is_unclear

DOMINATED_BY = 1.1  # factor to a backend that covers no more ops and is nowhere faster
DOMINATED_BY_SPEEDUP = (
    1.5  # factor of the speed-ups, where each covers some ops that the other does not
)
SAME_COVERAGE = 0.95  # share of a group's ops that counts as all of them

Eliminated = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class _FirstRoundResult:
    """A backend's measured engine at its group."""

    backend: str
    built: ClusterCandidates
    timings: tuple[Timing, ...]

    @property
    def nodes(self) -> frozenset[int]:
        return frozenset(self.built.group.nodes)

    def describe(self) -> str:
        return f"{speed(self.timings)[0]:.2f}x the original's speed on {self.built.name}"


def first_round(task: Task, builder: CandidateBuilder) -> tuple[Eliminated, list[Reason]]:
    """Try each backend at one group, and return the backends that are not worth trying at others."""
    config, backends = task.config, task.backends
    if len(backends) < 2 or task.fixed or not config.timing:
        return {}, []
    with task.clock.stage("convert"):
        first = first_round_groups(task.plan.labels, backends, task.graph, config.min_cluster_size)
        builts = list(builder.build(first).values())
    with task.clock.stage("select"):
        decisions = select_engines(task, builts)
        for one in builts:
            builder.learn(one.group.nodes, decisions[one.name].tried)
    return eliminate_slow(builts, decisions, backends)


def eliminate_slow(
    builts: Sequence[ClusterCandidates],
    decisions: Mapping[str, Decision],
    backends: Sequence[Backend],
) -> tuple[Eliminated, list[Reason]]:
    """Return the nodes each eliminated backend was tried at, by backend in lower case, and the reasons.

    Backends that convert in this process are never eliminated: their conversions are quick, and they are the
    first choice elsewhere.
    """
    seen = [
        _FirstRoundResult(one.backend, built, one.timings)
        for built in builts
        for one in decisions[built.name].tried
        if one.timings
    ]
    slow = {b.name for b in backends if not b.in_process}
    losers, reasons = Eliminated(), []

    def lose(backend: str, built: ClusterCandidates, why: str) -> None:
        losers[backend.lower()] = built.group.nodes
        detail = f"{why}: it is tried at no other group than {built.name} ({len(built.group.nodes)} ops)."
        reasons.append(Reason(Stage.SELECT, Code.NOT_TRIED, backend, built.name, detail))

    for one in seen:
        ahead = [other for other in seen if _dominates(other, one)]
        if ahead and one.backend in slow:
            best = max(ahead, key=lambda s: speed(s.timings))
            lose(
                one.backend,
                one.built,
                f"it has {one.describe()}, {best.backend} has {best.describe()}",
            )
    for built in builts:
        served = any(
            _is_faster_than_original(other) and _coverage(built, other) > 0.5 for other in seen
        )
        for reason in built.reasons if served else ():
            if reason.backend in slow and reason.code in _FAILED:
                lose(reason.backend, built, f"it failed there ({reason.code.value})")
    return losers, reasons


_FAILED = (Code.CONVERSION_FAILED, Code.CONVERSION_CRASHED, Code.WRONG_VALUES, Code.ENGINE_RAISED)


def _is_faster_than_original(seen: _FirstRoundResult) -> bool:
    _, low, _ = speed_interval(seen.timings)
    return low > 1


def _coverage(built: ClusterCandidates, other: _FirstRoundResult) -> float:
    """Share of the ops of ``built`` that ``other`` covers."""
    nodes = frozenset(built.group.nodes)
    return len(nodes & other.nodes) / len(nodes)


def _dominates(ahead: _FirstRoundResult, behind: _FirstRoundResult) -> bool:
    share = _coverage(behind.built, ahead)
    mine, its = behind.timings, ahead.timings
    if is_unclear(mine) or is_unclear(its):
        return False
    if share >= SAME_COVERAGE and len(mine) == len(its):
        ratios = [a.engine_ms / b.engine_ms for a, b in zip(mine, its, strict=True)]
        return min(ratios) > 1 and geometric_mean(ratios) > DOMINATED_BY
    (slow, noise), (fast, also) = speed(mine), speed(its)
    return share > 0.5 and fast * (1 - also) > DOMINATED_BY_SPEEDUP * slow * (1 + noise)
