# SPDX-License-Identifier: Apache-2.0
"""A functional FX graph to one that runs its clusters in engines: support, cluster, convert, put together.

compiled = compile_fx(gm, config, "graph_0", constants={})
compiled.run(*inputs), compiled.report()
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from time import perf_counter
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node

from blade.backends.base import Backend
from blade.clustering.cluster import cluster, schedule
from blade.config import Config
from blade.dynamo.kept import keep
from blade.dynamo.partition import is_saved
from blade.dynamo.prepare import prepare
from blade.dynamo.served import Served
from blade.fallback.attempt import attempt
from blade.fallback.bisect import find_culprit
from blade.fallback.candidates import convert
from blade.fallback.support import resolve, support
from blade.graph.fx_extract import FxExtracted, extract_fx, is_loose_view
from blade.graph.fx_view import FxView, is_number, view_fx
from blade.graph.listing import kind_of
from blade.hardware import cpu_name
from blade.reason import Reason, Stage
from blade.report import ORIGINAL, ClusterReport, Report, versions
from blade.runtime.engine import Engine

MAX_CULPRITS = 4
Labels = list[frozenset[str]]


@dataclass(frozen=True)
class Part:
    """A group and who serves it, if somebody does."""

    cut: FxExtracted | None
    group: tuple[int, ...]
    label: frozenset[str]
    served: Served | None
    reasons: tuple[Reason, ...]


@dataclass(frozen=True, eq=False)
class CompiledGraph:
    """Takes and returns what the graph did."""

    name: str
    run: GraphModule
    view: FxView
    parts: tuple[Part, ...]
    reasons: tuple[Reason, ...]
    seconds: Mapping[str, float]

    def __call__(self, *args: Any) -> Any:
        return self.run.forward(*args)

    def stats(self) -> dict[str, dict[str, int]]:
        """Counters per engine."""
        served = [part.served for part in self.parts if part.served is not None]
        return {one.name: dict(one.engine().stats()) for one in served}

    def report(self) -> Report:
        """As of now: before the first call nothing is verified."""
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

    def _cluster(self, part: Part) -> ClusterReport:
        served = part.served
        found = () if served is None or served.reason is None else (served.reason,)
        return ClusterReport(
            name=self.name if part.cut is None else part.cut.name,
            ops=dict(Counter(kind_of(self.view.nodes[i]) for i in part.group)),
            backend=ORIGINAL if served is None else served.serving,
            timings=() if served is None else served.timings,
            verdict=None if served is None else served.verdict,
            reasons=(*part.reasons, *found),
        )


def compile_fx(
    gm: GraphModule,
    config: Config,
    name: str,
    constants: Mapping[Node, torch.Tensor],
    training: bool = False,
) -> CompiledGraph:
    """``gm`` is functional but for writes to its inputs; ``constants`` are inputs with a fixed tensor.

    ``training``: it is a forward graph that saves something for a backward one, or that one.
    """
    start = perf_counter()
    prepare(gm.graph)
    graph = view_fx(gm.graph)
    backends, against = resolve(config)
    plan = support(graph.nodes, graph.pinned, backends, config)
    supported = perf_counter()
    job = _Job(graph, backends, config, name, constants, training)
    parts, culprits = _serve(job, list(plan.labels))
    run = _put_together(gm, graph, parts)
    compiled = CompiledGraph(
        name=name,
        run=run,
        view=graph,
        parts=tuple(parts),
        reasons=(*against, *plan.reasons, *culprits),
        seconds={"support": supported - start, "convert": perf_counter() - supported},
    )
    keep(compiled)
    return compiled


@dataclass(frozen=True)
class _Job:
    """What every step needs."""

    graph: FxView
    backends: Sequence[Backend]
    config: Config
    name: str
    constants: Mapping[Node, torch.Tensor]
    training: bool


def _serve(job: _Job, labels: Labels) -> tuple[list[Part], list[Reason]]:
    """Cluster and convert; a node that makes a group fail loses its label, and the rest is tried again."""
    culprits: list[Reason] = []
    known: dict[tuple[int, ...], Part] = {}
    while True:
        clustering = cluster(job.graph.problem(labels, job.config.min_cluster_size))
        for one in clustering.groups:
            if one.nodes not in known:
                name = f"{job.name}.cluster_{len(known)}"
                known[one.nodes] = _build(job, name, one.nodes, one.label)
        parts = [known[one.nodes] for one in clustering.groups]
        failed = [part for part in parts if part.served is None]
        if not failed or len(culprits) >= MAX_CULPRITS:
            return parts, culprits
        for part in failed:
            node, why = _blame(job, part)
            labels[node] -= part.label if why.backend is None else {why.backend.lower()}
            culprits.append(why)


def _blame(job: _Job, failed: Part) -> tuple[int, Reason]:
    """The node that makes ``failed`` fail, and why."""

    def why_fails(nodes: Sequence[int]) -> Reason | None:
        shorter = _build(job, f"{job.name}.part", nodes, failed.label)
        return shorter.reasons[0] if shorter.served is None else None

    node, why = find_culprit(failed.group, failed.reasons[0], why_fails)
    detail = f"{why.detail} (Found by bisecting {len(failed.group)} ops.)"
    return node, replace(why, subject=job.graph.nodes[node].name, detail=detail)


def _build(job: _Job, name: str, group: Sequence[int], label: frozenset[str]) -> Part:
    """The first backend that converts it serves."""
    cut = attempt(
        Stage.CONVERT,
        None,
        name,
        lambda: _extract(name, job.graph, group, job.constants),
        job.config.strict,
    )
    if isinstance(cut, Reason):
        return Part(None, tuple(group), label, None, (cut,))
    reasons: list[Reason] = []
    for backend in (b for b in job.backends if b.name.lower() in label):
        engine = convert(cut.cluster, backend, job.config)
        if not isinstance(engine, Reason):
            if saved := [k for k, node in enumerate(cut.outputs) if is_saved(node)]:
                cast(Engine, engine).lend(saved)
            served = Served(cut, engine, backend.name, job.config, derived=not job.training)
            return Part(cut, cut.group, label, served, tuple(reasons))
        reasons.append(engine)
    return Part(cut, cut.group, label, None, tuple(reasons))


def _extract(
    name: str, graph: FxView, group: Sequence[int], constants: Mapping[Node, torch.Tensor]
) -> FxExtracted:
    cut = extract_fx(name, graph, group, constants)
    _ = cut.cluster  # what cannot be expressed raises here
    return cut


def _put_together(gm: GraphModule, graph: FxView, parts: Sequence[Part]) -> GraphModule:
    """``gm`` with a call per served part; ops in an order that suits both."""
    groups = [part.group for part in parts if part.served is not None]
    serving = {part.group[0]: part for part in parts if part.served is not None}
    made = torch.fx.Graph()
    env: dict[Node, Any] = {}
    root: dict[str, Any] = {}

    def read(node: Node) -> Any:
        if node not in env:
            assert node.op == "get_attr" or is_number(node) or is_loose_view(node), node
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
            continue
        key = part.cut.name.replace(".", "_")
        root[key] = part.served
        called = made.call_module(key, tuple(read(n) for n in part.cut.inputs))
        for k, node in enumerate(part.cut.outputs):
            env[node] = made.call_function(_item, (called, k))
    output = next(n for n in graph.graph.nodes if n.op == "output")
    made.node_copy(output, read)
    made.lint()
    return GraphModule(root, made)


def _item(values: Sequence[Any], index: int) -> Any:
    return values[index]
