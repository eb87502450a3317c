# SPDX-License-Identifier: Apache-2.0
"""From labels to clusters with verified engines: cluster, extract, build; where that fails, bisect.

    partitions, reasons = compile_clusters(captured, graph_view, plan.labels, backends, config, budget)

Which clusters are best depends on who serves them, so there are several partitions of the graph: the
mixture, in which a cluster is what somebody takes, and one per backend, in which all that this backend
takes is clustered for it first. Groups that come out of several are built once.

A group that no backend manages is searched for the node that makes it fail. That node loses the
backend's label and goes back to TorchScript with its Reason; clustering runs again over the rest.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic

from blade.backends.base import Backend
from blade.capture.captured import Captured
from blade.clustering.problem import Clustering, Group
from blade.config import Config
from blade.fallback.attempt import attempt
from blade.fallback.bisect import find_culprit
from blade.fallback.candidate import Candidate
from blade.fallback.candidates import Wanted, build
from blade.fallback.reproducer import write
from blade.fallback.stored import Contents, keep_refusal, look_up
from blade.fallback.time_budget import UNLIMITED, TimeBudget
from blade.graph.boundary import find_boundary
from blade.graph.extract import Extracted, outline
from blade.graph.group import group
from blade.graph.samples import Samples
from blade.graph.view import GraphView
from blade.reason import Code, Reason, Stage

log = logging.getLogger(__name__)

MAX_CULPRITS = 4  # rounds of bisecting, one culprit per failing group each
BISECT_S = 60.0  # no new round after this many seconds of bisecting
MIXTURE = "mixture"
# Of a backend about the whole: a part would fare no better.
_DECISIONS = (Code.CALIBRATION, Code.ACCURACY, Code.SLOWER)
_FAULTS = (Code.CONVERSION_FAILED, Code.WRONG_VALUES, Code.ENGINE_RAISED)  # that one node may cause

Labels = list[frozenset[str]]


@dataclass(frozen=True)
class Built:
    """What became of one group: who may serve, in the order of trying, and the reasons of the others.

    ``extracted`` is ``None`` where the group cannot even be expressed for a backend. ``takers`` are the
    backends that took all of its nodes when it was first built.
    """

    name: str
    group: Group
    extracted: Extracted | None
    candidates: tuple[Candidate, ...]
    reasons: tuple[Reason, ...]
    takers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Partition:
    """One way to cut the graph: its clusters in program order, and what was too small for one.

    ``name`` is the backend it was made for, or ``MIXTURE``.
    """

    name: str
    built: tuple[Built, ...]
    reasons: tuple[Reason, ...]


@dataclass(frozen=True)
class _Job:
    """What every step needs."""

    captured: Captured
    view: GraphView
    backends: Sequence[Backend]
    config: Config
    budget: TimeBudget
    samples: Samples
    contents: Contents
    fixed: bool

    def is_fixed(self, name: str, axis: int) -> bool:
        """Whether the user declared one size for this axis of the graph's input ``name``."""
        _, *inputs = (v.debugName() for v in self.captured.module.graph.inputs())
        return name in inputs and (inputs.index(name), axis) in self.captured.fixed


def compile_clusters(
    captured: Captured,
    view: GraphView,
    labels: Sequence[frozenset[str]],
    backends: Sequence[Backend],
    config: Config,
    budget: TimeBudget = UNLIMITED,
    contents: Contents | None = None,
    samples: Samples | None = None,
    fixed: bool = False,
) -> tuple[list[Partition], list[Reason]]:
    """The partitions, the mixture first, and the reasons of nodes that were found to fail.

    ``fixed``: the mixture alone, as it is: nothing is bisected.
    """
    samples = samples or Samples(captured, view)
    job = _Job(captured, view, backends, config, budget, samples, contents or Contents(), fixed)
    left = list(labels)
    known: dict[tuple[object, ...], Built] = {}
    culprits: list[Reason] = []
    spent = 0.0
    for _ in range(MAX_CULPRITS + 1):
        partitions = _build_partitions(job, left, known)
        every = list({one.name: one for p in partitions for one in p.built}.values())
        failed = [(one, why) for one in every if (why := _why_bisect(job, one)) is not None]
        failed = [] if fixed else failed
        if not failed or spent > BISECT_S or len(culprits) >= MAX_CULPRITS or not budget.left():
            break
        start = monotonic()
        for one, why in failed:
            node, reason = _blame(job, one, why)
            left[node] -= {str(reason.backend).lower()}
            culprits.append(reason)
        spent += monotonic() - start
    for one in every:
        for reason in one.reasons:
            _write_reproducer(job, one, reason)
    return partitions, culprits


def _build_partitions(
    job: _Job, labels: Labels, known: dict[tuple[object, ...], Built]
) -> list[Partition]:
    """Different ones only; unmeasured, nothing could choose between them: the mixture alone."""
    ways: dict[tuple[tuple[int, ...], ...], tuple[str, Clustering]] = {}
    for name, own in _ways(labels, job.backends if job.config.timing and not job.fixed else ()):
        clustering = group(job.view, own, min_size=job.config.min_cluster_size)
        ways.setdefault(tuple(g.nodes for g in clustering.groups), (name, clustering))
    wanted = {g.nodes: labels for _, c in ways.values() for g in c.groups}
    built = _build_new(job, [_with_takers(nodes, labels) for nodes in wanted], known)
    return [
        Partition(
            name,
            tuple(built[g.nodes] for g in clustering.groups),
            tuple(_dissolved(job.view, clustering)),
        )
        for name, clustering in ways.values()
    ]


