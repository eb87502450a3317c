# SPDX-License-Identifier: Apache-2.0
"""A canonical order of the nodes: it depends on the graph and not on its numbering.

Each node gets a colour, a 64-bit hash of the labelled graph as seen from it: all its ancestors, then all its
descendants with those colours, then all ancestors once more (colour refinement, Weisfeiler and Leman 1968,
made linear by following the DAG). Numbering only breaks ties, between nodes with equal colours; such nodes
are almost always images of each other under a symmetry of the graph.
"""

from collections.abc import Sequence

from blade.clustering.problem import Problem
from blade.clustering.topological_order import sort_topologically

# Hashes of ints, floats and tuples of them are the same in every process; those of strings are not.
_Arc = tuple[int, int]  # (weight, neighbour); an effect edge weighs -1


def rank_nodes(problem: Problem, masks: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return depth (longest path from a source) and canonical rank of each node.

    Ranks are ``0 .. n-1``, ascending with the depth. Raises ``ValueError`` on a cycle.
    """
    size = len(masks)
    order = sort_topologically(size, problem.arcs())
    ins: list[list[_Arc]] = [[] for _ in range(size)]
    outs: list[list[_Arc]] = [[] for _ in range(size)]
    for p, c, weight in problem.edges:
        ins[c].append((weight, p))
        outs[p].append((weight, c))
    for p, c in problem.effects:
        ins[c].append((-1, p))
        outs[p].append((-1, c))
    benefit = problem.benefit or [1.0] * size
    colour = [hash((mask, gain)) for mask, gain in zip(masks, benefit, strict=True)]
    colour = _sweep(order, ins, colour)
    colour = _sweep(order[::-1], outs, colour)
    colour = _sweep(order, ins, colour)
    depth = [0] * size
    for v in order:
        depth[v] = max((depth[p] + 1 for _, p in ins[v]), default=0)
    return depth, _order_levels(depth, colour, ins)


def _order_levels(depth: list[int], colour: list[int], ins: list[list[_Arc]]) -> list[int]:
    """Rank by depth, then colour, then the ranks of the producers, then number."""
    levels: list[list[int]] = [[] for _ in range(max(depth, default=-1) + 1)]
    for v, level in enumerate(depth):
        levels[level].append(v)
    ranks = [0] * len(depth)
    first = 0
    for level_nodes in levels:
        # Producers have their ranks by now. They tell equal branches apart over their whole length, so that
        # the nodes of one branch stay together.
        keys = {v: (colour[v], sorted([(w, ranks[u]) for w, u in ins[v]]), v) for v in level_nodes}
        for rank, v in enumerate(sorted(level_nodes, key=keys.__getitem__), first):
            ranks[v] = rank
        first += len(level_nodes)
    return ranks


def _sweep(order: list[int], arcs: list[list[_Arc]], colour: list[int]) -> list[int]:
    """Return new colours: a node's own combined, through ``arcs``, with its neighbours' new ones."""
    new = [0] * len(order)
    for v in order:
        near = sorted([(weight, new[u]) for weight, u in arcs[v]])
        new[v] = hash((colour[v], *near))
    return new
