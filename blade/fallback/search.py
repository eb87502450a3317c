# SPDX-License-Identifier: Apache-2.0
"""The search for the fastest engines: build what may serve, measure it, put the best together.

decided = search(Task(captured, graph_view, plan.labels, backends, config, budget), clock.stage)
decided.confirmed.module, decided.clusters
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import cast

import torch

from blade.backends.base import Backend
from blade.cache import open_cache
from blade.capture.captured import Captured
from blade.config import Config
from blade.fallback.builder import Builder
from blade.fallback.built import Built, Partition
from blade.fallback.candidate import Candidate
from blade.fallback.compile import compile_clusters
from blade.fallback.compose import confirm
from blade.fallback.decided import Decided
from blade.fallback.propose import WHOLE, Choice, propose
from blade.fallback.scouts import Losers, find_losers
from blade.fallback.select import Decision, select, weights_of
from blade.fallback.stored import Contents, keep
from blade.fallback.takers import scouts
from blade.fallback.time_budget import TimeBudget
from blade.graph.listing import kind_of
from blade.graph.samples import Samples
from blade.graph.view import GraphView
from blade.precision import precision_of
from blade.progress import announce
from blade.reason import Code, Reason, Stage
from blade.report import ORIGINAL, ClusterReport, LayerPrecision, Tried
from blade.runtime.engine import Engine

Stages = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True)
class Task:
    """What is to be optimized, with what, and for how long; ``labels`` say who takes which node."""

    captured: Captured
    graph: GraphView
    labels: Sequence[frozenset[str]]
    backends: Sequence[Backend]
    config: Config
    budget: TimeBudget
    contents: Contents = field(default_factory=Contents)
    samples: Samples | None = None
    fixed: bool = False  # the clusters of the mixture, one engine each


def search(task: Task, stage: Stages) -> Decided:
    """The best that was found, and the reports on its clusters; ``stage`` measures "convert", "select"
    and "splice"."""
    captured, config, budget = task.captured, task.config, task.budget
    samples = task.samples or Samples(captured, task.graph)
    builder = Builder(captured, task.graph, task.backends, config, samples, budget, task.contents)
    losers, against = _look_first(task, builder, stage)
    with stage("convert"):
        partitions, failed = compile_clusters(builder, task.labels, losers, task.fixed)
    with stage("select"):
        decisions = _decide(task, [one for p in partitions for one in p.built])
        if task.fixed:
            decisions = {name: replace(one, table=None) for name, one in decisions.items()}
    cut_short = _cut_short(partitions, decisions, budget)
    del builder  # and with it every engine that lost
    partitions = [_without_candidates(one) for one in partitions]
    with stage("splice"):
        names = [b.name for b in task.backends]
        compositions = propose(partitions, decisions, names, config)
        made = confirm(captured, compositions, names, config, budget, not task.fixed)
    return Decided(
        confirmed=made,
        clusters=tuple(
            _cluster_report(task.graph, c, decisions[c.built.name])
            for c in made.composition.choices
        ),
        reasons=(*against, *failed, *cut_short, *made.reasons, *made.composition.reasons),
        is_cut_short=bool(cut_short),
    )


def _look_first(task: Task, builder: Builder, stage: Stages) -> tuple[Losers, list[Reason]]:
    """Every backend at one group, to know which ones are worth trying at the others."""
    config, backends = task.config, task.backends
    if len(backends) < 2 or task.fixed or not config.timing:
        return {}, []
    with stage("convert"):
        first = scouts(task.labels, backends, task.graph, config.min_cluster_size)
        builts = list(builder.build(first).values())
    with stage("select"):
        decisions = _decide(task, builts)
        for one in builts:
            builder.learn(one.group.nodes, decisions[one.name].tried)
    return find_losers(builts, decisions, backends)


def _decide(task: Task, builts: Sequence[Built]) -> dict[str, Decision]:
    """By cluster."""
    cache = open_cache(task.config.cache)
    decisions: dict[str, Decision] = {}
    every = {one.name: one for one in builts}
    for done, built in enumerate(every.values()):
        announce("select", done, len(every), built.name)
        decision = _decide_one(built, task.config, task.budget)
        if cache is not None:
            for candidate in decision.tried:
                keep(cache, candidate)
        decisions[built.name] = replace(decision, tried=_without_losers(decision))
    return decisions


def _cut_short(
    partitions: Sequence[Partition], decisions: Mapping[str, Decision], budget: TimeBudget
) -> list[Reason]:
    """That more would have been tried with more time, if so, whether or not that is part of what serves."""
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


def _without_candidates(partition: Partition) -> Partition:
    """Who serves is decided: the decisions have them."""
    return replace(partition, built=tuple(replace(b, candidates=()) for b in partition.built))


def _without_losers(decision: Decision) -> tuple[Candidate, ...]:
    """What was tried; only what may yet serve keeps its engine."""
    table = decision.table.serving if decision.table is not None else ()
    serving = {c.backend for c in (*decision.winners, *table) if c is not None}
    return tuple(
        c if not c.timings else replace(c if c.backend in serving else c.released(), stored=True)
        for c in decision.tried
    )


def _decide_one(built: Built, config: Config, budget: TimeBudget) -> Decision:
    if built.extracted is None or not built.candidates:
        return Decision(None, ())
    cut, weights = built.extracted, weights_of(built.extracted, config)
    return select(built.name, cut.fallback, built.candidates, cut.samples, config, weights, budget)


def _cluster_report(graph: GraphView, choice: Choice, decision: Decision) -> ClusterReport:
    built, served = choice.built, choice.served
    serving = served.backend.split("+") if served else []
    # of several by size, each is slower than another one somewhere
    lost = [r for r in decision.reasons if r.backend not in serving]
    reasons = (*built.reasons, *lost)
    return ClusterReport(
        name=built.name,
        ops=dict(Counter(kind_of(graph.nodes[n]) for n in built.group.nodes)),
        backend=served.backend if served else ORIGINAL,
        timings=served.timings if served else (),
        verdict=served.verdict if served else None,
        reasons=reasons,
        tried=_tried(built, decision, serving, reasons),
        sizes=str(choice.table) if choice.table else "",
        precision=_precision(served.engines if served else ()),
    )


def _tried(
    built: Built, decision: Decision, chosen: Sequence[str], reasons: Sequence[Reason]
) -> tuple[Tried, ...]:
    """Every backend that takes the cluster, in their order; unmeasured, those after the first that
    serves are not tried."""
    candidates = {c.backend: c for c in decision.tried}
    against = {r.backend: r for r in reasons}
    found = []
    for name in built.takers:
        one, reason = candidates.get(name), against.get(name)
        if one is not None:
            found.append(Tried(name, name in chosen, one.timings, one.verdict, reason))
        elif reason is not None:
            found.append(Tried(name, False, reason=reason))
    return tuple(found)


def _precision(engines: Sequence[torch.ScriptObject]) -> tuple[LayerPrecision, ...]:
    return tuple(one for e in engines for one in precision_of(cast(Engine, e).program()))
