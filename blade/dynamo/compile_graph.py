# SPDX-License-Identifier: Apache-2.0
"""Compile a functional FX graph to one with engines: support, cluster, convert, assemble.

compiled = compile_fx(gm, config, "graph_0", constants={})
compiled.run(*inputs), compiled.report()
"""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch.fx import GraphModule, Node

from blade.backends import registry
from blade.clustering.cluster import cluster, schedule
from blade.clustering.problem import Group
from blade.config import Config
from blade.core.attempt import attempt
from blade.core.backend import Backend
from blade.core.disk_cache import untrusted
from blade.core.hardware import cpu_name
from blade.core.reason import Reason, Stage
from blade.dynamo.cluster_module import FirstCall, FxClusterModule, item
from blade.dynamo.compete import Competition
from blade.dynamo.engine_cache import StoredEngines, look_up_engines
from blade.dynamo.forward_backward import is_saved
from blade.dynamo.live_graphs import track
from blade.dynamo.rewrites import apply_rewrites
from blade.dynamo.saved_graph import save_graph
from blade.fallback.bisect import (
    BISECT_S,
    Failure,
    Labels,
    bisect,
    blamed,
    build_without_culprits,
)
from blade.graph.fx.extract import FxExtracted, as_laid_out, extract_fx
from blade.graph.fx.kept_views import is_kept_view
from blade.graph.fx.view import FxView, is_number, view_fx
from blade.graph.fx.write_in_place import write_in_place
from blade.graph.shapes.fake_tensors import sole_owners
from blade.graph.torchscript.listing import kind_of
from blade.partition.support import resolve, support
from blade.report import ORIGINAL, ClusterReport, Report, Tried, versions
from blade.runtime.engine import Engine
from blade.selection.build_candidates import convert_each
from blade.timing.stage_clock import StageClock
from blade.timing.stopwatch import Stopwatch
from blade.timing.time_budget import TimeBudget

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GraphPart:
    """A group, and the module that serves it if any backend converts it."""

    name: str
    cut: FxExtracted | None
    group: tuple[int, ...]
    label: frozenset[str]
    served: FxClusterModule | None
    reasons: tuple[Reason, ...]


@dataclass(frozen=True, eq=False)
class CompiledGraph:
    """Has the inputs and outputs of the original graph."""

    name: str
    run: GraphModule
    view: FxView
    parts: tuple[GraphPart, ...]
    reasons: tuple[Reason, ...]
    seconds: Mapping[str, float]

    def __call__(self, *args: Any) -> Any:
        return self.run.forward(*args)

    def save(self) -> bytes:
        """The graph for another process (``saved_graph``)."""
        return save_graph(self.name, self.run, self.report(), {})

    def engines(self) -> Mapping[str, Engine]:
        """The engine of each cluster that has one."""
        served = [part.served for part in self.parts if part.served is not None]
        return {one.name: one.engine() for one in served}

    def is_served(self) -> bool | None:
        """Whether an engine serves; ``None`` if some compete at a call to come, and none serves yet."""
        states = [part.served.is_served() for part in self.parts if part.served is not None]
        return True if True in states else (None if None in states else False)

    def report(self) -> Report:
        """The report as of now; engines are not verified before the first call."""
        inside = {i for part in self.parts if part.served is not None for i in part.group}
        outside = [n for i, n in enumerate(self.view.nodes) if i not in inside]
        return Report(
            clusters=tuple(self._cluster(part) for part in self.parts),
            reasons=self.reasons,
            outside=dict(Counter(map(kind_of, outside))),
            versions=versions(),
            cpu=cpu_name(),
            seconds=dict(self.seconds),
        )

    def _cluster(self, part: GraphPart) -> ClusterReport:
        served = part.served
        found = None if served is None else served.found
        chosen = None if found is None else found.chosen
        reasons = (*part.reasons, *(() if found is None else found.reasons))
        return ClusterReport(
            name=part.name,
            ops=dict(Counter(kind_of(self.view.nodes[i]) for i in part.group)),
            backend=ORIGINAL if served is None else served.serving,
            timings=() if chosen is None else chosen.timings,
            verdict=None if chosen is None else chosen.verdict,
            reasons=(*reasons, *(() if found is None else found.crashes)),
            tried=() if found is None else tuple(_tried(found, reasons)),
        )


