# SPDX-License-Identifier: Apache-2.0
"""Groups are convex, single-label, maximal, deterministic and independent of the numbering."""

import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import combinations, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from labelled_dag import labelled
from random_dags import (
    BOTH,
    NOBODY,
    A,
    B,
    common_label,
    is_acyclic,
    may_merge,
    problems,
    renumber,
    units,
)

from blade.clustering import Cost, Group, Problem, cluster

# Everything may merge; siblings of large values only; no merge without an edge.
COSTS = [Cost(), Cost(call=1, byte=1, horizontal=2), Cost(call=0, horizontal=0)]


def _groups(problem: Problem) -> list[tuple[int, ...]]:
    return [group.nodes for group in cluster(problem).groups]


def _plain(labels: Sequence[frozenset[str]], pairs: Sequence[tuple[int, int]]) -> Problem:
    return Problem(labels, [(p, c, 8) for p, c in pairs])


# Properties


@given(problems(COSTS))
@settings(max_examples=300, deadline=None)
def test_groups_are_acyclic_and_taken_by_one_backend(problem: Problem) -> None:
    clustering = cluster(problem)
    assert is_acyclic(problem, units(problem, clustering))
    for group in [*clustering.groups, *clustering.dissolved]:
        assert group.label == common_label(problem, group.nodes) != NOBODY
    grouped = {v for part in [*clustering.groups, *clustering.dissolved] for v in part.nodes}
    assert grouped == {v for v, label in enumerate(problem.labels) if label}


@given(problems(COSTS))
@settings(max_examples=300, deadline=None)
def test_no_legal_and_profitable_merge_is_left(problem: Problem) -> None:
    parts = units(problem, cluster(problem))
    for one, two in combinations(parts, 2):
        if common_label(problem, one | two) and may_merge(problem, one, two):
            rest = [part for part in parts if part not in (one, two)]
            assert not is_acyclic(problem, [one | two, *rest]), (one, two)


@given(problems(max_nodes=7))
@settings(max_examples=100, deadline=None)
def test_no_set_of_groups_could_merge(problem: Problem) -> None:
    """More than pairs: where everything pays, no larger set of groups can be contracted either."""
    parts = units(problem, cluster(problem))
    for size in range(2, len(parts) + 1):
        for some in combinations(parts, size):
            whole = frozenset[int]().union(*some)
            if common_label(problem, whole):
                rest = [part for part in parts if part not in some]
                assert not is_acyclic(problem, [whole, *rest]), some


@given(st.data(), problems(COSTS, unique=True))
@settings(max_examples=300, deadline=None)
def test_numbering_does_not_matter(data: st.DataObject, problem: Problem) -> None:
    numbers = data.draw(st.permutations(range(len(problem.labels))))
    expected = {frozenset(numbers[v] for v in nodes) for nodes in _groups(problem)}
    assert {frozenset(nodes) for nodes in _groups(renumber(problem, numbers))} == expected


@given(st.data(), st.integers(2, 4), problems(unique=True, max_nodes=5))
@settings(max_examples=100, deadline=None)
def test_equal_parts_give_the_same_shape(
    data: st.DataObject, copies: int, problem: Problem
) -> None:
    """In copies of one graph numbering chooses between images; the groups' make-up stays."""
    n = len(problem.labels)
    whole = Problem(
        list(problem.labels) * copies,
        [(p + k * n, c + k * n, w) for k in range(copies) for p, c, w in problem.edges],
        [(p + k * n, c + k * n) for k in range(copies) for p, c in problem.effects],
        list(problem.benefit or []) * copies,
    )
    numbers = data.draw(st.permutations(range(n * copies)))
    old = sorted(range(n * copies), key=numbers.__getitem__)
    shape = sorted(sorted(v % n for v in nodes) for nodes in _groups(whole))
    renumbered = _groups(renumber(whole, numbers))
    assert sorted(sorted(old[v] % n for v in nodes) for nodes in renumbered) == shape


# Known graphs


def test_the_pair_that_greedy_rounds_lose_is_found_in_every_numbering() -> None:
    u1, s1, u2, s2 = range(4)
    problem = _plain([NOBODY, A, NOBODY, A], [(u1, u2), (s1, u2), (u1, s2), (s1, s2)])
    for numbers in permutations(range(4)):
        expected = tuple(sorted((numbers[s1], numbers[s2])))
        assert _groups(renumber(problem, numbers)) == [expected]


def test_thirty_producers_of_one_consumer_are_one_group() -> None:
    problem = _plain([A] * 31, [(v, 30) for v in range(30)])
    assert _groups(problem) == [tuple(range(31))]


def test_transformer_layers_are_one_group() -> None:
    pairs, x = [], 0
    for _ in range(6):
        q, k, v, attention, add = range(x + 1, x + 6)
        pairs += [(x, q), (x, k), (x, v), (q, attention), (k, attention), (v, attention)]
        pairs += [(attention, add), (x, add)]
        x = add
    assert len(_groups(_plain([A] * (x + 1), pairs))) == 1


def test_disconnected_pieces_are_one_group_unless_that_does_not_pay() -> None:
    problem = _plain([A] * 5, [(0, 1), (2, 3)])
    assert _groups(problem) == [(0, 1, 2, 3, 4)]
    apart = Problem(problem.labels, problem.edges, cost=Cost(call=1, horizontal=2))
    assert _groups(apart) == [(0, 1), (2, 3), (4,)]


def test_siblings_merge_where_the_shared_value_is_large_enough() -> None:
    labels = [NOBODY, NOBODY, A, A, A, A]
    edges = [(0, 2, 100), (0, 3, 100), (1, 4, 10), (1, 5, 10)]
    cost = Cost(call=1, byte=0.1, horizontal=5)
    assert _groups(Problem(labels, edges, cost=cost, benefit=[99.0] * 6)) == [(2, 3), (4,), (5,)]


