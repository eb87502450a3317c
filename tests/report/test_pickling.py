# SPDX-License-Identifier: Apache-2.0
"""Optimized modules are pickled by value: for other processes, inside other objects, and to be copied."""

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import blade

pytestmark = pytest.mark.needs("runtime", "torch_mlir")
CONFIG = blade.Config(optimization_pipeline="DISC", timing=False)

# multiprocessing pickles the arguments and the module's function for the spawned process.
SPAWNING = """
import multiprocessing as mp
import torch
import blade

def serve(module, x, answers):
    counts = blade.stats(module)["cluster_0"]
    y = module(x)
    ran = blade.stats(module)["cluster_0"]["engine_runs"] - counts["engine_runs"]
    answers.put((y.tolist(), ran, blade.report(module).model))

if __name__ == "__main__":
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.LayerNorm(8)).eval()
    x = torch.randn(3, 8)
    config = blade.Config(optimization_pipeline="DISC", timing=False)
    optimized = blade.optimize(model, torch.randn(2, 8), config)
    context = mp.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=serve, args=(optimized, x, answers))
    process.start()
    y, ran, name = answers.get(timeout=120)
    process.join(60)
    torch.testing.assert_close(torch.tensor(y), model(x))
    assert (ran, name, process.exitcode) == (1, "Sequential", 0)
"""

FRESH = """
import pickle, sys
import torch
with open(sys.argv[1], "rb") as file:
    module, x, want = pickle.load(file)["service"]
torch.testing.assert_close(module(x), want)
import blade
assert blade.stats(module)["cluster_0"]["engine_runs"] == 1
print(blade.report(module).model)
"""


@pytest.fixture(scope="module")
def made() -> tuple[torch.jit.ScriptModule, nn.Module]:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)).eval()
    return blade.optimize(model, torch.randn(2, 8), CONFIG), model


@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_pickled_and_back(made: tuple[torch.jit.ScriptModule, nn.Module], protocol: int) -> None:
    optimized, model = made
    again = pickle.loads(pickle.dumps(optimized, protocol))
    x = torch.randn(5, 8)
    torch.testing.assert_close(again(x), model(x))
    assert blade.stats(again)["cluster_0"]["engine_runs"] == 1
    assert blade.report(again) == blade.report(optimized)


def test_inside_an_object_in_a_process_that_has_not_imported_blade(
    made: tuple[torch.jit.ScriptModule, nn.Module], tmp_path: Path
) -> None:
    optimized, model = made
    x = torch.randn(4, 8)
    path = tmp_path / "service.pkl"
    with torch.no_grad():
        path.write_bytes(pickle.dumps({"service": (optimized, x, model(x))}))
    ran = subprocess.run(
        [sys.executable, "-c", FRESH, str(path)], capture_output=True, text=True, timeout=120
    )
    assert (ran.returncode, ran.stdout.strip()) == (0, "Sequential"), ran.stderr


def test_an_argument_of_a_spawned_process(tmp_path: Path) -> None:
    script = tmp_path / "spawning.py"
    script.write_text(SPAWNING)
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr


def test_copied(made: tuple[torch.jit.ScriptModule, nn.Module]) -> None:
    optimized, model = made
    x = torch.randn(5, 8)
    again = copy.deepcopy(optimized)
    torch.testing.assert_close(again(x), model(x))
    assert blade.report(again) == blade.report(optimized)


def test_other_modules_are_refused_as_torch_refuses_them() -> None:
    scripted = torch.jit.script(nn.Linear(2, 2))
    assert type(scripted) is torch.jit.RecursiveScriptModule
    with pytest.raises(RuntimeError, match="__getstate__"):
        pickle.dumps(scripted)
