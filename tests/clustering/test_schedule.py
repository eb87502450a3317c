# SPDX-License-Identifier: Apache-2.0
"""The execution order is a legal order of the original program, and stays close to it."""

import pytest
from hypothesis import given, settings
from random_dags import NOBODY, A, problems

from blade.clustering import Problem, cluster, schedule


@given(problems())
@settings(max_examples=300, deadline=None)
def test_the_order_is_legal_and_complete(problem: Problem) -> None:
    groups = [group.nodes for group in cluster(problem).groups]
    order = schedule(problem, groups)
    assert sorted(v for unit in order for v in unit) == list(range(len(problem.labels)))
    assert set(groups) <= set(order)
    place = {v: i for i, unit in enumerate(order) for v in unit}
    for before, after in problem.arcs():
        assert place[before] < place[after] or place[before] == place[after]
        assert place[before] != place[after] or order[place[before]] in groups


@given(problems())
@settings(max_examples=100, deadline=None)
def test_a_program_in_order_stays_as_it_is_without_groups(problem: Problem) -> None:
    forward = Problem(
        problem.labels,
        [(min(p, c), max(p, c), w) for p, c, w in problem.edges],
        [(min(p, c), max(p, c)) for p, c in problem.effects],
    )
    assert schedule(forward, []) == [(v,) for v in range(len(problem.labels))]


def test_a_group_waits_for_its_inputs_and_goes_before_what_comes_later() -> None:
    # Nodes 0 and 2 are one group that needs 1; node 3 needs nothing.
    problem = Problem([A, NOBODY, A, NOBODY], [(0, 2, 8), (1, 2, 8)])
    assert schedule(problem, [(0, 2)]) == [(1,), (0, 2), (3,)]


def test_groups_that_cannot_be_ordered_are_refused() -> None:
    problem = Problem([A, NOBODY, A], [(0, 1, 8), (1, 2, 8)])
    with pytest.raises(ValueError, match="cycle; 2 nodes"):
        schedule(problem, [(0, 2)])
    with pytest.raises(ValueError, match="node 1 is in two groups"):
        schedule(problem, [(0, 1), (1, 2)])
