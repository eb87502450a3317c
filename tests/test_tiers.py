# SPDX-License-Identifier: Apache-2.0
"""The tables of tiers name tests that exist, and a tier keeps what its rows say."""

import ast
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiers
from op_table import EVERY
from tiers import CHECK, FAMILIES, FEW, PROMISES, RELEASE, Release, deselected, durations, matches

TESTS = Path(__file__).parent


@cache
def node_ids() -> list[str]:
    """``path::function`` of every test function."""
    return [
        f"tests/{path.relative_to(TESTS).as_posix()}::{node.name}"
        for path in TESTS.rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]


@dataclass(frozen=True)
class Case:
    """A test with one sample, or without parameters."""

    nodeid: str
    sample: str = ""
    callspec: SimpleNamespace = field(init=False, compare=False)

    def __post_init__(self) -> None:
        params = {"sample": SimpleNamespace(name=self.sample)} if self.sample else {}
        object.__setattr__(self, "callspec", SimpleNamespace(params=params))


def test_every_pattern_matches_a_test() -> None:
    patterns = [row.pattern for row in RELEASE] + [*CHECK, *PROMISES]
    assert [p for p in patterns if not any(matches(nodeid, p) for nodeid in node_ids())] == []


def test_families_are_samples() -> None:
    assert (FAMILIES | FEW) - {sample.name for sample in EVERY} == set()


def test_all_leaves_out_nothing() -> None:
    assert deselected([Case(nodeid) for nodeid in node_ids()], "all") == set()


def test_check_is_a_small_part_and_has_a_test_of_each_pattern() -> None:
    items = [Case(nodeid) for nodeid in node_ids()]
    kept = {case.nodeid for case in items} - deselected(items, "check")
    assert all(any(matches(nodeid, p) for nodeid in kept) for p in CHECK)
    assert len(kept) < len(items) / 2


def test_a_row_keeps_samples_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "RELEASE", (Release("a.py", "why", frozenset({"add"})),))
    cases = [Case(f"tests/a.py::test_x[{name}]", name) for name in ("add", "sub")]
    cases.append(Case("tests/a.py::test_alone"))
    assert deselected(cases, "test") == {"tests/a.py::test_x[sub]", "tests/a.py::test_alone"}


@pytest.mark.parametrize(("count", "keep"), [(1, 1), (10, 1), (10, 3), (10, 4), (3, 5), (10, 0)])
def test_a_row_keeps_so_many_cases_of_each_function(
    count: int, keep: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "RELEASE", (Release("a.py", "why", keep),))
    cases = [
        Case(f"tests/a.py::{name}[{k}]") for name in ("test_x", "test_y") for k in range(count)
    ]
    left = deselected(cases, "test")
    for name in ("test_x", "test_y"):
        kept = [case for case in cases if f"::{name}[" in case.nodeid and case.nodeid not in left]
        assert len(kept) == min(count, keep)


def test_slow_cases_without_a_row_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"a.py::test_slow": 5.0, "a.py::test_slower_than_most": 0.5, "a.py::test_quick": 0.1}
    monkeypatch.setattr(tiers, "durations", lambda: seconds)
    monkeypatch.setattr(tiers, "FILE_S", 100.0)
    cases = [Case(f"tests/{name}[{k}]") for name in seconds for k in range(9)]
    left = deselected(cases, "test")
    kept = [
        sum(case.nodeid not in left for case in cases if name + "[" in case.nodeid)
        for name in seconds
    ]
    assert kept == [1, 2, 9]


@pytest.mark.parametrize(
    ("promises", "run"),
    [((), {"quick", "slow"}), (("a.py::test_long",), {"quick", "slow", "long"})],
)
def test_of_a_file_that_takes_long_the_quick_tests_run(
    promises: tuple[str, ...], run: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {"a.py::test_long": 9.0, "a.py::test_slow": 2.0, "a.py::test_quick": 1.0}
    monkeypatch.setattr(tiers, "durations", lambda: {**seconds, "b.py::test_alone": 9.0})
    monkeypatch.setattr(tiers, "FILE_S", 3.0)
    monkeypatch.setattr(tiers, "PROMISES", promises)
    cases = [Case(f"tests/{name}") for name in (*seconds, "b.py::test_alone")]
    left = deselected(cases, "test")
    kept = {case.nodeid.partition("::test_")[2] for case in cases if case.nodeid not in left}
    assert kept == run | {"alone"}


def test_what_is_promised_runs() -> None:
    items = [Case(nodeid) for nodeid in node_ids()]
    kept = {case.nodeid for case in items} - deselected(items, "test")
    assert [p for p in PROMISES if not any(matches(nodeid, p) for nodeid in kept)] == []


def test_what_check_runs_test_runs_too() -> None:
    items = [Case(nodeid) for nodeid in node_ids()]
    left = deselected(items, "test") - deselected(items, "check")
    assert [n for n in left if not any(matches(n, row.pattern) for row in RELEASE)] == []


def test_recorded_durations_are_of_tests_that_exist() -> None:
    known = {nodeid.removeprefix("tests/") for nodeid in node_ids()}
    assert [name for name in durations() if name not in known] == []


def test_no_other_file_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "RELEASE", (Release("a.py::test_x", "why"),))
    cases = [Case(f"tests/{name}") for name in ("a.py::test_x", "a.py::test_xy", "b.py::test_x")]
    assert deselected(cases, "test") == {"tests/a.py::test_x"}