def _ways(labels: Labels, backends: Sequence[Backend]) -> Iterable[tuple[str, Labels]]:
    yield MIXTURE, labels
    for name in (b.name.lower() for b in backends):
        alone = frozenset({name})
        yield name, [alone if name in label else label for label in labels]


def _with_takers(nodes: tuple[int, ...], labels: Labels) -> Group:
    """A group with all that take it, not only those that it was clustered for."""
    return Group(nodes, frozenset.intersection(*(labels[n] for n in nodes)))


def _build_new(
    job: _Job, groups: Sequence[Group], known: dict[tuple[object, ...], Built]
) -> dict[tuple[int, ...], Built]:
    """By nodes. What was built before, for as many takers, is not built again."""
    for wanted in groups:
        if job.config.timing and (more := _of_more_takers(known, wanted)) is not None:
            known.setdefault((wanted.nodes, wanted.label), more)
    fresh = [g for g in groups if (g.nodes, g.label) not in known]
    # One run for all of them; a part of a group, when bisecting, needs no other inputs than the whole.
    job.samples.record(find_boundary(job.view, g.nodes) for g in fresh)
    parts = [(f"cluster_{len(known) + i}", g.nodes, g) for i, g in enumerate(fresh)]
    for built in _build(job, parts, [_takers(job, g) for g in fresh]):
        known[built.group.nodes, built.group.label] = built
        _log(built)
    return {g.nodes: known[g.nodes, g.label] for g in groups}


def _of_more_takers(known: dict[tuple[object, ...], Built], wanted: Group) -> Built | None:
    """What is known of the very nodes from when more backends took them; the reasons why these do not
    stay."""
    for one in known.values():
        if one.group.nodes == wanted.nodes and one.group.label > wanted.label:
            return replace(
                one,
                group=wanted,
                candidates=tuple(c for c in one.candidates if c.backend.lower() in wanted.label),
            )
    return None


def _takers(job: _Job, one: Group) -> list[Backend]:
    return [b for b in job.backends if b.name.lower() in one.label]


def _build(
    job: _Job,
    parts: Sequence[tuple[str, Sequence[int], Group]],
    takers: Sequence[Sequence[Backend]],
) -> list[Built]:
    """Each part (name, nodes, the group it is of) with its takers."""
    found = []
    for (name, nodes, _), who in zip(parts, takers, strict=True):
        prepare = partial(_prepare, job, name, nodes, who)
        found.append(attempt(Stage.CONVERT, None, name, prepare, job.config.strict))
    wanted = [one for one in found if isinstance(one, Wanted)]
    results = iter(build(wanted, job.config, job.budget))
    built = []
    for (name, _, whole), who, one in zip(parts, takers, found, strict=True):
        names = tuple(b.name for b in who)
        if isinstance(one, Reason):
            reasons = tuple(replace(one, backend=b) for b in names)
            built.append(Built(name, whole, None, (), reasons, names))
        else:
            candidates, reasons = next(results)
            for reason in reasons:
                keep_refusal(job.config, one.stored.keys.get(str(reason.backend)), reason)
            built.append(Built(name, whole, one.extracted, candidates, reasons, names))
    return built


def _prepare(job: _Job, name: str, nodes: Sequence[int], takers: Sequence[Backend]) -> Wanted:
    [extracted] = outline(job.captured, job.view, [nodes], fixed=job.is_fixed, samples=job.samples)
    extracted = replace(extracted, name=name)
    stored = look_up(extracted, takers, job.config, job.contents)
    if any(stored.found(b.name) is None for b in takers):
        _ = extracted.cluster  # what has no form in FX raises here
    return Wanted(extracted, takers, stored)


def _why_bisect(job: _Job, one: Built) -> Reason | None:
    """The failure whose cause is worth looking for: nobody serves the group, or DISC, say, whose
    conversions take no process of their own, fails where others do not."""
    failed = [r for r in one.reasons if str(r.backend).lower() in one.group.label]
    if not one.candidates:
        return next((r for r in failed if r.code not in _DECISIONS), None)
    cheap = {b.name for b in job.backends if getattr(b, "in_process", False)}
    if not job.config.timing or not job.budget.left_to_convert():
        return None
    faults = (r for r in failed if r.backend in cheap and r.code in _FAULTS)
    return next(faults, None)


def _blame(job: _Job, failed: Built, reason: Reason) -> tuple[int, Reason]:
    """The node that makes ``failed`` fail as ``reason`` says, with the Reason it fails for."""
    takers = [b for b in job.backends if b.name == reason.backend]
    # what hangs would take as often as long; a part that only seems to hang costs a node, no answer
    deadline = min(job.config.conversion_deadline_s, BISECT_S)
    brief = replace(job, config=job.config.evolve(conversion_deadline_s=deadline))
    smallest = failed

    def why_fails(nodes: Sequence[int]) -> Reason | None:
        nonlocal smallest
        name = f"{failed.name}[:{len(nodes)}]"
        [part] = _build(brief, [(name, nodes, failed.group)], [takers])
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
