# SPDX-License-Identifier: Apache-2.0
"""Every command on a small model: exit code, text, JSON, files."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command_line import Command, Files
from fake_backends import Fake, puts_nan, registered, wrong_values

import blade
from blade.cli.commands import bench
from blade.cli.commands.bench import switch_off
from blade.cli.shared import peers
from blade.cli.shared.bench_samples import make
from blade.report import Timing
from blade.report.graph import InputReport

pytestmark = pytest.mark.needs("runtime", "torch_mlir")


def test_what_optimize_wrote_runs_elsewhere(files: Files) -> None:
    optimized = torch.jit.load(files.optimized)
    original = torch.jit.load(files.model)
    x = torch.randn(7, 8)
    torch.testing.assert_close(optimized(x), original(x))
    assert [one[0].shape for one in blade.report(optimized).inputs] == [(2, 8), (5, 8)]


def test_optimize_json_is_one_document_with_the_report(
    blade_cli: Command, files: Files, tmp_path: Path
) -> None:
    out, page = tmp_path / "out.pt", tmp_path / "page.html"
    argv = ("optimize", files.model, "--inputs", files.samples, "-o", out, "--html", page)
    done = blade_cli(*argv, "--json", "--config", "timing=False", "min_cluster_size=1")
    assert done.code == 0
    assert done.data["output"] == str(out) and done.data["bytes"] == out.stat().st_size
    assert done.data["report"] == json.loads(blade.report(torch.jit.load(out)).to_json())
    assert page.read_text().startswith("<!doctype html>")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.pt", "page.html"]


def test_a_pickled_model_is_read_only_on_demand(
    blade_cli: Command, files: Files, tmp_path: Path
) -> None:
    argv = ("partition", files.pickled, "--inputs", files.samples)
    refused = blade_cli(*argv)
    assert refused.code == 3 and "--allow-pickle" in refused.err
    assert blade_cli(*argv, "--allow-pickle").code == 0


def test_report_prints_what_the_file_carries(blade_cli: Command, files: Files) -> None:
    carried = blade.report(torch.jit.load(files.optimized))
    assert blade_cli("report", files.optimized).out == f"{carried}\n"
    assert blade_cli("report", files.optimized, "--all").out == f"{carried.explain()}\n"
    assert blade_cli("report", files.optimized, "--json").data == json.loads(carried.to_json())


def test_report_writes_a_page_over_pages_only(
    blade_cli: Command, files: Files, tmp_path: Path
) -> None:
    page, other = tmp_path / "page.html", tmp_path / "weights.pt"
    for _ in range(2):
        assert blade_cli("report", files.optimized, "--html", page).code == 0
    other.write_text("precious")
    done = blade_cli("report", files.optimized, "--html", other)
    assert done.code == 3 and "--force" in done.err
    assert other.read_text() == "precious"
    assert blade_cli("report", files.optimized, "--html", other, "--force").code == 0
    assert other.read_text() == page.read_text()


def test_partition_says_who_would_get_what(blade_cli: Command, files: Files) -> None:
    argv = ("partition", files.model, "--inputs", files.samples)
    done = blade_cli(*argv, "--json", "--config", "optimization_pipeline=disc")
    [part] = done.data["clusters"]
    assert part["backends"] == ["disc"]
    assert part["ops"] == {"aten::linear": 2, "aten::relu": 1}
    assert done.data["ops"] == done.data["ops_in_clusters"] == 3
    assert done.data["alone"] == [{"backend": "disc", "taken": 3, "clusters": 1, "inside": 3}]
    assert [node["inputs"] for node in done.data["nodes"]] == [[], [0], [1]]
    black = ("--config", "customize_op_black_list=['aten::relu']", "min_cluster_size=1")
    text = blade_cli(*argv, *black).out
    assert "2 cluster(s) would hold 2 of 3 ops" in text and "stays TorchScript: 1 relu" in text
    assert "black_listed" in text and "Nothing was built" in text


def test_partition_builds_nothing(blade_cli: Command, files: Files) -> None:
    fake = Fake("fake", run=wrong_values)
    with registered(fake):
        argv = ("partition", files.model, "--inputs", files.samples)
        done = blade_cli(*argv, "--json", "--config", "optimization_pipeline=fake")
    assert done.data["clusters"][0]["backends"] == ["fake"]
    assert done.code == 0


def test_bench_measures_at_the_sizes_the_file_remembers(blade_cli: Command, files: Files) -> None:
    done = blade_cli("bench", files.optimized, "--rounds", 1, "--json")
    assert done.code == 0
    assert [one["shapes"] for one in done.data["samples"]] == [[[2, 8]], [[5, 8]]]
    assert all(one["original_ms"] > 0 and one["engine_ms"] > 0 for one in done.data["samples"])
    counters = done.data["engines"]
    assert all(one["calls"] == one["engine_runs"] > 0 for one in counters.values()), counters


def test_what_bench_calls_the_original_runs_no_engine() -> None:
    x = torch.randn(3, 8)
    config = blade.Config(optimization_pipeline="disc", min_cluster_size=1, timing=False)
    module = blade.optimize(torch.nn.Linear(8, 8).eval(), x, config)
    want = module(x)
    before = blade.stats(module)
    switch_off(module)
    torch.testing.assert_close(module(x), want)
    after = blade.stats(module)
    assert all(after[name]["engine_runs"] == before[name]["engine_runs"] == 1 for name in after)
    assert all(one["disabled"] == 1 for one in after.values())


def test_bench_takes_samples_and_can_demand_a_speed(
    blade_cli: Command, files: Files, tmp_path: Path
) -> None:
    torch.save({"x": torch.randn(3, 8)}, tmp_path / "own.pt")
    own = tmp_path / "own.pt"
    argv = ("bench", files.optimized, "--inputs", own, "--rounds", 1, "--seconds", 0.01)
    done = blade_cli(*argv, "--require", 1e9)
    assert done.code == 1
    assert "3x8" in done.out and "was required" in done.out
    assert blade_cli(*argv, "--require", 1e-9).code == 0


@pytest.mark.parametrize(
    ("speedup", "noise", "code", "word"),
    [
        (2.0, 0.1, 0, "was required"),
        (1.0, 0.1, 1, "slower than that"),
        (2.0, 0.5, 5, "inconclusive"),  # 1.33x to 3x
        (1.4, 0.2, 5, "inconclusive"),
    ],
)
def test_a_required_speed_is_reached_missed_or_hidden_by_noise(
    blade_cli: Command,
    files: Files,
    monkeypatch: pytest.MonkeyPatch,
    speedup: float,
    noise: float,
    code: int,
    word: str,
) -> None:
    known = Timing(((2, 8),), speedup, 1.0, noise, rounds=30, disturbed=30)
    monkeypatch.setattr(bench, "measure", lambda *_: known)
    argv = ("bench", files.optimized, "--shape", "2x8", "--require", 1.5, "--seconds", 0.01)
    done = blade_cli(*argv)
    assert done.code == code and word in done.out
    assert "disturbed 30 of 30 rounds" in done.out
    told = blade_cli(*argv, "--json")
    assert told.code == code
    low, high = told.data["interval"]
    assert (low, high) == pytest.approx((speedup / (1 + noise), speedup * (1 + noise)))


def test_bench_in_a_process_of_its_own_tells_tails_throughput_and_kernels(files: Files) -> None:
    argv = [*("--shape", "x=3x8", "--batch", "7", "--threads", "1", "--callers", "3", "--kernels")]
    argv += ["--seconds", "0.05", "--rounds", "5", "--json"]
    command = [sys.executable, "-m", "blade", "bench", files.optimized, *argv]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    data = json.loads(done.stdout)
    assert data["threads"] == 1
    [sample] = data["samples"]
    assert sample["shapes"] == [[7, 8]]
    low, high = sample["interval"]
    assert 0 < low <= sample["speedup"] <= high
    for side in ("blade", "original"):
        tail = sample["latency"][side]
        assert 0 < tail["p50"] <= tail["p90"] <= tail["p99"] and tail["calls"] > 0
        many = sample["throughput"][side]
        assert many["rows_per_s"] == pytest.approx(7 * many["calls_per_s"])
        assert many["latency"]["calls"] >= 3 * 5  # of each caller in each window
    assert sample["throughput"]["callers"] == 3
    [kernels] = data["kernels"].values()
    assert {one["name"] for one in kernels} and all(one["ms"][0] >= 0 for one in kernels)


def test_of_torchscript_every_peer_is_measured(blade_cli: Command, files: Files) -> None:
    argv = ("bench", files.optimized, "--rounds", 1, "--seconds", 0.01, "--original", files.model)
    done = blade_cli(*argv, "--peers", "onnxruntime,inductor", "--shape", "5x8", "--json")
    [sample] = done.data["samples"]
    for peer in ("onnxruntime", "inductor"):
        found = sample["peers"][peer]
        assert found.get("ms", 0) > 0 or "not installed" in found["why_not"], found


def test_bench_says_why_a_peer_cannot_run(
    blade_cli: Command, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(peers.PEERS, "inductor", (peers.PEERS["inductor"][0], ("no_such_package",)))
    argv = ("bench", files.optimized, "--rounds", 1, "--seconds", 0.01, "--original", files.model)
    done = blade_cli(*argv, "--peers", "inductor", "--json")
    for sample in done.data["samples"]:
        assert "no_such_package" in sample["peers"]["inductor"]["why_not"]


@pytest.mark.parametrize(
    ("one", "low", "high"),
    [
        (InputReport("ids", "int64", (400,), 5.0, 9.0), 5, 9),
        (InputReport("x", "float16", (400,), -2.0, 3.0), -2, 3),
        (InputReport("none", "bool", (400,), 0.0, 0.0), 0, 0),
        (InputReport("all", "bool", (400,), 1.0, 1.0), 1, 1),
        (InputReport("some", "bool", (400,), 0.0, 1.0), 0, 1),
        (InputReport("n", "int32", (), 4.0, 4.0), 4, 4),
    ],
)
def test_made_samples_stay_in_the_range_seen(one: InputReport, low: float, high: float) -> None:
    made = make(one, torch.Generator().manual_seed(0))
    assert made.shape == one.shape and str(made.dtype) == f"torch.{one.dtype}"
    values = made.to(torch.float32)
    assert low <= values.min() and values.max() <= high
    if low < high:
        assert values.max() - values.min() > 0.7 * (high - low)


def test_bisect_finds_nothing_in_a_right_backend(blade_cli: Command, files: Files) -> None:
    argv = ("bisect", files.model, "--inputs", files.samples, "--config")
    done = blade_cli(*argv, "optimization_pipeline=disc", "--json")
    assert done.code == 0 and not done.data["differs"]
    assert done.data["backends"][0]["clusters"] == 1


def test_bisect_finds_the_op(blade_cli: Command, files: Files, tmp_path: Path) -> None:
    def wrong_from_relu_on(outputs, inputs, call):  # type: ignore[no-untyped-def]
        """Only clusters with a result of 16 columns that cannot be negative, or what follows it."""
        return [o + 1 if (o >= 0).all() or o.shape[-1] == 4 else o for o in outputs]

    with registered(Fake("fake", run=wrong_from_relu_on)):
        argv = ("bisect", files.model, "--inputs", files.samples, "--json", "--config")
        done = blade_cli(*argv, "optimization_pipeline=fake", f"dump_dir={tmp_path}")
    assert done.code == 1 and done.data["differs"]
    [found] = done.data["backends"]
    assert found["cluster"] == "cluster_0" and found["op"].endswith("aten::relu")
    assert found["reason"]["code"] == "wrong_values"
    assert list((tmp_path / "failures").iterdir())


def test_doctor_reports_every_backend_and_the_machine(blade_cli: Command) -> None:
    noted = Fake("fake")
    noted.summary = "never quick"
    with registered(noted):
        done = blade_cli("doctor", "--json")
        assert re.search(r"fake\s+available\s+never quick\n", blade_cli("doctor").out)
    assert done.code == 0 and done.data["healthy"]
    status = {one["name"]: one for one in done.data["backends"]}
    assert status["disc"]["why_not"] is None and status["disc"]["seconds"] > 0
    assert status["fake"]["why_not"] is None and status["fake"]["seconds"] is None
    assert (status["fake"]["note"], status["disc"]["note"]) == ("never quick", None)
    assert done.data["runtime"]["built_with_torch"] == torch.__version__.partition("+")[0]
    assert done.data["cpu"]["float_lanes"] in (4, 8, 16)
    assert done.data["cache"]["limit_bytes"] > 0


def test_doctor_tries_what_is_installed(blade_cli: Command) -> None:
    with registered(Fake("fake", run=puts_nan)):
        text = blade_cli("doctor", "--try", "fake").out
    assert re.search(r"fake\s+no\s+it is installed but does not work: on a model of two", text), (
        text
    )


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.needs(n)) for n in ("onnxruntime", "openvino", "tvm")],
)
def test_doctor_tries_the_libraries_that_are_installed(blade_cli: Command, name: str) -> None:
    done = blade_cli("doctor", "--try", name, "--json")
    [tried] = [one for one in done.data["backends"] if one["name"] == name]
    assert tried["why_not"] is None and tried["version"] and tried["seconds"] > 0
    assert done.code == 0


CONSOLE_SCRIPT = """import sys
from blade.cli.main import main
if __name__ == "__main__":
    sys.exit(main())
