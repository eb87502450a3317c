# SPDX-License-Identifier: Apache-2.0
"""An optimized module answers in a forked child, whether its parent loaded it, called it or optimized it."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import blade

pytestmark = pytest.mark.needs("runtime", "torch_mlir")
CONFIG = blade.Config(optimization_pipeline="DISC", timing=False)

# gunicorn --preload, Celery and multiprocessing's "fork" do this: load in the parent, call in the child.
FORKED = """
import os, signal, sys
import torch
import blade

torch.set_num_threads(2)
path = sys.argv[1]
module, inputs = torch.jit.load(path + ".pt"), torch.load(path + ".inputs")
child = os.fork()
if child == 0:
    signal.alarm(60)  # a child that hangs ends by this
    with torch.no_grad():
        outputs = module(*inputs)
    first = outputs[0] if isinstance(outputs, tuple) else outputs
    torch.save((first, blade.stats(module)), path + ".answer")
    os._exit(0)
_, status = os.waitpid(child, 0)
sys.exit(os.waitstatus_to_exitcode(status) & 0xFF)
"""


def answer_of_the_child(
    module: torch.jit.ScriptModule, inputs: tuple[torch.Tensor, ...], folder: Path
) -> torch.Tensor:
    path = folder / "model"
    torch.jit.save(module, f"{path}.pt")
    torch.save(inputs, f"{path}.inputs")
    ran = subprocess.run(
        [sys.executable, "-c", FORKED, str(path)], capture_output=True, text=True, timeout=180
    )
    assert ran.returncode == 0, ran.stderr
    answer, stats = torch.load(f"{path}.answer")
    assert all(one["engine_runs"] == 1 for one in stats.values()), stats
    return answer


def test_products_with_packed_weights(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).eval()
    x = torch.randn(4096, 64)
    answer = answer_of_the_child(blade.optimize(model, x[:64], CONFIG), (x,), tmp_path)
    torch.testing.assert_close(answer, model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.needs("minilm")
def test_a_sentence_encoder(tmp_path: Path, minilm) -> None:
    ids = torch.randint(1, 30000, (2, 16))
    mask = torch.ones_like(ids)
    optimized = blade.optimize(minilm, (ids, mask), CONFIG)
    given = (ids[:1, :11].contiguous(), mask[:1, :11].contiguous())
    answer = answer_of_the_child(optimized, given, tmp_path)
    with torch.no_grad():
        want = minilm(*given).last_hidden_state
    torch.testing.assert_close(answer, want, rtol=1e-3, atol=1e-4)


def test_a_runner_is_loaded_again_in_the_child() -> None:
    """Threads of a library do not live on there."""
    script = """
import os, sys
import torch
from blade.runtime.engine import make_engine, register_runner

loaded_in = []

def load(name, payload, constants, program):
    loaded_in.append(os.getpid())
    return lambda inputs: [inputs[0] + loaded_in.count(os.getpid())]

register_runner("forked", load)
lines = ["blade.disc 1", "isa", "inputs 1", "input 0 f32 cpu 1", "registers 0", "guards 0"]
text = "\\n".join([*lines, "slots 0", "instructions 0", "outputs 0", "end"])
engine = make_engine("e", "forked", text, b"x")
x = torch.zeros(3)
assert engine.try_execute([x])[0][0] == 1
child = os.fork()
if child == 0:
    right = engine.try_execute([x])[0][0] == 1 and engine.try_execute([x])[0][0] == 1
    os._exit(0 if right and len(loaded_in) == 2 else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
"""
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr


# The parent has optimized the module and used threads of eager torch, and of the module if "called". Then it forks.
USED = """
import gc, os, signal, sys
import torch
import blade

torch.set_num_threads(3)
path, backend, how = sys.argv[1:]
model = torch.nn.Sequential(
    torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64)
).eval()
x = torch.randn(2048, 64)
config = blade.Config(optimization_pipeline=backend, timing=False, strict=True)
module = blade.optimize(model, x[:64], config)
if how == "eager":
    torch.jit.save(module, path)
    module = torch.jit.load(path)
want = model(x)
if how == "called":
    module(x)
child = os.fork()
if child == 0:
    signal.alarm(60)  # a child that hangs ends by this
    before = blade.stats(module)["cluster_0"]["engine_runs"]
    close = torch.allclose(module(x), want, rtol=1e-4, atol=1e-5)
    ran = blade.stats(module)["cluster_0"]["engine_runs"] - before
    alike = torch.equal(model(x), want) and torch.get_num_threads() == 3
    del module
    gc.collect()
    os._exit(0 if close and ran == 1 and alike else 1)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
module(x)  # the parent goes on, with as many threads
sys.exit(status & 0xFF if torch.get_num_threads() == 3 else 2)
"""


@pytest.mark.parametrize(
    "backend, how",
    [
        ("DISC", "eager"),
        ("DISC", "called"),
        pytest.param("onnxruntime", "called", marks=pytest.mark.needs("onnxruntime")),
    ],
)
def test_the_parent_used_its_threads(backend: str, how: str, tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", USED, str(tmp_path / "model.pt"), backend, how],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode == 0, ran.stderr
