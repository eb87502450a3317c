# SPDX-License-Identifier: Apache-2.0
"""find_culprit: the right node, in few attempts."""

from collections.abc import Sequence

import pytest

from blade.fallback.bisect import MAX_CULPRITS, find_culprit, without_culprits
from blade.reason import Code, Reason, Stage

WHOLE = Reason(Stage.CONVERT, Code.CONVERSION_FAILED, "fake", "cluster_0", "the whole")


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


BOTH = frozenset({"fake", "other"})


def failing(bad: dict[int, str | None], built: list[list[frozenset[str]]]):  # type: ignore[no-untyped-def]
    """Nodes that cannot be built by a backend (``None``: by anybody), one failure at a time."""

    def build(labels: list[frozenset[str]]) -> tuple[int, list[int]]:
        built.append(list(labels))
        failures = [n for n, who in bad.items() if (who or "fake") in labels[n]]
        return len(built), failures[:1]

    def blame(node: int) -> tuple[int, Reason]:
        who = bad[node]
        return node, Reason(
            Stage.CONVERT, Code.CONVERSION_FAILED, who and who.title(), f"%{node}", "no"
        )

    return build, blame


def test_culprits_lose_the_backend_that_the_reason_names_or_all() -> None:
    built: list[list[frozenset[str]]] = []
    build, blame = failing({1: "other", 2: None}, built)
    result, culprits = without_culprits([BOTH] * 3, build, blame)
    assert result == 3
    assert [c.subject for c in culprits] == ["%1", "%2"]
    assert built[-1] == [BOTH, frozenset({"fake"}), frozenset()]


def test_the_search_ends_with_so_many_culprits_or_without_time() -> None:
    build, blame = failing(dict.fromkeys(range(9)), [])
    result, culprits = without_culprits([BOTH] * 9, build, blame)
    assert (result, len(culprits)) == (MAX_CULPRITS + 1, MAX_CULPRITS)
    build, blame = failing({0: None}, [])
    assert without_culprits([BOTH], build, blame, has_time=lambda: False) == (1, [])
