# SPDX-License-Identifier: Apache-2.0
"""From labels to clusters with verified engines: cluster, extract, build; where that fails, bisect.

    partitions, reasons = compile_clusters(builder, plan.labels)

Which clusters are best depends on who serves them, so there are several partitions of the graph: the
mixture, in which a cluster is what somebody takes, and one per backend, in which all that this backend
takes is clustered for it first. Groups that come out of several are built once.

A group that no backend manages is searched for the node that makes it fail. That node loses the
backend's label and goes back to TorchScript with its Reason; clustering runs again over the rest.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import monotonic
from types import MappingProxyType

from blade.clustering.problem import Clustering
from blade.fallback.bisect import find_culprit
from blade.fallback.builder import Builder, Part
from blade.fallback.built import Built, Partition
from blade.fallback.candidate import Candidate
from blade.fallback.reproducer import write
from blade.fallback.takers import assign, cut
from blade.graph.view import GraphView
from blade.reason import Code, Reason, Stage

log = logging.getLogger(__name__)

MAX_CULPRITS = 4  # rounds of bisecting, one culprit per failing group each
BISECT_S = 60.0  # no new round after this many seconds of bisecting
# Of a backend about the whole: a part would fare no better.
_DECISIONS = (Code.CALIBRATION, Code.ACCURACY, Code.SLOWER)
_FAULTS = (Code.CONVERSION_FAILED, Code.WRONG_VALUES, Code.ENGINE_RAISED)  # that one node may cause

Labels = list[frozenset[str]]
Losers = Mapping[str, tuple[int, ...]]
_NOBODY: Losers = MappingProxyType({})


def compile_clusters(
    builder: Builder,
    labels: Sequence[frozenset[str]],
    losers: Losers = _NOBODY,
    fixed: bool = False,
) -> tuple[list[Partition], list[Reason]]:
    """The partitions, the mixture first, and the reasons of nodes that were found to fail.

    ``losers`` as ``takers.assign`` has them. ``fixed``: the mixture alone, as it is: nothing is bisected.
    """
    left = list(labels)
    culprits: list[Reason] = []
    spent = 0.0
    for _ in range(MAX_CULPRITS + 1):
        partitions = _build_partitions(builder, left, losers, fixed)
        every = list({one.name: one for p in partitions for one in p.built}.values())
        failed = [(one, why) for one in every if (why := _why_bisect(builder, one)) is not None]
        failed = [] if fixed else failed
        out_of_time = spent > BISECT_S or not builder.budget.left()
        if not failed or out_of_time or len(culprits) >= MAX_CULPRITS:
            break
        start = monotonic()
        for one, why in failed:
            node, reason = _blame(builder, one, why)
            left[node] -= {str(reason.backend).lower()}
            culprits.append(reason)
        spent += monotonic() - start
    for one in every:
        for reason in one.reasons:
            _write_reproducer(builder, one, reason)
    return partitions, culprits


def _build_partitions(
    builder: Builder, labels: Labels, losers: Losers, fixed: bool
) -> list[Partition]:
    """Different ones only; unmeasured, nothing could choose between them: the mixture alone."""
    config, view = builder.config, builder.view
    several = config.timing and not fixed
    rivals = [b for b in builder.backends if b.name.lower() not in losers] if several else []
    ways = cut(view, labels, rivals, config.min_cluster_size)
    attempts = assign(ways, labels, builder.backends, view, losers)
    built = builder.build(attempts)
    return [
        Partition(
            way.name,
            tuple(built[g.nodes] for g in way.clustering.groups),
            tuple(_dissolved(builder.view, way.clustering)),
        )
        for way in ways
    ]


def _why_bisect(builder: Builder, one: Built) -> Reason | None:
    """The failure whose cause is worth looking for: nobody serves the group, or DISC, say, whose
    conversions take no process of their own, fails where others do not."""
    failed = [r for r in one.reasons if str(r.backend).lower() in one.group.label]
    tried_by_all = one.group.label == {name.lower() for name in one.takers}
    if not one.candidates and tried_by_all:
        return next((r for r in failed if r.code not in _DECISIONS), None)
    cheap = {b.name for b in builder.backends if getattr(b, "in_process", False)}
    if not builder.config.timing or not builder.budget.left_to_convert():
        return None
    faults = (r for r in failed if r.backend in cheap and r.code in _FAULTS)
    return next(faults, None)


def _blame(builder: Builder, failed: Built, reason: Reason) -> tuple[int, Reason]:
    """The node that makes ``failed`` fail as ``reason`` says, with the Reason it fails for."""
    takers = [b for b in builder.backends if b.name == reason.backend]
    # what hangs would take as often as long; a part that only seems to hang costs a node, no answer
    deadline = min(builder.config.conversion_deadline_s, BISECT_S)
    brief = replace(builder, config=builder.config.evolve(conversion_deadline_s=deadline))
    smallest = failed

    def why_fails(nodes: Sequence[int]) -> Reason | None:
        nonlocal smallest
        name = f"{failed.name}[:{len(nodes)}]"
        [part] = brief.build_parts([Part(name, nodes, takers, str(reason.backend))])
        [found] = part.found.values()
        if isinstance(found, Candidate):
            return None
        smallest = replace(failed, name=name, extracted=part.extracted)
        return found

    node, why = find_culprit(failed.group.nodes, reason, why_fails)
    _write_reproducer(builder, smallest, why)
    subject = builder.view.nodes[node].name
    detail = f"{why.detail} (Found by bisecting {failed.name}, {len(failed.group.nodes)} ops.)"
    log.info("%s: %s stays TorchScript: %s", failed.name, subject, why.detail)
    return node, replace(why, subject=subject, detail=detail)


def _write_reproducer(builder: Builder, failed: Built, reason: Reason) -> None:
    backends = [b for b in builder.backends if b.name == reason.backend]
    if builder.config.dump_dir is None or failed.extracted is None or not backends:
        return
    folder = builder.config.dump_dir / "failures"
    write(folder, failed.extracted, backends[0], reason, builder.config)


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
