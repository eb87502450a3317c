# SPDX-License-Identifier: Apache-2.0
"""Cluster nodes into engines: ints in, convex groups out.

1. Vertical: along every edge, most bytes first, producer and consumer become one group.
2. Siblings: groups that read the same value, largest value first, where ``Cost`` says that it pays.
3. Independent: remaining groups without a node outside between them, where it pays.
4. Groups that are too small or do not pay for their boundary are dissolved.

Contracting all groups leaves a DAG after every merge. At the end no two groups are left whose merge is legal
and profitable (``quotient_graph`` explains why no pair has to be tried twice). The result depends on the
graph alone; ``canonical_order`` describes what the numbering can still decide.
"""

from collections.abc import Iterable, Sequence
from math import fsum

from blade.clustering.canonical_order import rank_nodes
from blade.clustering.problem import Clustering, Dissolved, Group, Problem
from blade.clustering.quotient_graph import Quotient
from blade.clustering.topological_order import sort_topologically

_NEAREST = 8


def cluster(problem: Problem) -> Clustering:
    """Group the nodes of ``problem``. Raises ``ValueError`` if its edges form a cycle."""
    backends = sorted(frozenset[str]().union(*problem.labels))
    bit = {name: 1 << i for i, name in enumerate(backends)}
    masks = [sum(bit[name] for name in label) for label in problem.labels]
    depth, rank = rank_nodes(problem, masks)
    quotient = Quotient(masks, problem.arcs())
    _merge_along_edges(problem, quotient, depth, rank)
    _merge_siblings(problem, quotient, rank)
    if problem.cost.call > problem.cost.horizontal:
        for name in _by_benefit(problem, backends):
            _merge_independent(quotient, bit[name])
    return _settle(problem, quotient)


def schedule(problem: Problem, groups: Iterable[Sequence[int]]) -> list[tuple[int, ...]]:
    """Return a legal order of the units: each of ``groups`` as one, every other node alone.

    Among the units that are ready the one with the smallest node goes first, so that an ordered program keeps
    its order. Nodes of a unit are ascending. Raises ``ValueError`` if the groups overlap or are not convex
    together.
    """
    unit = list(range(len(problem.labels)))
    nodes: dict[int, tuple[int, ...]] = {v: (v,) for v in unit}
    for group in groups:
        first = min(group)
        for v in group:
            if nodes.pop(v, ()) != (v,):
                raise ValueError(f"node {v} is in two groups")
            unit[v] = first
        nodes[first] = tuple(sorted(group))
    arcs = {(unit[p], unit[c]) for p, c in problem.arcs() if unit[p] != unit[c]}
    order = sort_topologically(len(unit), arcs)
    return [nodes[u] for u in order if u in nodes]


def _merge_along_edges(
    problem: Problem, quotient: Quotient, depth: list[int], rank: list[int]
) -> None:
    # Among equal weights the short edge goes first: a skip connection then finds its branch merged.
    arcs = [(-w, depth[c] - depth[p], rank[p], rank[c], p, c) for p, c, w in problem.edges]
    arcs += [(1, depth[c] - depth[p], rank[p], rank[c], p, c) for p, c in problem.effects]
    for *_, p, c in sorted(arcs):
        quotient.merge(p, c)


def _merge_siblings(problem: Problem, quotient: Quotient, rank: list[int]) -> None:
    cost = problem.cost
    # A value read all over a deep graph (an attention mask) has many readers that cannot merge. Where step 3
    # merges the remaining groups anyway, the nearest few are enough; else every pair counts.
    tries = _NEAREST if cost.call > cost.horizontal else len(problem.labels)
    readers: dict[int, set[int]] = {}
    size: dict[int, int] = {}
    for p, c, w in problem.edges:
        readers.setdefault(p, set()).add(c)
        size[p] = max(size.get(p, 0), w)
    for p in sorted(readers, key=lambda p: (-size[p], rank[p])):
        if cost.call + cost.byte * size[p] <= cost.horizontal:
            continue
        apart: list[int] = []
        for c in sorted(readers[p], key=rank.__getitem__):
            if not quotient.mask[quotient.sets.find(c)]:
                continue
            if not any(quotient.merge(other, c) for other in apart[: -tries - 1 : -1]):
                apart.append(c)


def _by_benefit(problem: Problem, backends: list[str]) -> list[str]:
    """Order backends by benefit, the largest first: it gets the nodes that several backends take."""
    benefit = problem.benefit or [1.0] * len(problem.labels)
    gains: dict[str, list[float]] = {name: [] for name in backends}
    for label, gain in zip(problem.labels, benefit, strict=True):
        for name in label:
            gains[name].append(gain)
    return sorted(backends, key=lambda name: (-fsum(gains[name]), name))


def _merge_independent(quotient: Quotient, backend: int) -> None:
    """Merge groups of ``backend`` that have only nodes of ``backend`` between them.

    A group's level counts the switches to other nodes and back on the way to it. Two groups of one level have
    nothing else between them, by step 1 not even each other, so a level is one legal merge; and level i + 1
    starts behind a node that is itself behind level i, so levels never merge.
    """
    level: dict[int, int] = {}
    levels: dict[int, set[int]] = {}
    for g in quotient.order:
        if quotient.mask[g] & backend:
            here = max(
                (level[p] + (not quotient.mask[p] & backend) for p in quotient.pred[g]), default=0
            )
            levels.setdefault(here, set()).add(g)
        else:
            here = max((level[p] for p in quotient.pred[g]), default=-1)
        level[g] = here
    for groups in levels.values():
        quotient.contract(groups)
    quotient.reorder()


def _settle(problem: Problem, quotient: Quotient) -> Clustering:
    """Return the groups that pay, and the dissolved ones with the numbers that say why."""
    groups: list[Group] = []
    dissolved: list[Dissolved] = []
    members = quotient.sets.members()
    boundary = _boundary_bytes(problem, quotient)
    for root, nodes in members.items():
        if not quotient.mask[root]:
            continue
        label = frozenset.intersection(*(problem.labels[v] for v in nodes))
        why = _why_not_pay(problem, nodes, boundary.get(root, 0))
        if why is None:
            groups.append(Group(tuple(nodes), label))
        else:
            dissolved.append(Dissolved(tuple(nodes), label, why))
    return Clustering(tuple(groups), tuple(dissolved))


def _boundary_bytes(problem: Problem, quotient: Quotient) -> dict[int, int]:
    """Return the bytes into and out of each group; a value counts once however many nodes read it."""
    values: dict[tuple[int, int], int] = {}  # (group, producer) -> bytes
    find = quotient.sets.find
    for p, c, w in problem.edges:
        here, there = find(p), find(c)
        if here != there:
            values[here, p] = max(values.get((here, p), 0), w)
            values[there, p] = max(values.get((there, p), 0), w)
    total: dict[int, int] = {}
    for (group, _), w in values.items():
        total[group] = total.get(group, 0) + w
    return total


def _why_not_pay(problem: Problem, nodes: list[int], boundary: int) -> str | None:
    cost = problem.cost
    count = len(nodes) if problem.ops is None else sum(problem.ops[v] for v in nodes)
    if count < problem.min_size:
        return f"the group has {count} nodes, fewer than the minimum of {problem.min_size}"
    gain = fsum(problem.benefit[v] if problem.benefit else 1.0 for v in nodes)
    price = cost.call + cost.byte * boundary
    if gain < price:
        return (
            f"the group gains {gain:g} and its boundary costs {price:g}: "
            f"{cost.call:g} for the call and {cost.byte:g} for each of {boundary} bytes"
        )
    return None
