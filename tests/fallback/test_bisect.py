# SPDX-License-Identifier: Apache-2.0
"""find_culprit: the right node, in few attempts."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from blade.core.reason import Code, Reason, Stage
from blade.fallback.bisect import Failure, build_without_culprits, find_culprit

WHOLE = Reason(Stage.CONVERT, Code.CONVERSION_FAILED, "fake", "cluster_0", "the whole")
FAULT = replace(WHOLE, backend="a")


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 300])
def test_one_bad_node_is_found(size: int) -> None:
    nodes = [10 * i for i in range(size)]
    for bad in {0, size // 3, size // 2, size - 1}:
        asked: list[Sequence[int]] = []

        def why_fails(prefix: Sequence[int], bad: int = bad, asked: list[Sequence[int]] = asked):  # type: ignore[no-untyped-def]
            asked.append(prefix)
            return WHOLE if 10 * bad in prefix else None

        node, _ = find_culprit(nodes, WHOLE, why_fails)
        assert node == 10 * bad
        assert len(asked) <= (size - 1).bit_length()
        assert all(list(prefix) == nodes[: len(prefix)] for prefix in asked)


def test_the_reason_is_that_of_the_shortest_failing_prefix() -> None:
    def why_fails(prefix: Sequence[int]) -> Reason | None:
        if len(prefix) < 4:
            return None
        return Reason(
            Stage.VERIFY, Code.WRONG_VALUES, "fake", f"cluster_0[:{len(prefix)}]", "wrong"
        )

    node, reason = find_culprit(range(9), WHOLE, why_fails)
    assert node == 3
    assert reason.subject == "cluster_0[:4]"


def test_a_failure_of_two_nodes_together_blames_the_later() -> None:
    node, _ = find_culprit(range(20), WHOLE, lambda p: WHOLE if {4, 11} <= set(p) else None)
    assert node == 11


def test_out_of_time_no_other_culprit_is_looked_for() -> None:
    """What was found is left out; the other group stays as it is."""
    failures = [Failure(str(k), (k,), frozenset({"a"}), FAULT) for k in range(2)]
    built: list[list[frozenset[str]]] = []
    found: list[str] = []

    def build(labels: list[frozenset[str]]) -> list[Failure]:
        built.append(list(labels))
        return [one for one in failures if labels[one.nodes[0]]]

    def find_node(failure: Failure) -> tuple[int, Reason]:
        found.append(failure.name)
        return failure.nodes[0], FAULT

    labels = [frozenset({"a"})] * 2
    left, culprits = build_without_culprits(labels, build, list, find_node, lambda: bool(found))
    assert found == ["0"] and culprits == [FAULT]
    assert built == [labels, [frozenset(), labels[1]]]
    assert left == failures[1:]
