# SPDX-License-Identifier: Apache-2.0
"""scouts: who is so far behind at its largest group that it tries nothing else."""

from typing import Any

import pytest
from fake_backends import Fake

from blade.clustering.problem import Group
from blade.fallback.built import Built
from blade.fallback.candidate import Candidate
from blade.fallback.scouts import find_losers
from blade.fallback.select import Decision
from blade.reason import Code
from blade.report import Timing, Verdict


def losers(speeds: dict[str, tuple[range, float, float]], quick: str = "disc") -> dict[str, Any]:
    """Of backends with the nodes of their groups, speeds and noise; each group has one name."""
    builts, decisions = [], {}
    for nodes in dict.fromkeys(group for group, _, _ in speeds.values()):
        name = f"cluster_{len(builts)}"
        builts.append(Built(name, Group(tuple(nodes), frozenset()), None, (), ()))
        tried = tuple(
            Candidate(b, None, None, Verdict(1, 0, 0.0), (Timing(((2,),), speed, 1.0, noise),))
            for b, (group, speed, noise) in speeds.items()
            if group == nodes
        )
        decisions[name] = Decision(None, (), tried)
    backends: Any = [Fake(name, in_process=name == quick) for name in speeds]
    found, reasons = find_losers(builts, decisions, backends)
    assert sorted(str(r.backend) for r in reasons) == sorted(found)
    assert all(r.code is Code.NOT_TRIED for r in reasons)
    return found


def test_who_is_far_behind_loses_and_who_is_near_does_not() -> None:
    nodes = range(10)
    found = losers({"disc": (nodes, 3.0, 0.0), "near": (nodes, 2.1, 0.0), "far": (nodes, 1.9, 0.0)})
    assert found == {"far": tuple(nodes)}


def test_noise_speaks_for_who_is_behind() -> None:
    nodes = range(10)
    assert losers({"disc": (nodes, 3.0, 0.1), "far": (nodes, 1.9, 0.1)}) == {}


def test_on_other_ops_nothing_is_compared() -> None:
    assert losers({"disc": (range(10), 3.0, 0.0), "far": (range(20, 40), 0.5, 0.0)}) == {}
    assert losers({"disc": (range(10), 3.0, 0.0), "far": (range(5, 12), 0.5, 0.0)}) != {}


@pytest.mark.parametrize(("quick", "loses"), [("disc", []), ("", ["disc"])])
def test_what_converts_quickly_is_tried_everywhere(quick: str, loses: list[str]) -> None:
    nodes = range(10)
    found = losers({"disc": (nodes, 1.0, 0.0), "fast": (nodes, 3.0, 0.0)}, quick)
    assert list(found) == loses
