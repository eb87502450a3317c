# SPDX-License-Identifier: Apache-2.0
"""scouts: who is so far behind at its largest group that it tries nothing else."""

from typing import Any

import pytest
from fake_backends import Fake

from blade.clustering.problem import Group
from blade.core.reason import Code, Reason, Stage
from blade.report import Timing, Verdict
from blade.selection.first_round import eliminate_slow
from blade.selection.plan.built import ClusterCandidates
from blade.selection.plan.candidate import Candidate
from blade.selection.plan.select import Decision


def losers(
    times: dict[str, tuple[range, list[float]]],
    noise: float = 0.0,
    quick: str = "disc",
    failed: Code | None = None,
) -> dict[str, Any]:
    """Of backends with the nodes of their groups and their milliseconds at each sample, where the original
    takes 1 ms an op; one that ``failed`` has no times. Each group has one name."""
    builts, decisions = [], {}
    for nodes in dict.fromkeys(group for group, _ in times.values()):
        name = f"cluster_{len(builts)}"
        mine = {b: seconds for b, (group, seconds) in times.items() if group == nodes}
        tried = tuple(
            Candidate(
                b,
                None,
                None,
                Verdict(1, 0, 0.0),
                tuple(Timing(((2,),), len(nodes), ms, noise) for ms in seconds),
            )
            for b, seconds in mine.items()
            if seconds
        )
        reasons = tuple(
            Reason(Stage.CONVERT, failed, b, name, "It did.")
            for b, seconds in mine.items()
            if failed and not seconds
        )
        builts.append(ClusterCandidates(name, Group(tuple(nodes), frozenset()), None, (), reasons))
        decisions[name] = Decision(None, (), tried)
    backends: Any = [Fake(name, in_process=name == quick) for name in times]
    found, against = eliminate_slow(builts, decisions, backends)
    assert sorted(str(r.backend) for r in against) == sorted(found)
    assert all(r.code is Code.NOT_TRIED for r in against)
    return found


def test_who_takes_longer_for_a_part_than_another_one_for_all_loses() -> None:
    whole, part = range(100), range(5, 100)
    found = losers({"disc": (whole, [30, 50]), "ort": (whole, [31, 61]), "ov": (part, [34, 55])})
    assert found == {"ort": tuple(whole), "ov": tuple(part)}


def test_who_is_nearly_as_fast_or_faster_at_some_size_does_not() -> None:
    whole = range(100)
    times = {
        "disc": (whole, [30.0, 50.0]),
        "near": (whole, [32.0, 53.0]),
        "few": (whole, [29.0, 90.0]),
    }
    assert losers(times) == {}


def test_with_ops_of_its_own_it_takes_more_to_lose() -> None:
    most, other = range(100), range(30, 130)
    assert losers({"disc": (most, [30]), "b": (other, [40])}) == {}
    assert losers({"disc": (most, [30]), "b": (other, [50])}) == {"b": tuple(other)}
    assert losers({"disc": (most, [30]), "b": (other, [50])}, noise=0.1) == {}
    assert losers({"disc": (most, [30]), "b": (range(60, 160), [90])}) == {}


@pytest.mark.parametrize(("quick", "loses"), [("disc", []), ("", ["disc"])])
def test_what_converts_quickly_is_tried_everywhere(quick: str, loses: list[str]) -> None:
    nodes = range(10)
    found = losers({"disc": (nodes, [9.0]), "fast": (nodes, [3.0])}, quick=quick)
    assert list(found) == loses


def test_who_fails_where_another_one_serves_is_tried_no_further() -> None:
    times = {"disc": (range(10), [3.0]), "bad": (range(2, 9), [])}
    assert list(losers(times, failed=Code.CONVERSION_FAILED)) == ["bad"]
    assert losers(times, failed=Code.TIME_BUDGET) == {}
    assert losers(times | {"disc": (range(10), [11.0])}, failed=Code.CONVERSION_FAILED) == {}
    assert losers(times | {"disc": (range(20, 30), [3.0])}, failed=Code.CONVERSION_FAILED) == {}
