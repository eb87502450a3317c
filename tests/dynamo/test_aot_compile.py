# SPDX-License-Identifier: Apache-2.0
"""``torch.compile(...).forward.aot_compile``: saved functions answer in fresh processes, without compiling."""

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from aot_models import Noisy, Scores, Trained
from fake_backends import Fake, is_slow, registered
from torch import nn

import blade
from blade.dynamo import saved_graph
from blade.dynamo.live_graphs import live_graphs, stats_of
from blade.errors import InputError
from blade.report import ORIGINAL

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
pytestmark = pytest.mark.needs("runtime", "torch_mlir")

LOADED = """
import copy, os, sys
import torch
from aot_models import Noisy, Scores, Trained
torch.set_num_threads(THREADS)
torch.manual_seed(7)

def load(name):
    with open(FOLDER + "/" + name, "rb") as file:
        return torch.compiler.load_compiled_function(file)

def same(got, want):
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
"""
INFERENCE = """
run = load("scores")
models = [Scores().eval() for _ in range(6)]      # none has the weights it was compiled with
with torch.no_grad():
    for model in [*models, *models]:
        for rows in (5, 2, 31):
            x = torch.randn(rows, 16)
            same(run(model, x), model(x))
    models[0].up.weight.data.mul_(2)
    same(run(models[0], x), models[0](x))
import blade
[counts] = blade.dynamo.stats().values()
assert counts["engine_runs"] == counts["calls"] > 0, counts
[report] = blade.dynamo.reports()
assert [c.backend for c in report.clusters] == ["disc"], report
assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0
loaded = [name for name in sys.modules if name.startswith("blade.")]
assert not [n for n in loaded if n.startswith(("blade.backends.disc.", "blade.verification"))], loaded
"""
TRAINING = """
run, model = load("trained"), Trained()
other = copy.deepcopy(model)
for rows in (6, 9, 4):
    x = torch.randn(rows, 16)
    for f in (lambda x: run(model, x), other):
        torch.manual_seed(rows)
        f(x).square().mean().backward()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        same(p.grad, q.grad)
    for p, q in zip(model.buffers(), other.buffers(), strict=True):
        same(p, q)
import blade
stats = blade.dynamo.stats()
assert {name.split(".")[1] for name in stats} == {"forward", "backward"}, stats
assert all(counts["engine_runs"] > 0 for counts in stats.values()), stats
assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0
"""
DRAWS = """
run, model = load("noisy"), Noisy()
for rows in (3, 8):
    x = torch.randn(rows, 16)
    torch.manual_seed(rows)
    got = run(model, x)
    torch.manual_seed(rows)
    same(got, model(x))
"""
REFUSED = """
import blade
for name, code in (("elsewhere", "cpu_mismatch"), ("scores", "disabled")):
    if code == "disabled":
        os.environ["BLADE_ENGINES"] = "off"
    run, model = load(name), Scores().eval()
    with torch.no_grad():
        for rows in (5, 31):
            x = torch.randn(rows, 16)
            same(run(model, x), model(x))
    [counts] = blade.dynamo.stats().values()
    assert counts["engine_runs"] == 0 and counts[code] == counts["calls"] > 0, (name, counts)
    del run
"""


def compiled(model: nn.Module, x: torch.Tensor, **given: Any) -> Any:
    """What ``aot_compile`` returns, for any number of rows of ``x``."""
    torch._dynamo.reset()
    torch._dynamo.mark_dynamic(x, 0)
    options = {"min_cluster_size": 1, "strict": True, **given.pop("options", {})}
    backend = given.pop("backend", blade.dynamo.disc)
    lazy = torch.compile(model, fullgraph=True, backend=backend, options=options)
    return lazy.forward.aot_compile(((x,), {}))


@pytest.fixture(scope="module")
def scores() -> Any:
    with torch.no_grad():
        return compiled(Scores().eval(), torch.randn(8, 16))


