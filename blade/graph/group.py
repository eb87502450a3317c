# SPDX-License-Identifier: Apache-2.0
"""Cluster every block of a graph on its own; the answer is in the node numbers of the whole view.

group(graph_view, plan.labels, min_size=3).groups
"""

from collections.abc import Sequence
from dataclasses import replace

from blade.clustering.cluster import cluster
from blade.clustering.problem import Clustering, Dissolved, Group, Problem
from blade.graph.view import GraphView


def group(view: GraphView, labels: Sequence[frozenset[str]], min_size: int = 1) -> Clustering:
    """Groups and dissolved ones of all blocks, each ordered by smallest node."""
    groups: list[Group] = []
    dissolved: list[Dissolved] = []
    for nodes, problem in zip(view.blocks, _problems(view, labels, min_size), strict=True):
        found = cluster(problem)
        groups += [replace(g, nodes=tuple(nodes[v] for v in g.nodes)) for g in found.groups]
        dissolved += [replace(d, nodes=tuple(nodes[v] for v in d.nodes)) for d in found.dissolved]
    return Clustering(
        tuple(sorted(groups, key=lambda g: g.nodes)),
        tuple(sorted(dissolved, key=lambda d: d.nodes)),
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
        Problem([labels[v] for v in nodes], edges[b], effects[b], min_size=min_size)
        for b, nodes in enumerate(view.blocks)
    ]
