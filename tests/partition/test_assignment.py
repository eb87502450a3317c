# SPDX-License-Identifier: Apache-2.0
"""takers: who tries which group, and who does not because nothing new would come of it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_backends import Fake, produces

from blade.clustering.problem import Clustering, Group
from blade.core.reason import Code
from blade.partition.assignment import JOINT, PartitionStrategy, assign_backends

KINDS = {"L": "linear", "r": "relu", "e": "embedding"}


def view_of(text: str) -> Any:
    """One node per letter of ``text``."""
    nodes = [
        SimpleNamespace(target=getattr(torch.ops.aten, KINDS[x]).default, name=f"{x}{i}")
        for i, x in enumerate(text)
    ]
    return SimpleNamespace(nodes=nodes, outermost=tuple)


def way(name: str, *groups: range) -> PartitionStrategy:
    return PartitionStrategy(
        name, Clustering(tuple(Group(tuple(g), frozenset()) for g in groups), ())
    )


def tried(
    view: Any, ways: list[PartitionStrategy], labels: dict[str, range], **more: Any
) -> dict[tuple[int, ...], str]:
    """Nodes -> who tries them."""
    backends: Any = [Fake(name, in_process=name == "disc") for name in labels]
    each = [
        frozenset(name for name, nodes in labels.items() if i in nodes)
        for i in range(len(view.nodes))
    ]
    made = assign_backends(ways, each, backends, view, **more)
    assert all(one.eligible <= one.group.label for one in made)
    return {one.group.nodes: " ".join(sorted(one.eligible)) for one in made}


def test_the_mixture_is_for_all_and_a_cut_for_its_backend_and_the_rest_for_the_quick_ones() -> None:
    view = view_of("LrLrLrLrLr")
    ways = [way(JOINT, range(10)), way("b", range(2), range(4, 6), range(6, 10))]
    labels = {"disc": range(10), "a": range(10), "b": range(6)}
    assert tried(view, ways, labels) == {
        tuple(range(10)): "a disc",
        (0, 1): "b",
        (4, 5): "b",
        (6, 7, 8, 9): "disc",
    }


@produces(Code.NOT_TRIED)
def test_of_groups_that_differ_at_the_rim_each_backend_tries_one() -> None:
    """b takes no lookups; what is left without them is nothing new to a and disc."""
    view = view_of("ee" + "Lr" * 10)
    ways = [way(JOINT, range(22)), way("b", range(2, 22))]
    labels = {"disc": range(22), "a": range(22), "b": range(2, 22)}
    assert tried(view, ways, labels) == {
        tuple(range(22)): "a disc",
        tuple(range(2, 22)): "b",
    }
    backends: Any = [Fake("a"), Fake("b")]
    each = [frozenset("a" if i < 2 else "ab") for i in range(22)]
    whole, rest = assign_backends([ways[0], way("a", range(2, 22))], each, backends, view)
    assert (whole.eligible, rest.eligible, rest.reasons) == (frozenset(), {"a"}, ())
    [reason] = whole.reasons
    assert (reason.code, reason.backend) == (Code.NOT_TRIED, "a")
    assert "0 more and 2 fewer (aten::embedding)" in reason.detail


def test_a_heavy_op_makes_another_group() -> None:
    view = view_of("L" + "Lr" * 20)
    ways = [way(JOINT, range(41)), way("b", range(1, 41))]
    found = tried(view, ways, {"disc": range(41), "b": range(1, 41)})
    assert found == {tuple(range(41)): "disc", tuple(range(1, 41)): "b"}
    found = tried(view, ways, {"disc": range(41), "b": range(1, 40)})
    assert found == {tuple(range(41)): "disc", tuple(range(1, 41)): "disc"}


@pytest.mark.parametrize("losing", [range(4), range(6, 10)])
def test_losers_try_only_what_they_lost_at(losing: range) -> None:
    view = view_of("LrLrLrLrLr")
    ways = [way(JOINT, range(4), range(6, 10))]
    labels = {"disc": range(10), "a": range(10)}
    found = tried(view, ways, labels, losers={"a": tuple(losing)})
    assert found.pop(tuple(losing)) == "a disc"
    assert list(found.values()) == ["disc"]