def _tried(found: Competition, reasons: Sequence[Reason]) -> Iterator[Tried]:
    """The engines that passed verification, then those that failed."""
    against = {reason.backend: reason for reason in reasons}
    for one in found.tried:
        is_chosen = found.chosen is not None and one.backend == found.chosen.backend
        reason = against.pop(one.backend, None)
        yield Tried(one.backend, is_chosen, one.timings, one.verdict, reason)
    for backend, reason in against.items():
        if backend is not None:
            yield Tried(backend, False, reason=reason)


def compile_fx(
    gm: GraphModule,
    config: Config,
    name: str,
    constants: Mapping[Node, torch.Tensor],
    training: bool = False,
    notes: Sequence[Reason] = (),
) -> CompiledGraph:
    """Support, cluster, convert, assemble; the first call verifies and selects (``cluster_module``).

    ``gm`` is functional except for writes to its inputs; ``constants`` are inputs with a fixed tensor.
    ``training``: ``gm`` is a backward graph, or a forward graph that saves results for one. ``notes``: further
    reasons for the report.
    """
    clock, spent = StageClock(), Stopwatch()
    budget = TimeBudget(config.time_budget, clock=spent)
    with spent, clock.stage("support"):
        apply_rewrites(gm.graph)
        graph = view_fx(gm.graph)
        backends, unusable = resolve(config)
        plan = support(graph.nodes, graph.excluded, backends, config)
    with spent, clock.stage("convert"):
        job = _CompileJob(graph, backends, config, name, constants, training, budget, spent)
        parts, culprits = _convert_clusters(job, plan.labels)
        run = _put_together(gm, graph, parts)
    compiled = CompiledGraph(
        name=name,
        run=run,
        view=graph,
        parts=tuple(parts),
        reasons=(*notes, *unusable, *plan.reasons, *culprits, *untrusted(config.cache)),
        seconds=clock.seconds,
    )
    track(compiled)
    return compiled


@dataclass(frozen=True)
class _CompileJob:
    """Arguments of every step. ``budget`` runs on the clock ``spent``, which stops between user calls."""

    graph: FxView
    backends: Sequence[Backend]
    config: Config
    name: str
    constants: Mapping[Node, torch.Tensor]
    training: bool
    budget: TimeBudget
    spent: Stopwatch


def _convert_clusters(
    job: _CompileJob, labels: Sequence[frozenset[str]]
) -> tuple[list[GraphPart], list[Reason]]:
    """Cluster and convert. A node that makes a group fail loses its label; then the rest is tried again."""
    known: dict[Group, GraphPart] = {}

    def build(left: Labels) -> list[GraphPart]:
        clustering = cluster(job.graph.problem(left, job.config.min_cluster_size))
        for one in clustering.groups:
            if one not in known:
                name = f"{job.name}.cluster_{len(known)}"
                known[one] = _build(job, name, one.nodes, one.label)
        return [known[one] for one in clustering.groups]

    return build_without_culprits(labels, build, _find_failures, partial(_blame, job))


def _find_failures(parts: Sequence[GraphPart]) -> list[Failure]:
    return [
        Failure(part.name, part.group, part.label, part.reasons[0])
        for part in parts
        if part.served is None
    ]


def _blame(job: _CompileJob, failure: Failure) -> tuple[int, Reason]:
    """The node that makes a group fail, and why."""
    # Only whether a conversion succeeds matters here; a short deadline bounds repeated hangs.
    deadline = min(job.config.conversion_deadline_s, BISECT_S)
    brief = replace(job, config=job.config.evolve(timing=False, conversion_deadline_s=deadline))

    def build(name: str, nodes: Sequence[int]) -> Reason | None:
        shorter = _build(brief, name, nodes, failure.label)
        return shorter.reasons[0] if shorter.served is None else None

    node, why = bisect(failure, build)
    name = job.graph.nodes[node].name
    log.info("%s: %s stays FX: %s", failure.name, name, why.detail)
    return node, blamed(failure, why, name)


