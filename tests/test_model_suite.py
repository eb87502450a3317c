# SPDX-License-Identifier: Apache-2.0
"""benchmarks/suite: its models are what they promise; finished cells are not run again; the summary counts right."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from suite.command import main  # noqa: E402 - found beside the scripts
from suite.entry import FAMILIES, Both, Entry, at  # noqa: E402
from suite.lines import Line, Lines  # noqa: E402
from suite.peers import LESS_EXACT, PEERS, packages  # noqa: E402
from suite.registry import ENTRIES  # noqa: E402
from suite.served import trained_coverage  # noqa: E402
from suite.summary import LEVEL, rows, summary  # noqa: E402
from zoo.compare import error  # noqa: E402

QUICK = ("gcn", "deep_fm", "conformer", "darknet_detector", "dit")


def test_eighty_models_in_three_families() -> None:
    families = Counter(entry.family for entry in ENTRIES.values())
    assert set(families) == set(FAMILIES)
    assert sum(families.values()) >= 80 and min(families.values()) >= 20
    plain = [e for e in ENTRIES.values() if set(e.needs) <= {"transformers"}]
    assert len(plain) >= 50  # what torch and transformers build, on a machine without an index


def test_names_are_keys_and_some_of_each_family_come_first() -> None:
    assert all(name == entry.name and name.isidentifier() for name, entry in ENTRIES.items())
    first = Counter(entry.family for entry in ENTRIES.values() if entry.rank == 0)
    assert min(first[family] for family in FAMILIES) >= 5


def test_a_trained_step_tells_what_served_it() -> None:
    import blade

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
    run = torch.compile(model, backend=blade.dynamo.aot_disc, options={"timing": False})
    run(torch.randn(4, 8)).sum().backward()
    served = trained_coverage("blade")["served"]
    assert served["ops"] > 0 and served["clusters"] >= 2
    assert trained_coverage("eager") == {}


def test_a_setting_of_both_sizes() -> None:
    assert at("small", {"a": Both(1, 2), "b": 3}) == {"a": 1, "b": 3}
    assert at("large", {"a": Both(1, 2), "b": 3}) == {"a": 2, "b": 3}


def test_every_peer_is_made_of_something() -> None:
    assert all(packages(d, m, p) for (d, m), peers in PEERS.items() for p in peers)


def _answers(entry: Entry) -> None:
    if entry.missing():
        pytest.skip(f"needs {entry.missing()}")
    model = entry.build("small")
    assert not any(m.training for m in model.module.modules())
    assert len(model.fixed) >= 2 and len(set(model.fixed)) == len(model.fixed)
    for shape in model.fixed:
        assert len(shape) == len(model.axes)
        inputs, others = model.inputs(shape, 1), model.inputs(shape, 2)
        assert len(inputs) == len(model.names)
        with torch.no_grad():
            found, apart = model.module(*inputs), model.module(*others)
        assert isinstance(found, tuple) and found
        assert all(bool(t.isfinite().all()) for t in found)
        assert all(error((a,), (b,)) > 1e-3 for a, b in zip(found, apart))  # inputs matter
    assert any(model.dynamic_axes())


@pytest.mark.parametrize("name", QUICK)
def test_a_quick_model_answers_at_its_shapes(name: str) -> None:
    _answers(ENTRIES[name])


@pytest.mark.parametrize("name", [name for name in ENTRIES if name not in QUICK])
def test_every_model_answers_at_its_shapes(name: str) -> None:
    _answers(ENTRIES[name])


def _line(peer: str, ms: float, shape: str = "1", **more: Any) -> Line:
    fields = {"device": "cpu", "mode": "inference", "model": "bert", "family": "huggingface"}
    times = {"ms": ms, "cpu_ms": ms, "anchor_ms": 8.0, "anchor_cpu_ms": 8.0}
    found = {"compile_s": 1.0, "error": 1e-6, "threads": 1, "failed": None, "wrong": ""}
    return {**fields, **times, **found, "peer": peer, "shape": shape, **more}


def test_a_cell_that_is_done_is_known_to_the_next_run(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    lines = Lines(path)
    lines.add([_line("blade", 1.0), _line("blade", 2.0, shape="4")])
    lines.add([_line("inductor", 0.0, shape="", failed="prepare: no such op")])
    with path.open("a") as out:
        out.write('{"device": "cpu", "mode": "infer')  # the run before was stopped here
    again = Lines(path)
    assert len(again.found()) == 3
    assert again.done("cpu", "inference", "bert") == {"blade", "inductor"}
    assert again.done("cpu", "inference", "bert", again=True) == {"blade"}
    assert again.done("cuda", "inference", "bert") == again.done("cpu", "training", "bert") == set()
    again.add([_line("inductor", 3.0)])
    assert [x["failed"] for x in Lines(path).found()] == [None] * 3


@pytest.mark.parametrize(
    ("others", "best", "ahead", "passes"),
    [
        ({"inductor": 4.0, "openvino": 3.0}, "openvino", 1.5, True),
        ({"inductor": 1.0}, "inductor", 0.5, False),
        ({"inductor": 2.0 / LEVEL}, "inductor", 1 / LEVEL, True),  # level with it
        ({"inductor": 2.0 / LEVEL / 1.01}, "inductor", 1 / LEVEL / 1.01, False),
        ({LESS_EXACT[0]: 1.0}, "eager", 4.0, True),  # computes in fewer bits
    ],
)
def test_the_best_peer_decides(
    others: dict[str, float], best: str, ahead: float, passes: bool
) -> None:
    given = [_line("blade", 2.0), _line("eager", 8.0)]
    (row,) = rows([*given, *(_line(p, ms) for p, ms in others.items())], "cpu", "inference")
    assert (row.best, row.passes) == (best, passes)
    assert row.ahead == pytest.approx(ahead)


def test_a_wrong_peer_is_no_peer_and_a_wrong_blade_does_not_pass() -> None:
    wrong = _line("inductor", 0.5, wrong="off")
    (row,) = rows([_line("blade", 2.0), _line("eager", 8.0), wrong], "cpu", "inference")
    assert row.best == "eager" and row.passes
    (row,) = rows([_line("blade", 2.0, wrong="off"), _line("eager", 8.0)], "cpu", "inference")
    assert not row.right and not row.passes


def test_cells_of_two_runs_compare_by_their_speed_over_eager() -> None:
    """In the second run everything took twice as long."""
    second = _line("inductor", 8.0, anchor_cpu_ms=16.0)
    (row,) = rows([_line("blade", 2.0), _line("eager", 8.0), second], "cpu", "inference")
    assert row.ahead == pytest.approx(2.0)


def test_lines_of_gpus_compare_by_their_own_times() -> None:
    """Eager took twice as long in the second run: its host was busy."""
    h100, h200 = ({"device": "cuda", "on": name, "dtype": "float16"} for name in ("H100", "H200"))
    lines = [
        _line("eager", 8.0, **h100),
        _line("blade", 2.0, anchor_ms=16.0, **h100),
        _line("reduce_overhead", 3.0, **h100),
    ]
    (row,) = rows(lines, "cuda", "inference")
    assert row.ahead == pytest.approx(1.5) and row.speeds["blade"] == pytest.approx(4.0)
    other = _line("reduce_overhead", 3.0, anchor_ms=6.0, **h200)
    (row,) = rows([*lines[:2], other], "cuda", "inference")
    assert row.ahead == pytest.approx(1.5)  # eager was faster beside the other card: its host was


def test_failures_are_shown_and_counted() -> None:
    failed = _line("blade", 0.0, shape="", failed="prepare: raises", anchor_cpu_ms=None)
    text = summary([failed, _line("eager", 8.0)], "cpu")
    assert "| huggingface | 1 | 0 (0%) | 0 (0%) |" in text
    assert "prepare: raises" in text


def test_two_runs_of_one_model(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Real processes: the second run has one peer to add, and runs eager beside it without writing it again."""
    out = tmp_path / "cells.jsonl"
    command = [sys.executable, "-m", "benchmarks.suite", "--out", str(out), "--rounds", "1"]
    command += ["--models", "actor_critic", "--seconds", "0.01", "--peers"]
    for peers in ("eager", "eager,torchscript"):
        subprocess.run([*command, peers], cwd=ROOT, check=True, timeout=300)
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(x["peer"], x["shape"]) for x in found] == [
        (peer, shape) for peer in ("eager", "torchscript") for shape in ("1", "64")
    ]
    for line in found:
        assert not line["failed"] and not line["wrong"] and line["error"] < 1e-4
        assert line["ms"] > 0 and line["anchor_cpu_ms"] > 0
    main(["--out", str(out), "--summary"])
    assert "eager, ms" not in capfd.readouterr().out  # there is no blade to judge


def test_a_cell_that_takes_too_much_memory_has_failed(tmp_path: Path) -> None:
    out = tmp_path / "cells.jsonl"
    command = [sys.executable, "-m", "benchmarks.suite", "--out", str(out), "--peers", "eager"]
    command += ["--models", "actor_critic", "--memory-mb", "100"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)
    (line,) = [json.loads(text) for text in out.read_text().splitlines()]
    assert "more memory" in line["failed"]
