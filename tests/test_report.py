# SPDX-License-Identifier: Apache-2.0
"""Report: prints everything it holds, and is the same after JSON."""

import json
from dataclasses import replace

import pytest
import torch

from blade.errors import InputError
from blade.reason import Code, Reason, Stage
from blade.report import ORIGINAL, ClusterReport, Report, Timing, Verdict, report, stats
from blade.report_graph import InputReport, NodeReport

REASONS = tuple(
    Reason(Stage.SUPPORT, code, "disc" if i % 2 else None, f"aten::op_{i}", f"op {i} is odd.", "E")
    for i, code in enumerate(Code)
)
FULL = Report(
    clusters=(
        ClusterReport(
            "cluster_0",
            {"aten::linear": 36, "aten::gelu": 6, **{f"aten::x{i}": 1 for i in range(9)}},
            "disc",
            (Timing(((1, 16), ()), 10.0, 4.0, 0.02), Timing(((8, 64), ()), 120.0, 100.0, 0.0)),
            Verdict(12, 1, 2.5e-7, 3.5e-7, 4.5e-7),
            REASONS[:2],
        ),
        ClusterReport("cluster_1", {"aten::add": 3}, ORIGINAL),
        ClusterReport("cluster_2", {"aten::mul": 3}, "disc", (), Verdict(2, 0, 0.0)),
    ),
    reasons=REASONS[2:],
    outside={"aten::nonzero": 2},
    versions={"blade": "0.1.0", "torch": "2.13.0"},
    cpu="Some CPU x2",
    seconds={"capture": 1.25, "total": 3.5},
    nodes=(
        NodeReport("%h = aten::linear", "aten::linear", "cluster_0", (), "encoder model.py:3"),
        NodeReport("prim::Print#2", "prim::Print", None, (0, 0)),
    ),
    inputs=((InputReport("x", "float32", (1, 16), -2.5, 3.0), InputReport("n", "int64", ())),),
)


def test_json_round_trip() -> None:
    assert Report.from_json(FULL.to_json()) == FULL
    assert Report.from_json(Report().to_json()) == Report()
    assert (
        json.loads(FULL.to_json())["clusters"][0]["reasons"][0]["code"] == Code.TRACE_FAILED.value
    )


def test_a_report_of_before_there_were_nodes_loads() -> None:
    data = json.loads(FULL.to_json())
    del data["nodes"], data["inputs"]
    assert Report.from_json(json.dumps(data)) == replace(FULL, nodes=(), inputs=())


@pytest.mark.parametrize(
    "text",
    ["", "[]", "3", '{"clusters": 3}', '{"clusters": [], "reasons": []']
    + ['{"clusters": [], "reasons": [], "more": 1}']
    + ['{"clusters": [], "reasons": [], "nodes": [{"name": "x"}]}']
    + ['{"clusters": [], "reasons": [], "inputs": [[3]]}'],
)
def test_other_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Report.from_json(text)


def test_everything_is_printed() -> None:
    text = str(FULL)
    words = [
        "2 of 3 clusters run in engines: 54 of 59 ops",
        "cluster_0 (disc): 51 ops: 36 linear, 6 gelu",
        "3 others",
        "1x16 ()",
        "10.000",
        "4.000",
        "2.50x",
        "1.20x",
        "2.5e-07",
        "3.5e-07 (4.5e-07)",
        "not measured",
        ORIGINAL,
        "blade 0.1.0, torch 2.13.0",
        "Some CPU x2",
        "capture 1.25",
    ]
    assert [word for word in words if word not in text] == []
    for reason in REASONS:
        assert reason.code.value in text
        assert reason.detail in text
    assert max(map(len, text.splitlines())) <= 118


def test_equal_reasons_are_one_row_with_a_count() -> None:
    text = str(Report(reasons=(REASONS[0],) * 7))
    row = [line for line in text.splitlines() if REASONS[0].code.value in line]
    assert len(row) == 1
    assert "(7 times) op 0 is odd." in row[0]


def test_reasons_about_several_subjects_are_one_row_under_the_first() -> None:
    same = [Reason(Stage.SUPPORT, Code.RANDOM, "disc", f"op_{i}", "it draws.") for i in range(3)]
    rows = [line for line in str(Report(reasons=tuple(same))).splitlines() if "it draws." in line]
    assert len(rows) == 1
    assert "op_0" in rows[0] and "(3 times)" in rows[0]


def test_details_are_not_read_as_markup() -> None:
    detail = "shape [1, 2] and [bold]this[/bold] stay."
    reason = Reason(Stage.SUPPORT, Code.RANDOM, None, "x[0]", detail)
    text = str(Report(reasons=(reason,)))
    assert "[bold]this[/bold]" in text
    assert "x[0]" in text


def test_only_optimized_modules_have_a_report() -> None:
    scripted = torch.jit.script(torch.nn.Linear(2, 2))
    for wrong in (torch.nn.Linear(2, 2), scripted, 3, None):
        with pytest.raises(InputError, match="optimized: a module returned by"):
            report(wrong)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="carries no report"):
            stats(wrong)  # type: ignore[arg-type]
