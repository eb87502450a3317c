# SPDX-License-Identifier: Apache-2.0
"""Time the candidates of every cluster and keep the engines that may serve.

decisions = select_engines(task, built)          # by cluster, each with the reasons against the others
partitions = [without_candidates(one) for one in partitions]
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from blade.config import Config
from blade.core.progress import announce
from blade.core.reason import Code, Reason, Stage
from blade.selection.cache.engines import put_engine
from blade.selection.plan.built import ClusterCandidates, Partition
from blade.selection.plan.candidate import Candidate
from blade.selection.plan.compositions import WHOLE
from blade.selection.plan.select import Decision, select, weights_of
from blade.selection.task import Task
from blade.timing.time_budget import TimeBudget


def select_engines(task: Task, builts: Sequence[ClusterCandidates]) -> dict[str, Decision]:
    """Return the decision of each cluster, by name. Losing engines are stored in the cache and released."""
    decisions: dict[str, Decision] = {}
    every = {one.name: one for one in builts}
    for done, built in enumerate(every.values()):
        announce("select", done, len(every), built.name)
        decision = _decide_one(built, task.config, task.budget)
        for candidate in decision.tried:
            put_engine(task.config, candidate)
        table = None if task.fixed else decision.table
        decisions[built.name] = replace(
            decision, tried=_without_losing_engines(decision), table=table
        )
    return decisions


def cut_short(
    partitions: Sequence[Partition], decisions: Mapping[str, Decision], budget: TimeBudget
) -> list[Reason]:
    """Reasons of the candidates that the time budget left out, whether or not they are part of the plan."""
    every = {one.name: one for p in partitions for one in p.built}
    late = {
        (one.name, reason.backend)
        for one in every.values()
        for reason in (*one.reasons, *decisions[one.name].reasons)
        if reason.code is Code.TIME_BUDGET
    }
    if not late and budget.left():
        return []
    return [Reason(Stage.SELECT, Code.TIME_BUDGET, None, WHOLE, budget.says_cut_short(len(late)))]


def without_candidates(partition: Partition) -> Partition:
    """Drop the partition's candidates: the decisions hold those that may serve."""
    return replace(partition, built=tuple(replace(b, candidates=()) for b in partition.built))


def _without_losing_engines(decision: Decision) -> tuple[Candidate, ...]:
    """All tried candidates; only those that may still serve keep their engines."""
    table = decision.table.serving if decision.table is not None else ()
    serving = {c.backend for c in (*decision.winners, *table) if c is not None}
    return tuple(
        c if not c.timings else replace(c if c.backend in serving else c.released(), stored=True)
        for c in decision.tried
    )


def _decide_one(built: ClusterCandidates, config: Config, budget: TimeBudget) -> Decision:
    if built.extracted is None or not built.candidates:
        return Decision(None, ())
    cut, weights = built.extracted, weights_of(built.extracted, config)
    return select(built.name, cut.fallback, built.candidates, cut.samples, config, weights, budget)
