# SPDX-License-Identifier: Apache-2.0
"""Clusters every block of a graph separately, with nodes numbered as in the whole view.

cluster_blocks(graph_view, plan.labels, min_size=3).groups
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from blade.clustering.cluster import cluster
from blade.clustering.problem import Clustering, Dissolved, Group, Problem
from blade.core.cluster import OpNode, values_in
from blade.graph.torchscript.leading_views import LeadingViews
from blade.graph.torchscript.view import GraphView

_NUMBERS = (
    "It computes only numbers, on the CPU; the engines of the other device take them as they are."
)
_VIEWS = "Without views of its inputs, which leave it, it has {count} ops, fewer than min_cluster_size={least}."
_AT = "@"  # separates a backend's name and a device


def cluster_blocks(
    view: GraphView, labels: Sequence[frozenset[str]], min_size: int = 1
) -> Clustering:
    """Groups and dissolved groups of all blocks, ordered by smallest node; no group spans devices, or has views that
    make its engine decline (``leading_views``).

    Beside an accelerator, a group that computes only numbers (tensors of the CPU without axes) is dissolved.
    """
    groups: list[Group] = []
    dissolved: list[Dissolved] = []
    places = [_device(node) for node in view.nodes]
    devices = tuple(dict.fromkeys(place for place in places if place is not None))
    apart = _per_device(_without_bodies(view, labels), places, devices)
    leading = LeadingViews(view)
    for nodes, problem in zip(view.blocks, _problems(view, apart, min_size), strict=True):
        found = cluster(problem)
        for g in found.groups:
            inside, label = view.with_bodies([nodes[v] for v in g.nodes]), _eligible(g.label)
            left = leading.of(inside)
            kept = tuple(n for n in inside if n not in left)
            if len(devices) > 1 and all(_makes_numbers(view.nodes[n]) for n in inside):
                dissolved.append(Dissolved(inside, label, _NUMBERS))
            elif left and len(kept) < max(min_size, 1):
                why = _VIEWS.format(count=len(kept), least=min_size)
                dissolved.append(Dissolved(inside, label, why))
            else:
                groups.append(Group(kept, label))
        dissolved += [
            replace(
                d,
                nodes=view.with_bodies([nodes[v] for v in d.nodes]),
                label=_eligible(d.label),
            )
            for d in found.dissolved
        ]
    return Clustering(
        tuple(sorted(groups, key=lambda g: g.nodes)),
        tuple(sorted(dissolved, key=lambda d: d.nodes)),
    )


def _without_bodies(view: GraphView, labels: Sequence[frozenset[str]]) -> list[frozenset[str]]:
    """Labels without those of nodes in a loop that some backend takes: they are a part of its node."""
    inside = {i for loop, nodes in view.loops.items() if labels[loop] for i in nodes}
    return [frozenset() if k in inside else label for k, label in enumerate(labels)]


def _per_device(
    labels: Sequence[frozenset[str]],
    places: Sequence[torch.device | None],
    devices: Sequence[torch.device],
) -> Sequence[frozenset[str]]:
    """Labels with one entry per backend and device if there are several; a node without tensors fits each."""
    if len(devices) < 2:
        return labels
    return [
        frozenset(
            f"{name}{_AT}{one}" for name in label for one in (devices if place is None else [place])
        )
        for label, place in zip(labels, places, strict=True)
    ]


def _eligible(label: frozenset[str]) -> frozenset[str]:
    return frozenset(name.partition(_AT)[0] for name in label)


def _device(node: OpNode) -> torch.device | None:
    """Device of ``node``'s results, or of its operands if it returns no tensor."""
    found = [v.device for v in (*node.outputs, *values_in(node.args)) if v.device is not None]
    return found[0] if found else None


def _makes_numbers(node: OpNode) -> bool:
    return bool(node.outputs) and all(
        v.rank == 0 and v.device is not None and v.device.type == "cpu" for v in node.outputs
    )


def _problems(view: GraphView, labels: Sequence[frozenset[str]], min_size: int) -> list[Problem]:
    block_of = {node: b for b, nodes in enumerate(view.blocks) for node in nodes}
    number = {node: i for nodes in view.blocks for i, node in enumerate(nodes)}
    edges: list[list[tuple[int, int, int]]] = [[] for _ in view.blocks]
    effects: list[list[tuple[int, int]]] = [[] for _ in view.blocks]
    for p, c, weight in view.edges:
        edges[block_of[p]].append((number[p], number[c], weight))
    for a, b in view.effects:
        effects[block_of[a]].append((number[a], number[b]))
    return [
        Problem(
            [labels[v] for v in nodes],
            edges[b],
            effects[b],
            min_size=min_size,
            ops=[1 + len(view.loops.get(v, ())) for v in nodes],
        )
        for b, nodes in enumerate(view.blocks)
    ]