@pytest.fixture
def folder(scores: Any, tmp_path: Path) -> Path:
    scores.save_compiled_function(str(tmp_path / "scores"))
    return tmp_path


def run_apart(folder: Path, *parts: str) -> None:
    head = f"FOLDER, THREADS = {str(folder)!r}, {torch.get_num_threads()}"
    paths = [str(ROOT), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "\n".join([head, LOADED, *parts])],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


def test_a_fresh_process_answers_for_any_weights(folder: Path) -> None:
    run_apart(folder, INFERENCE)


def test_a_fresh_process_trains_and_draws(tmp_path: Path) -> None:
    trained = compiled(Trained(), torch.randn(8, 16), backend=blade.dynamo.aot_disc)
    trained.save_compiled_function(str(tmp_path / "trained"))
    noisy = compiled(Noisy(), torch.randn(3, 16))
    noisy.save_compiled_function(str(tmp_path / "noisy"))
    run_apart(tmp_path, TRAINING, DRAWS)


def test_the_original_answers_where_an_engine_must_not_run(
    scores: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_apart = saved_graph._engine_parts

    def elsewhere(engine: Any) -> Any:
        name, backend, program, *rest = take_apart(engine)
        head, isa, tail = program.split("\n", 2)
        assert isa.startswith("isa"), isa
        return (name, backend, "\n".join([head, "isa warp_drive", tail]), *rest)

    monkeypatch.setattr(saved_graph, "_engine_parts", elsewhere)
    scores.save_compiled_function(str(folder / "elsewhere"))
    run_apart(folder, REFUSED)


def test_damage_is_told(folder: Path) -> None:
    data = (folder / "scores").read_bytes()
    start = data.index(saved_graph._MAGIC)
    for place in (start + 20, start + 200, start + 5000):
        damaged = bytearray(data)
        damaged[place] ^= 1
        with pytest.raises(InputError, match="does not match its checksum: the file is damaged"):
            torch.compiler.load_compiled_function(io.BytesIO(damaged))
    other = data.replace(saved_graph._MAGIC, b"blade-graph-9\n")
    with pytest.raises(InputError, match="another version: compile it again"):
        torch.compiler.load_compiled_function(io.BytesIO(other))


def test_a_loaded_function_can_be_saved_and_loaded_again(folder: Path, tmp_path: Path) -> None:
    model, x = Scores().eval(), torch.randn(3, 16)
    run = torch.compiler.load_compiled_function(io.BytesIO((folder / "scores").read_bytes()))
    run.save_compiled_function(str(tmp_path / "again"))
    again = torch.compiler.load_compiled_function(io.BytesIO((tmp_path / "again").read_bytes()))
    with torch.no_grad():
        torch.testing.assert_close(again(model, x), model(x), rtol=1e-4, atol=1e-5)


def test_engines_that_lose_are_not_saved() -> None:
    model, x = Scores().eval(), torch.randn(8, 16)
    with registered(Fake(run=is_slow)), torch.no_grad():
        run = compiled(model, x, options={"optimization_pipeline": "fake"})
        data = type(run).serialize(run).serialized_data
        loaded = torch.compiler.load_compiled_function(io.BytesIO(data))
        x = torch.randn(5, 16)
        torch.testing.assert_close(loaded(model, x), model(x))
        last = live_graphs()[-1]
        assert isinstance(last, saved_graph.LoadedGraph)
        assert stats_of(last) == {}
        assert [c.backend for c in last.report().clusters] == [ORIGINAL]


def test_other_weights_than_those_compiled_with_have_the_same_form(folder: Path) -> None:
    run = torch.compiler.load_compiled_function(io.BytesIO((folder / "scores").read_bytes()))
    run.disable_guard_check()
    with torch.no_grad(), pytest.raises(InputError, match="compile it again"):
        run(Scores().eval().double(), torch.randn(3, 16).double())