def test_an_independent_node_joins_one_side_of_a_cut() -> None:
    # 0 -> u -> 1 cuts; 2 could go to either side and must not join both.
    problem = _plain([A, NOBODY, A, A], [(0, 1), (1, 2)])
    groups = _groups(problem)
    assert sorted(map(len, groups)) == [1, 2] and not any({0, 2} <= set(g) for g in groups)


def test_the_edge_with_most_bytes_merges_first() -> None:
    # 0 -> 1 -> 2 and 0 -> u -> 2: node 1 goes with either end, not with both.
    for light, heavy, expected in [(1, 9, (1, 2)), (9, 1, (0, 1))]:
        edges = [(0, 1, light), (1, 2, heavy), (0, 3, 5), (3, 2, 5)]
        assert expected in _groups(Problem([A, A, A, NOBODY], edges))


def test_a_skip_connection_takes_its_branch_along() -> None:
    edges = [(0, 1, 1), (1, 2, 1), (2, 3, 1), (0, 3, 1000)]
    assert _groups(Problem([A] * 4, edges)) == [(0, 1, 2, 3)]


def test_an_effect_edge_through_an_unsupported_node_cuts() -> None:
    problem = Problem([A, NOBODY, A], [(0, 2, 8)], effects=[(0, 1), (1, 2)])
    assert _groups(problem) == [(0,), (2,)]
    assert _groups(Problem([A, NOBODY, A], [(0, 2, 8)], effects=[(0, 1)])) == [(0, 2)]


def test_a_node_of_two_backends_goes_along_the_heavier_edge() -> None:
    assert cluster(Problem([A, BOTH, B], [(0, 1, 1), (1, 2, 2)])).groups == (
        Group((0,), A),
        Group((1, 2), B),
    )


def test_two_branches_of_different_backends_do_not_share_a_group() -> None:
    # Each path alone would do; the two together have no backend in common.
    edges = [(0, 1, 1), (0, 2, 1), (1, 3, 1), (2, 3, 1), (0, 3, 99)]
    groups = _groups(Problem([BOTH, A, B, BOTH], edges))
    assert groups in ([(0, 1), (2, 3)], [(0, 2), (1, 3)])


def test_a_free_node_of_two_backends_goes_where_most_is_gained() -> None:
    problem = Problem([A, NOBODY, A, B, BOTH], [], benefit=[1, 0, 1, 5, 1])
    assert _groups(problem) == [(0, 2), (3, 4)]


# What is not worth an engine


def test_a_group_below_the_minimum_is_dissolved_with_its_size() -> None:
    problem = Problem([A, NOBODY, A, A], [(0, 1, 8), (1, 2, 8), (2, 3, 8)], min_size=2)
    clustering = cluster(problem)
    assert clustering.groups == (Group((2, 3), A),)
    (single,) = clustering.dissolved
    assert (single.nodes, single.label) == ((0,), A)
    assert single.detail == "the group has 1 nodes, fewer than the minimum of 2"


def test_a_group_that_does_not_pay_is_dissolved_with_the_numbers() -> None:
    # The value of node 0 is read twice and counts once: 40 in, 16 out.
    labels = [NOBODY, A, A, NOBODY]
    edges = [(0, 1, 40), (0, 2, 40), (1, 2, 4), (2, 3, 16)]
    cost = Cost(call=2, byte=0.5)
    (group,) = cluster(Problem(labels, edges, benefit=[0, 14, 15, 0], cost=cost)).dissolved
    assert group.nodes == (1, 2)
    assert group.detail == (
        "the group gains 29 and its boundary costs 30: 2 for the call and 0.5 for each of 56 bytes"
    )
    assert cluster(Problem(labels, edges, benefit=[0, 15, 15, 0], cost=cost)).dissolved == ()


# Questions that make no sense


def test_an_empty_graph_has_no_groups() -> None:
    assert _groups(Problem([], [])) == []


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Problem([A], [(0, 1, 8)]), r"edge \(0, 1, 8\) is not between two of the 1 nodes"),
        (lambda: Problem([A], [], effects=[(0, 0)]), r"edge \(0, 0\) is not between two"),
        (lambda: Problem([A], [], benefit=[1, 2]), "benefit has 2 entries for 1 nodes"),
        (lambda: Problem([A], [], cost=Cost(byte=-1)), "a cost is negative"),
        (lambda: cluster(_plain([A, A], [(0, 1), (1, 0)])), "the graph has a cycle; 2 nodes"),
    ],
)
def test_nonsense_is_refused(build: object, message: str) -> None:
    assert callable(build)
    with pytest.raises(ValueError, match=message):
        build()


def test_the_answer_does_not_depend_on_the_process() -> None:
    """Hashes of strings differ between processes; nothing may lean on them."""
    own = os.environ.get("PYTHONHASHSEED")
    ran = subprocess.run(
        [sys.executable, "-c", "from labelled_dag import labelled; print(labelled())"],
        env={"PYTHONHASHSEED": "2" if own == "1" else "1", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout == f"{labelled()}\n" and len(ran.stdout) > 300


def test_a_value_read_by_many_separate_groups_joins_none_of_them() -> None:
    """As an attention mask is: 300 groups in a row, cut by nodes in between, all reading node 0."""
    labels = [NOBODY] + [A, A, NOBODY] * 300
    pairs = [(v, v + 1) for v in range(1, 900)] + [(0, v) for v in range(1, 901, 3)]
    assert _groups(_plain(labels, pairs)) == [(v, v + 1) for v in range(1, 901, 3)]
