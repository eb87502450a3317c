# SPDX-License-Identifier: Apache-2.0
"""Report: prints everything it holds, and is the same after JSON."""

import json
from dataclasses import replace

import pytest
import torch

from blade.core.reason import Code, Reason, Stage
from blade.errors import InputError
from blade.report import (
    ORIGINAL,
    SEARCHING,
    ClusterReport,
    Composed,
    KernelTime,
    Report,
    Timing,
    Tried,
    Verdict,
    report,
    stats,
)
from blade.report.graph import InputReport, NodeReport
from blade.report.why_not import why_not

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


def test_everything_is_explained() -> None:
    text = FULL.explain()
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


def timing(original: float, engine: float, eager: float | None = None) -> Timing:
    return Timing(((4, 8),), original, engine, 0.01, eager_ms=eager)


def no(code: Code, backend: str | None, subject: str, detail: str) -> Reason:
    return Reason(Stage.SUPPORT, code, backend, subject, detail)


SLOWER = Tried("onnxruntime", False, (timing(8.0, 4.0), timing(8.0, 4.0)))
SERVED = Report(
    clusters=(
        ClusterReport(
            "cluster_0",
            {"aten::linear": 6},
            "disc",
            (timing(8.0, 2.0), timing(8.0, 1.0)),
            Verdict(12, 0, 2.5e-7),
            tried=(SLOWER,),
            kernels=(KernelTime("gemm_f32", 3, (0.75, 1.5)), KernelTime("loop_1", 1, (0.25, 0.5), "add, erf")),
        ),
    ),
    reasons=(
        *(no(Code.BACKEND_UNAVAILABLE, "tensorrt", "tensorrt", "There is no GPU."),),
        *(no(Code.UNSUPPORTED_OP, "tvm", f"%{i} = aten::op_{i % 5}", f"no op {i}.") for i in range(14)),
        *(no(Code.NOT_TRIED, "tvm", "cluster_1", "it has 0.50x: it is tried at no other group than x."),),
        *(no(Code.UNSUPPORTED_OP, "disc", "%9 = aten::cdist", "disc has no cdist."),),
        *(no(Code.WRONG_VALUES, "openvino", "cluster_0", "output 0 is off by 1e-2."),),
        *(no(Code.DATA_DEPENDENT, None, "%8 = aten::nonzero", "Its size depends on values."),),
    ),
    outside={"aten::nonzero": 1, "aten::cdist": 1},
    compositions=(
        Composed("disc", {"cluster_0": "disc"}, (timing(9.0, 3.0, 12.0), timing(27.0, 9.0, 81.0)), True),
    ),
    model="Net",
    date="2026-01-02 03:04 UTC",
)  # fmt: skip


def test_the_first_sentence_tells_the_result() -> None:
    assert " ".join(str(SERVED).split()).startswith(
        "Net runs 3.00x as fast as TorchScript (2.98x to 3.02x) and 6.00x as fast as eager (mean of 2 samples), "
        "6 of 8 ops in disc, error at most 2.5e-07; next best is onnxruntime (2.00x on cluster_0)."
    )
    stays = replace(SERVED, clusters=(), compositions=())
    assert str(stays).startswith("Net stays TorchScript: no engine serves.")
    searching = replace(SERVED, state=SEARCHING)
    assert str(searching).startswith("Net runs as TorchScript while engines are made")
    unmeasured = Report((ClusterReport("cluster_0", {"aten::add": 3}, "disc"),))
    assert str(unmeasured).startswith(
        "The model runs 3 of 3 ops in disc; its speed was not measured."
    )


def test_another_composition_is_the_next_best() -> None:
    other = Composed("mixture", {"cluster_0": "onnxruntime"}, (timing(9.0, 4.5),), False)
    text = str(replace(SERVED, compositions=(*SERVED.compositions, other)))
    assert "next best is mixture (2.00x)" in " ".join(text.split())


