# SPDX-License-Identifier: Apache-2.0
"""The graph of groups after each single merge, against the slow and obvious answer."""

from hypothesis import given, settings
from hypothesis import strategies as st
from random_dags import common_label, is_acyclic, problems

from blade.clustering import Problem
from blade.clustering.quotient_graph import Quotient
from blade.clustering.topological_order import ListOrder, sort_topologically

BITS = {"a": 1, "b": 2}


def _hull(problem: Problem, parts: set[frozenset[int]], x: int, y: int) -> frozenset[int]:
    """x's and y's groups and every group on a path between them, by closing reachability."""
    (one,) = (p for p in parts if x in p)
    (two,) = (p for p in parts if y in p)
    unit = {v: p for p in parts for v in p}
    reach = {(unit[p], unit[c]) for p, c in problem.arcs()} | {(p, p) for p in parts}
    for k in parts:
        reach |= {(i, j) for i in parts for j in parts if (i, k) in reach and (k, j) in reach}
    ends = [(one, two), (two, one)]
    between = {p for p in parts for a, b in ends if (a, p) in reach and (p, b) in reach}
    return frozenset[int]().union(one, two, *between)


@given(st.data(), problems(max_nodes=8))
@settings(max_examples=300, deadline=None)
def test_each_merge_joins_exactly_the_hull_or_is_refused(
    data: st.DataObject, problem: Problem
) -> None:
    nodes = st.integers(0, len(problem.labels) - 1)
    masks = [sum(BITS[name] for name in label) for label in problem.labels]
    quotient = Quotient(masks, problem.arcs())
    parts = {frozenset({v}) for v in range(len(problem.labels))}
    for x, y in data.draw(st.lists(st.tuples(nodes, nodes), max_size=12)):
        hull = _hull(problem, parts, x, y)
        merged = x != y and quotient.merge(x, y)
        assert merged == (x != y and (hull in parts or bool(common_label(problem, hull))))
        if merged:
            parts = {p for p in parts if not p & hull} | {hull}
        assert {frozenset(s) for s in quotient.sets.members().values()} == parts
        assert is_acyclic(problem, list(parts))
        _check_order(problem, quotient)


def _check_order(problem: Problem, quotient: Quotient) -> None:
    """The kept order lists every group once, its keys ascend and every arc goes forward."""
    find, key = quotient.sets.find, quotient.order.key
    listed = list(quotient.order)
    assert sorted(listed) == sorted(quotient.sets.members())
    assert [key[g] for g in listed] == sorted({key[g] for g in listed})
    for before, after in problem.arcs():
        one, two = find(before), find(after)
        assert one == two or key[one] < key[two]
        assert one == two or (two in quotient.succ[one] and one in quotient.pred[two])
    assert all(set(quotient.succ[g]) <= set(listed) - {g} for g in listed)


@given(st.data(), st.integers(2, 8))
@settings(max_examples=100, deadline=None)
def test_a_list_order_moves_elements_like_a_list(data: st.DataObject, size: int) -> None:
    order, expected = ListOrder(range(size)), list(range(size))
    for _ in range(data.draw(st.integers(1, 5))):
        moved = data.draw(st.permutations(expected))[: data.draw(st.integers(1, len(expected)))]
        kept = moved[: data.draw(st.integers(1, len(moved)))]
        anchor = data.draw(st.sampled_from(expected))
        at = expected.index(anchor) + 1
        expected = (
            [v for v in expected[:at] if v not in moved]
            + kept
            + [v for v in expected[at:] if v not in moved]
        )
        order.replace(set(moved), anchor, kept)
        assert list(order) == expected
        assert [order.key[v] for v in expected] == sorted({order.key[v] for v in expected})


def test_used_up_gaps_are_spread_again() -> None:
    order = ListOrder(range(100))
    first = order.respreads
    for v in range(2, 100):
        order.replace({v}, 0, [v])
    assert order.respreads > first
    assert list(order) == [0, *range(99, 1, -1), 1]
    assert [order.key[v] for v in order] == sorted({order.key[v] for v in order})


def test_a_refusal_is_final_and_cheap() -> None:
    quotient = Quotient([3, 0, 3], [(0, 1), (1, 2), (0, 2)])
    assert not quotient.merge(0, 2) and not quotient.merge(2, 0)
    assert list(quotient.order) == [0, 1, 2]


def test_sorting_prefers_the_numbering() -> None:
    assert sort_topologically(4, [(3, 0)]) == [1, 2, 3, 0]
