# SPDX-License-Identifier: Apache-2.0
"""Turn labels into clusters with verified engines: cluster, extract, build; on failure, bisect.

    clusters = cluster_graph(builder, plan.labels)
    partitions = convert_and_verify_clusters(builder, clusters)
    partitions, reasons = without_failing_nodes(builder, plan.labels, build)   # build: the two calls above

The best clusters depend on the backend, so there are several partitions of the graph: the joint partition,
whose clusters hold ops that any backend takes, and one per backend, in which the ops of this backend are
clustered first. Groups that occur in several partitions are built once.

If no backend can build a group, ``fallback.bisect`` searches it for the node that makes it fail. That node
loses the backend's label and goes back to TorchScript with its Reason; clustering runs again over the rest.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

from blade.clustering.problem import Clustering
from blade.core.reason import Code, Reason, Stage
from blade.fallback.bisect import (
    BISECT_S,
    Failure,
    bisect,
    blamed,
    build_without_culprits,
)
from blade.graph.torchscript.extract import Extracted
from blade.graph.torchscript.view import GraphView
from blade.partition.assignment import (
    GroupAssignment,
    PartitionStrategy,
    assign_backends,
    partition_graph,
)
from blade.selection.candidate_builder import CandidateBuilder, SubCluster
from blade.selection.plan.built import ClusterCandidates, Partition
from blade.selection.plan.candidate import Candidate
from blade.selection.reproducer import write

log = logging.getLogger(__name__)

# Reasons of a backend that concern the whole group: its parts would fail as well.
_DECISIONS = (Code.CALIBRATION, Code.ACCURACY, Code.SLOWER)
_FAULTS = (
    Code.CONVERSION_FAILED,
    Code.WRONG_VALUES,
    Code.ENGINE_RAISED,
)  # failures that one node may cause

Labels = Sequence[frozenset[str]]
Eliminated = Mapping[str, tuple[int, ...]]
_EMPTY: Eliminated = MappingProxyType({})


@dataclass(frozen=True)
class Clusters:
    """The partitions of the graph, and every group once, with the backends to try it."""

    ways: tuple[PartitionStrategy, ...]
    attempts: tuple[GroupAssignment, ...]


def cluster_graph(
    builder: CandidateBuilder, labels: Labels, losers: Eliminated = _EMPTY, fixed: bool = False
) -> Clusters:
    """Return distinct partitions, the joint one first; without timing only that one, as nothing could choose.

    ``losers`` as in ``assignment.assign_backends``. ``fixed``: the joint partition only.
    """
    config, view = builder.config, builder.view
    several = config.timing and not fixed
    rivals = [b for b in builder.backends if b.name.lower() not in losers] if several else []
    ways = partition_graph(view, labels, rivals, config.min_cluster_size)
    return Clusters(
        tuple(ways), tuple(assign_backends(ways, labels, builder.backends, view, losers))
    )


def convert_and_verify_clusters(builder: CandidateBuilder, clusters: Clusters) -> list[Partition]:
    """Return each partition with the candidates of its groups; no group is built twice."""
    built = builder.build(clusters.attempts)
    return [
        Partition(
            way.name,
            tuple(built[g.nodes] for g in way.clustering.groups),
            tuple(_dissolved(builder.view, way.clustering)),
        )
        for way in clusters.ways
    ]


def without_failing_nodes(
    builder: CandidateBuilder,
    labels: Labels,
    build: Callable[[Labels], list[Partition]],
    fixed: bool = False,
) -> tuple[list[Partition], list[Reason]]:
    """Return ``build(labels)`` without the nodes that make groups fail, and the reasons of these nodes.

    ``fixed``: nothing is bisected.
    """
    partitions, culprits = build_without_culprits(
        labels,
        build,
        partial(_find_failures, builder),
        partial(_blame, builder),
        lambda: fixed or not builder.budget.left(),
    )
    _write_reproducers(builder, partitions)
    return partitions, culprits


def _write_reproducers(builder: CandidateBuilder, partitions: Sequence[Partition]) -> None:
    """Write one reproducer per failed engine under ``Config.dump_dir``."""
    for one in _built_once(partitions):
        for reason in one.reasons:
            _write_reproducer(builder, one.extracted, reason)


def _built_once(partitions: Sequence[Partition]) -> list[ClusterCandidates]:
    return list({one.name: one for p in partitions for one in p.built}.values())


def _find_failures(builder: CandidateBuilder, partitions: Sequence[Partition]) -> list[Failure]:
    return [
        Failure(one.name, one.group.nodes, one.group.label, why)
        for one in _built_once(partitions)
        if (why := _why_bisect(builder, one)) is not None
    ]


def _why_bisect(builder: CandidateBuilder, one: ClusterCandidates) -> Reason | None:
    """Return the failure to bisect: no backend serves the group, or a backend that converts in this process
    (DISC, say) fails where others succeed."""
    failed = [r for r in one.reasons if str(r.backend).lower() in one.group.label]
    tried_by_all = one.group.label == {name.lower() for name in one.eligible}
    if not one.candidates and tried_by_all:
        return next((r for r in failed if r.code not in _DECISIONS), None)
    cheap = {b.name for b in builder.backends if b.in_process}
    if not builder.config.timing or not builder.budget.left_to_convert():
        return None
    faults = (r for r in failed if r.backend in cheap and r.code in _FAULTS)
    return next(faults, None)


def _blame(builder: CandidateBuilder, failure: Failure) -> tuple[int, Reason]:
    """Return the node that makes a group fail, with the Reason of its failure."""
    reason = failure.reason
    takers = [b for b in builder.backends if b.name == reason.backend]
    # a part that hangs would take the full deadline each time; one that only seems to hang costs one node
    deadline = min(builder.config.conversion_deadline_s, BISECT_S)
    brief = replace(builder, config=builder.config.evolve(conversion_deadline_s=deadline))
    smallest = builder.extracted(failure.nodes)

    def build(name: str, nodes: Sequence[int]) -> Reason | None:
        nonlocal smallest
        [part] = brief.build_parts([SubCluster(name, nodes, takers, str(reason.backend))])
        [found] = part.found.values()
        if isinstance(found, Candidate):
            return None
        smallest = part.extracted
        return found

    node, why = bisect(failure, build)
    _write_reproducer(builder, smallest, why)
    name = builder.view.nodes[node].name
    log.info("%s: %s stays TorchScript: %s", failure.name, name, why.detail)
    return node, blamed(failure, why, name)


def _write_reproducer(
    builder: CandidateBuilder, extracted: Extracted | None, reason: Reason
) -> None:
    backends = [b for b in builder.backends if b.name == reason.backend]
    if builder.config.dump_dir is None or not backends:
        return
    if extracted is None or not extracted.has_cluster:
        return
    folder = builder.config.dump_dir / "failures"
    write(folder, extracted, backends[0], reason, builder.config)


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