def test_each_backend_has_one_row_the_most_useful_first() -> None:
    assert why_not(SERVED) == [
        ("blade", "Its size depends on values"),
        ("disc", "disc has no cdist"),
        ("onnxruntime", "2.00x as fast as TorchScript on cluster_0, disc is 5.66x"),
        ("openvino", "output 0 is off by 1e-2"),
        ("tvm", "it has 0.50x; 14 ops, not supported (aten::op_0, aten::op_1, aten::op_2, ...)"),
        ("tensorrt", "There is no GPU"),
    ]
    shown = str(SERVED)
    assert all(text in shown for _, text in why_not(SERVED))
    assert len(shown.splitlines()) < 30
    assert max(map(len, shown.splitlines())) <= 118


def test_a_long_table_of_clusters_is_cut_and_explained() -> None:
    many = tuple(ClusterReport(f"part_{i}", {"aten::add": 3}, "disc") for i in range(40))
    report = Report(many)
    assert "28 more clusters" in str(report)
    assert "part_39" not in str(report) and "part_39" in report.explain()


def test_equal_conditions_of_a_path_are_told_once_and_many_not_in_the_summary() -> None:
    paths = ((), ("x.dim() == 3", *["`if x > 0` gave True"] * 5, "a", "b", "c", "d"))
    told = replace(FULL, paths=paths)
    summary, whole = (" ".join(text.split()) for text in (str(told), told.explain()))
    begin = "Path 2 answers where x.dim() == 3; `if x > 0` gave True (5 times); a; b;"
    assert f"{begin} 2 more hold." in summary
    assert f"{begin} c; d." in whole


def test_kernels_are_explained_with_their_share() -> None:
    rows = [line.split() for line in SERVED.explain().splitlines()]
    assert ["gemm_f32", "3", "0.750", "1.500", "75%"] in rows
    assert ["loop_1", "1", "0.250", "0.500", "25%", "add,", "erf"] in rows


def test_a_report_of_before_there_were_kernels_and_eager_times_loads() -> None:
    assert Report.from_json(SERVED.to_json()) == SERVED
    data = json.loads(SERVED.to_json())
    del data["model"], data["date"], data["clusters"][0]["kernels"]
    for timed in (*data["compositions"][0]["timings"], *data["clusters"][0]["timings"]):
        del timed["eager_ms"]
    old = Report.from_json(json.dumps(data))
    assert old.clusters[0].kernels == () and old.timings[0].eager_ms is None
    assert "3.00x as fast as TorchScript (2.98x to 3.02x) (mean of 2 samples)" in str(old)


def test_equal_reasons_are_one_row_with_a_count() -> None:
    text = Report(reasons=(REASONS[0],) * 7).explain()
    row = [line for line in text.splitlines() if REASONS[0].code.value in line]
    assert len(row) == 1
    assert "(7 times) op 0 is odd." in row[0]


def test_reasons_about_several_subjects_are_one_row_under_the_first() -> None:
    same = [Reason(Stage.SUPPORT, Code.RANDOM, "disc", f"op_{i}", "it draws.") for i in range(3)]
    text = Report(reasons=tuple(same)).explain()
    rows = [line for line in text.splitlines() if "it draws." in line]
    assert len(rows) == 1
    assert "op_0" in rows[0] and "(3 times)" in rows[0]


def test_details_are_not_read_as_markup() -> None:
    detail = "shape [1, 2] and [bold]this[/bold] stay."
    reason = Reason(Stage.SUPPORT, Code.RANDOM, None, "x[0]", detail)
    assert "[bold]this[/bold]" in str(Report(reasons=(reason,)))
    text = Report(reasons=(reason,)).explain()
    assert "[bold]this[/bold]" in text
    assert "x[0]" in text


def test_only_optimized_modules_have_a_report() -> None:
    scripted = torch.jit.script(torch.nn.Linear(2, 2))
    for wrong in (torch.nn.Linear(2, 2), scripted, 3, None):
        with pytest.raises(InputError, match="optimized: a module returned by"):
            report(wrong)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="carries no report"):
            stats(wrong)  # type: ignore[arg-type]