def _build(job: _CompileJob, name: str, group: Sequence[int], label: frozenset[str]) -> GraphPart:
    """The engines of all backends that convert the group: they compete at the first call."""
    cut = attempt(
        Stage.CONVERT,
        None,
        name,
        lambda: _extract(name, job.graph, group, job.constants),
        job.config.strict,
    )
    if isinstance(cut, Reason):
        return GraphPart(name, None, tuple(group), label, None, (cut,))
    takers = [b for b in job.backends if b.name.lower() in label]
    stored = look_up_engines(cut, takers, job.config, job.training)
    found = _convert(job, cut, takers, stored)
    reasons = tuple(one for one in found.values() if isinstance(one, Reason))
    engines = {name: one for name, one in found.items() if not isinstance(one, Reason)}
    if not engines:
        return GraphPart(name, cut, cut.group, label, None, reasons)
    # DISC's engines return memory of their own CUDA graphs; engines of libraries return new tensors. So rivals
    # in training do not overwrite results that another engine saved for backward.
    lent = [k for k, node in enumerate(cut.outputs) if is_saved(node)]
    watched = [name for name in engines if not registry.load(name).watches_constants]
    how = FirstCall(job.config, not job.training, job.budget, job.spent, stored)
    served = FxClusterModule(cut, engines, watched, how, lent)
    return GraphPart(name, cut, cut.group, label, served, reasons)


def _convert(
    job: _CompileJob, cut: FxExtracted, takers: Sequence[Backend], stored: StoredEngines
) -> dict[str, torch.ScriptObject | Reason]:
    """By backend, in their order: the engine from the cache, or what its conversion gives."""
    known = {b.name: stored.engines[b.name].engine for b in takers if b.name in stored.engines}
    if known and not job.config.timing:  # the first engine serves
        return dict([next(iter(known.items()))])
    others = [b for b in takers if b.name not in known]
    made = convert_each(cut.cluster, others, job.config, job.budget) if others else {}
    found = {**known, **made}
    return {b.name: found[b.name] for b in takers if b.name in found}


def _extract(
    name: str, graph: FxView, group: Sequence[int], constants: Mapping[Node, torch.Tensor]
) -> FxExtracted:
    cut = extract_fx(name, graph, group, constants)
    _ = cut.cluster  # what cannot be expressed raises here
    return cut


def _put_together(gm: GraphModule, graph: FxView, parts: Sequence[GraphPart]) -> GraphModule:
    """``gm`` with one call per served part; the order of ops respects all dependencies.

    Outside of parts, too, writes to parts of a tensor happen in place.
    """
    groups = [part.group for part in parts if part.served is not None]
    serving = {part.group[0]: part for part in parts if part.served is not None}
    made = torch.fx.Graph()
    env: dict[Node, Any] = {}
    root: dict[str, Any] = {}

    def read(node: Node) -> Any:
        if node not in env:
            assert node.op == "get_attr" or is_number(node) or is_kept_view(node), node
            if node.op == "get_attr":
                root[str(node.target)] = attrgetter(str(node.target))(gm)
            env[node] = made.node_copy(node, read)
        return env[node]

    for node in graph.graph.nodes:
        if node.op == "placeholder":
            env[node] = made.node_copy(node)
    for unit in schedule(graph.problem([frozenset()] * len(graph.nodes)), groups):
        part = serving.get(unit[0])
        if part is None or part.cut is None or part.group != unit:
            for i in unit:
                for node in graph.units[i]:
                    env[node] = made.node_copy(node, read)
                    env[node].target = as_laid_out(node.target)
            continue
        key = part.cut.name.replace(".", "_")
        root[key] = part.served
        called = made.call_module(key, tuple(read(n) for n in part.cut.inputs))
        for k, node in enumerate(part.cut.outputs):
            env[node] = made.call_function(item, (called, k))
    output = next(n for n in graph.graph.nodes if n.op == "output")
    made.node_copy(output, read)
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    write_in_place(made, [env[node] for node in sole_owners(inputs)])
    made.lint()
    return GraphModule(root, made)
