# SPDX-License-Identifier: Apache-2.0
"""Assign groups to backends: each backend tries the groups that it supports, except redundant ones.

    ways = partition_graph(graph_view, labels, backends, min_size)
    attempts = assign_backends(ways, labels, backends, graph_view, losers)

The graph has several partitions. Groups of the joint partition are offered to every backend. Groups of a
per-backend partition go to that backend; the rest of its graph goes to in-process backends, which convert
quickly. Each backend tries only one of the groups that are nearly the same.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from blade.clustering.problem import Clustering, Group
from blade.core.backend import Backend
from blade.core.reason import Code, Reason, Stage
from blade.graph.torchscript.group import cluster_blocks
from blade.graph.torchscript.listing import kind_of
from blade.graph.torchscript.view import GraphView


@dataclass(frozen=True)
class GroupAssignment:
    """A group, the backends of its label that are to try it, and the reasons of the others."""

    group: Group
    eligible: frozenset[str]
    reasons: tuple[Reason, ...] = ()


JOINT = "mixture"
OVERLAP_TOLERANCE = (
    0.05  # share of the nodes of two groups that may differ where they count as nearly the same
)
OVERLAP_TOLERANCE_NODES = 4  # nodes, for small groups

_EMPTY: Mapping[str, tuple[int, ...]] = MappingProxyType({})
# The expensive ops: groups that differ in one of these are different groups.
_HEAVY = frozenset(
    f"aten::{name}"
    for name in (
        "linear matmul mm bmm addmm baddbmm addbmm einsum _convolution convolution conv1d conv2d conv3d "
        "conv_transpose1d conv_transpose2d conv_transpose3d scaled_dot_product_attention lstm gru rnn_tanh "
        "rnn_relu embedding_bag"
    ).split()
)


@dataclass(frozen=True)
class PartitionStrategy:
    """One partition of the graph; ``name`` is the backend that it was made for, or ``JOINT``."""

    name: str
    clustering: Clustering


def partition_graph(
    view: GraphView, labels: Sequence[frozenset[str]], backends: Sequence[Backend], min_size: int
) -> list[PartitionStrategy]:
    """Return the joint partition, and one for each of ``backends``; equal ones once."""
    different: dict[tuple[tuple[int, ...], ...], PartitionStrategy] = {}

    def add(name: str, own: Sequence[frozenset[str]]) -> None:
        way = PartitionStrategy(name, cluster_blocks(view, own, min_size=min_size))
        different.setdefault(tuple(g.nodes for g in way.clustering.groups), way)

    add(JOINT, labels)
    for name in (b.name.lower() for b in backends):
        add(name, _labels_of_one(labels, name))
    return list(different.values())


def assign_backends(
    ways: Sequence[PartitionStrategy],
    labels: Sequence[frozenset[str]],
    backends: Sequence[Backend],
    view: GraphView,
    losers: Mapping[str, tuple[int, ...]] = _EMPTY,
) -> list[GroupAssignment]:
    """Return every group of ``ways`` once, with its backends and the reasons of those that do not try it.

    Each of ``losers`` tries no group but its own, which is given by its nodes.
    """
    made_for: dict[tuple[int, ...], list[str]] = {}
    for way in ways:
        for one in way.clustering.groups:
            made_for.setdefault(one.nodes, []).append(way.name)
    quick = {b.name.lower() for b in backends if b.in_process}
    groups = [_with_eligible(view, nodes, labels) for nodes in made_for]
    willing = {
        g.nodes: frozenset(
            name
            for name in _eligible(g, made_for[g.nodes], quick)
            if losers.get(name, g.nodes) == g.nodes
        )
        for g in groups
    }
    alike = _near_duplicates(view, groups)
    attempts = []
    for one in groups:
        takers, reasons = set(willing[one.nodes]), []
        for name in sorted(willing[one.nodes]):
            others = [g for g in alike[one.nodes] if name in willing[g.nodes]]
            best = max([one, *others], key=lambda g: _preference_order(g, made_for[g.nodes], name))
            if best is not one:
                takers.discard(name)
                reasons.append(_not_tried(view, one, best, name))
        attempts.append(GroupAssignment(one, frozenset(takers), tuple(reasons)))
    return attempts


def first_round_groups(
    labels: Sequence[frozenset[str]], backends: Sequence[Backend], view: GraphView, min_size: int
) -> list[GroupAssignment]:
    """Return, for each backend, the largest group that it takes in its own partition."""
    takers: dict[tuple[int, ...], set[str]] = {}
    for name in (b.name.lower() for b in backends):
        every = cluster_blocks(view, _labels_of_one(labels, name), min_size=min_size).groups
        groups = [g for g in every if name in g.label]
        if groups:
            takers.setdefault(max(groups, key=lambda g: len(g.nodes)).nodes, set()).add(name)
    return [
        GroupAssignment(_with_eligible(view, nodes, labels), frozenset(names))
        for nodes, names in takers.items()
    ]


def _labels_of_one(labels: Sequence[frozenset[str]], name: str) -> list[frozenset[str]]:
    """Return the labels with this backend alone wherever it takes a node."""
    alone = frozenset({name})
    return [alone if name in label else label for label in labels]


def _with_eligible(
    view: GraphView, nodes: tuple[int, ...], labels: Sequence[frozenset[str]]
) -> Group:
    """Return a group with all backends that take it, not only those that it was clustered for."""
    return Group(nodes, frozenset.intersection(*(labels[n] for n in view.outermost(nodes))))


def _eligible(group: Group, made_for: Sequence[str], quick: Collection[str]) -> frozenset[str]:
    if JOINT in made_for:
        return group.label
    return group.label & frozenset(made_for) or group.label & frozenset(quick)


def _preference_order(
    group: Group, made_for: Sequence[str], name: str
) -> tuple[bool, int, tuple[int, ...]]:
    """Sort key: groups made for this backend first, then larger ones."""
    return name in made_for, len(group.nodes), group.nodes


def _near_duplicates(
    view: GraphView, groups: Sequence[Group]
) -> dict[tuple[int, ...], list[Group]]:
    """Return, for each group, the others that have the same heavy ops and almost the same other ops."""
    heavy = {i for i, node in enumerate(view.nodes) if kind_of(node) in _HEAVY}
    sets = {g.nodes: frozenset(g.nodes) for g in groups}

    def is_near(a: frozenset[int], b: frozenset[int]) -> bool:
        rim = a ^ b
        few = len(rim) <= max(
            OVERLAP_TOLERANCE * len(a | b), min(OVERLAP_TOLERANCE_NODES, len(a & b) / 2)
        )
        return few and not rim & heavy

    return {
        one.nodes: [g for g in groups if g is not one and is_near(sets[one.nodes], sets[g.nodes])]
        for one in groups
    }


def _not_tried(view: GraphView, one: Group, instead: Group, name: str) -> Reason:
    more, less = set(instead.nodes) - set(one.nodes), set(one.nodes) - set(instead.nodes)
    rim: Iterable[str] = sorted({kind_of(view.nodes[n]) for n in more | less})
    detail = (
        f"{name} tries nearly the same ops instead, {len(more)} more and {len(less)} fewer "
        f"({', '.join(rim)})."
    )
    subject = view.nodes[one.nodes[0]].name
    return Reason(Stage.CONVERT, Code.NOT_TRIED, name, subject, detail)
