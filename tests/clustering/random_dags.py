# SPDX-License-Identifier: Apache-2.0
"""Random problems for hypothesis, and slow, obvious answers to check the fast ones against."""

from collections.abc import Iterable, Sequence
from itertools import combinations

from hypothesis import strategies as st

from blade.clustering import Clustering, Cost, Problem

NOBODY = frozenset[str]()
A, B = frozenset({"a"}), frozenset({"b"})
BOTH = A | B


@st.composite
def problems(
    draw: st.DrawFn, costs: Sequence[Cost] = (Cost(),), unique: bool = False, max_nodes: int = 9
) -> Problem:
    """A DAG of 1 to ``max_nodes`` nodes in a random numbering (not a topological one).

    With ``unique`` no two nodes have the same benefit: every node can be told from every other.
    """
    n = draw(st.integers(1, max_nodes))
    labels = draw(st.lists(st.sampled_from([A, A, A, B, BOTH, NOBODY]), min_size=n, max_size=n))
    pairs = list(combinations(draw(st.permutations(range(n))), 2))
    # Bit i of one integer is arc i: far quicker to draw than a list of choices.
    one, two, effect = (draw(st.integers(0, 2 ** len(pairs) - 1)) for _ in range(3))
    chosen = [pair for i, pair in enumerate(pairs) if (one & two) >> i & 1]
    weights = draw(st.lists(st.integers(0, 3), min_size=len(chosen), max_size=len(chosen)))
    edges = [(p, c, w) for (p, c), w in zip(chosen, weights)]
    # Thinned on purpose: with too many arcs nothing is left to merge.
    effects = [pair for i, pair in enumerate(pairs) if effect >> i & 1 and i % 4 == 0]
    benefit = draw(st.permutations(range(1, n + 1))) if unique else None
    return Problem(labels, edges, effects, benefit, cost=draw(st.sampled_from(list(costs))))


def renumber(problem: Problem, numbers: Sequence[int]) -> Problem:
    """The same graph with node v called ``numbers[v]`` and every list in another order."""
    n = len(numbers)
    old = sorted(range(n), key=numbers.__getitem__)
    return Problem(
        [problem.labels[v] for v in old],
        [(numbers[p], numbers[c], w) for p, c, w in reversed(problem.edges)],
        [(numbers[p], numbers[c]) for p, c in reversed(problem.effects)],
        None if problem.benefit is None else [problem.benefit[v] for v in old],
        problem.min_size,
        problem.cost,
    )


def units(problem: Problem, clustering: Clustering) -> list[frozenset[int]]:
    """Every group, dissolved ones too, and every other node alone."""
    groups = [frozenset(g.nodes) for g in [*clustering.groups, *clustering.dissolved]]
    grouped = frozenset[int]().union(*groups)
    assert sum(map(len, groups)) == len(grouped), "groups overlap"
    return groups + [frozenset({v}) for v in range(len(problem.labels)) if v not in grouped]


def common_label(problem: Problem, nodes: Iterable[int]) -> frozenset[str]:
    return frozenset.intersection(*(problem.labels[v] for v in nodes))


def is_acyclic(problem: Problem, parts: Sequence[frozenset[int]]) -> bool:
    """Whether the graph with every part contracted is a DAG: remove sinks until nothing is left."""
    unit = {v: i for i, part in enumerate(parts) for v in part}
    arcs = {(unit[p], unit[c]) for p, c in problem.arcs() if unit[p] != unit[c]}
    left = set(range(len(parts)))
    while sinks := {u for u in left if not any(x == u and y in left for x, y in arcs)}:
        left -= sinks
    return not left


def may_merge(problem: Problem, one: frozenset[int], two: frozenset[int]) -> bool:
    """Whether ``Cost`` says that merging them pays: any edge does, else a call and a shared read."""
    cost = problem.cost
    if any((p in one and c in two) or (p in two and c in one) for p, c in problem.arcs()):
        return True
    sizes: dict[int, int] = {}
    for p, _, w in problem.edges:
        sizes[p] = max(sizes.get(p, 0), w)
    reads = [{p for p, c, _ in problem.edges if c in part} for part in (one, two)]
    gains = [cost.call + cost.byte * sizes[p] for p in reads[0] & reads[1]]
    return max([cost.call, *gains]) > cost.horizontal
