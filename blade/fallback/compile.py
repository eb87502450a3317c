# SPDX-License-Identifier: Apache-2.0
"""From labels to clusters with verified engines: cluster, extract, build; where that fails, bisect.

    built, reasons = compile_clusters(captured, graph_view, plan.labels, backends, config)

A group that no backend manages is searched for the node that makes it fail. That node loses the
backend's label and goes back to TorchScript with its Reason; clustering runs again over the rest.
Groups that come out as before are not built twice.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import monotonic

from blade.backends.base import Backend
from blade.capture.captured import Captured
from blade.clustering.problem import Clustering, Group
from blade.config import Config
from blade.fallback.attempt import attempt
from blade.fallback.bisect import find_culprit
from blade.fallback.candidates import build
from blade.fallback.reproducer import write
from blade.fallback.select import Candidate
from blade.fallback.stored import Stored, look_up
from blade.graph.boundary import find_boundary
from blade.graph.extract import Extracted, outline
from blade.graph.group import group
from blade.graph.samples import Samples
from blade.graph.view import GraphView
from blade.reason import Code, Reason, Stage

log = logging.getLogger(__name__)

MAX_CULPRITS = 4  # rounds of bisecting, one culprit per failing group each
BISECT_S = 60.0  # no new round after this many seconds of bisecting


@dataclass(frozen=True)
class Built:
    """What became of one group: who may serve, in the order of trying, and the reasons of the others.

    ``extracted`` is ``None`` where the group cannot even be expressed for a backend.
    """

    name: str
    group: Group
    extracted: Extracted | None
    candidates: tuple[Candidate, ...]
    reasons: tuple[Reason, ...]


@dataclass(frozen=True)
class _Job:
    """What every step needs."""

    captured: Captured
    view: GraphView
    backends: Sequence[Backend]
    config: Config
    samples: Samples

    def is_fixed(self, name: str, axis: int) -> bool:
        """Whether the user declared one size for this axis of the graph's input ``name``."""
        _, *inputs = (v.debugName() for v in self.captured.module.graph.inputs())
        return name in inputs and (inputs.index(name), axis) in self.captured.fixed

    def takers(self, label: frozenset[str]) -> list[Backend]:
        return [b for b in self.backends if b.name.lower() in label]


def compile_clusters(
    captured: Captured,
    view: GraphView,
    labels: Sequence[frozenset[str]],
    backends: Sequence[Backend],
    config: Config,
) -> tuple[list[Built], list[Reason]]:
    """Every cluster in program order, and the reasons of nodes and groups that are in none."""
    job = _Job(captured, view, backends, config, Samples(captured, view))
    left = list(labels)
    known: dict[Group, Built] = {}
    culprits: list[Reason] = []
    spent = 0.0
    for _ in range(MAX_CULPRITS + 1):
        clustering = _cluster(job, left)
        built = _build_new(job, clustering.groups, known)
        failed = [b for b in built if not b.candidates and b.reasons]
        if not failed or spent > BISECT_S or len(culprits) >= MAX_CULPRITS:
            break
        start = monotonic()
        for one in failed:
            node, reason = _blame(job, one)
            left[node] -= {str(reason.backend).lower()}
            culprits.append(reason)
        spent += monotonic() - start
    for one in built:
        for reason in one.reasons:
            _write_reproducer(job, one, reason)
    return built, culprits + _dissolved(view, clustering)


def _cluster(job: _Job, labels: Sequence[frozenset[str]]) -> Clustering:
    size = job.config.min_cluster_size
    return group(job.view, labels, min_size=size)


def _build_new(job: _Job, groups: Sequence[Group], known: dict[Group, Built]) -> list[Built]:
    # One run for all of them; a part of a group, when bisecting, needs no other inputs than the whole.
    job.samples.record(find_boundary(job.view, g.nodes) for g in groups if g not in known)
    for one in groups:
        if one not in known:
            name = f"cluster_{len(known)}"
            known[one] = _build(job, name, one.nodes, job.takers(one.label), one)
            _log(known[one])
    return [known[one] for one in groups]


def _build(
    job: _Job, name: str, nodes: Sequence[int], takers: Sequence[Backend], group: Group
) -> Built:
    def extracted() -> tuple[Extracted, Stored]:
        found = _extract(job, name, nodes)
        stored = look_up(found, takers, job.config)
        if len(stored.candidates) < len(takers):
            _ = found.cluster  # what has no form in FX raises here
        return found, stored

    result = attempt(Stage.CONVERT, None, name, extracted, job.config.strict)
    if isinstance(result, Reason):
        reasons = tuple(replace(result, backend=b.name) for b in takers)
        return Built(name, group, None, (), reasons)
    found, stored = result
    return Built(name, group, found, *build(found, takers, job.config, stored))


def _extract(job: _Job, name: str, nodes: Sequence[int]) -> Extracted:
    [extracted] = outline(job.captured, job.view, [nodes], fixed=job.is_fixed, samples=job.samples)
    return replace(extracted, name=name)


def _blame(job: _Job, failed: Built) -> tuple[int, Reason]:
    """The node that makes ``failed`` fail in the first backend that was tried, with its Reason."""
    reason = failed.reasons[0]
    takers = [b for b in job.backends if b.name == reason.backend]
    # what hangs would take as often as long; a part that only seems to hang costs a node, no answer
    deadline = min(job.config.conversion_deadline_s, BISECT_S)
    brief = replace(job, config=job.config.evolve(conversion_deadline_s=deadline))
    smallest = failed

    def why_fails(nodes: Sequence[int]) -> Reason | None:
        nonlocal smallest
        name = f"{failed.name}[:{len(nodes)}]"
        part = _build(brief, name, nodes, takers, failed.group)
        if part.candidates:
            return None
        smallest = part
        return part.reasons[0]

    node, why = find_culprit(failed.group.nodes, reason, why_fails)
    _write_reproducer(job, smallest, why)
    subject = job.view.nodes[node].name
    detail = f"{why.detail} (Found by bisecting {failed.name}, {len(failed.group.nodes)} ops.)"
    log.info("%s: %s stays TorchScript: %s", failed.name, subject, why.detail)
    return node, replace(why, subject=subject, detail=detail)


def _write_reproducer(job: _Job, failed: Built, reason: Reason) -> None:
    backends = [b for b in job.backends if b.name == reason.backend]
    if job.config.dump_dir is None or failed.extracted is None or not backends:
        return
    folder = job.config.dump_dir / "failures"
    write(folder, failed.extracted, backends[0], reason, job.config)


def _dissolved(view: GraphView, clustering: Clustering) -> list[Reason]:
    return [
        Reason(
            Stage.CLUSTER,
            Code.TOO_SMALL,
            ", ".join(sorted(one.label)),
            ", ".join(view.nodes[n].name for n in one.nodes[:3]),
            one.detail,
        )
        for one in clustering.dissolved
    ]


def _log(built: Built) -> None:
    ops, serves = len(built.group.nodes), ", ".join(c.backend for c in built.candidates)
    log.info("%s: %d ops, verified engines: %s", built.name, ops, serves or "none")
    for reason in built.reasons:
        log.info("%s: not %s: %s", built.name, reason.backend, reason.detail)