"""
"""The file that an installer writes for ``[project.scripts]``."""


@pytest.mark.parametrize("entrance", ["python -m blade", "blade"])
def test_the_doctor_can_speak_where_the_runtime_cannot(tmp_path: Path, entrance: str) -> None:
    """The package without its library, as after a checkout: an exit code and the command, no traceback."""
    package = tmp_path / "blade"
    package.mkdir()
    source = Path(blade.__file__).parent
    for path in source.iterdir():
        if path.suffix != ".so":
            (package / path.name).symlink_to(path)
    for own in ("__init__.py", "runtime"):  # resolved, these would find the library beside them
        (package / own).unlink()
    (package / "__init__.py").write_text((source / "__init__.py").read_text())
    (package / "runtime").mkdir()
    for path in (source / "runtime").glob("*.py"):
        (package / "runtime" / path.name).write_text(path.read_text())
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "blade").write_text(CONSOLE_SCRIPT)
    command = ["bin/blade"] if entrance == "blade" else ["-m", "blade"]
    done = subprocess.run(
        [sys.executable, *command, "doctor", "--json"],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    data = json.loads(done.stdout)
    assert "pip install" in data["runtime"]["why_not"]
    assert "pip install" in data["backends"][0]["why_not"]


@pytest.mark.needs("onnx", "onnxruntime")
def test_an_onnx_model_is_optimized_with_inputs_made_of_its_sizes(
    blade_cli: Command, files: Files, tmp_path: Path
) -> None:
    import onnx
    import onnx.parser

    text = "net (float[batch, 8] x) => (float[batch, 8] y) { h = Gelu (x) y = Softmax (h) }"
    path, out = tmp_path / "net.onnx", tmp_path / "out.pt"
    onnx.save(
        onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 20]> {text}'), str(path)
    )
    quick = ("--config", "timing=False", "min_cluster_size=1")
    done = blade_cli("optimize", path, "-o", out, "--size", "batch=3", *quick)
    assert done.code == 0, done.err
    x = torch.randn(5, 8)
    wanted = torch.softmax(torch.nn.functional.gelu(x), -1)
    torch.testing.assert_close(torch.jit.load(out)(x), wanted)
    unknown = blade_cli("optimize", path, "-o", tmp_path / "b.pt", *quick)
    assert unknown.code == 3 and "'batch' of the model are not fixed" in unknown.err
    wrong = blade_cli("optimize", path, "-o", tmp_path / "b.pt", "--size", "length=3", *quick)
    assert wrong.code == 3 and "no input has a dimension 'length'" in wrong.err
    without = blade_cli("optimize", files.model, "-o", tmp_path / "b.pt")
    assert without.code == 2 and "--inputs" in without.err
