# SPDX-License-Identifier: Apache-2.0
"""``Config(background_paths=True)``: what a call has shown to be missing is captured while others are answered."""

import gc
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import blade
from blade.selection import learn_paths as module_under_test

pytestmark = pytest.mark.needs("runtime")
WAIT_S = 300.0


class ByValue(nn.Module):
    """Three ways, by the sum of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = float(x.sum())
        y = self.linear(x)
        if total > 100.0:
            return vars(self).get("big", y.relu())  # no script
        if total > -100.0:
            return y.tanh() + 1
        return y.sigmoid() * 2


class ByMode(nn.Module):
    def forward(self, x: torch.Tensor, mode: str = "relu", *, scale: float = 1.0) -> dict[str, Any]:
        if mode not in ("relu", "tanh"):
            raise ValueError(f"mode {mode!r}")
        return {"out": getattr(torch, mode)(x) * scale, "none": None}


def middle(rows: int = 4) -> torch.Tensor:
    return torch.zeros(rows, 8).normal_(generator=torch.Generator().manual_seed(rows)) * 0.1


def optimize(model: nn.Module, inputs: Any, **fields: Any) -> Any:
    """``model`` with the path of ``inputs`` alone: contents that verification derives add none."""
    config = {"timing": False, "background_paths": True, "optimization_pipeline": "disc"}
    with patch("blade.capture.capture.explore", lambda own, graph, *_: graph):
        return blade.optimize(model.eval(), inputs, blade.Config(**{**config, **fields}))


def calls(optimized: Any) -> tuple[int, int]:
    """How many calls a learned path answered, and the original."""
    found = blade.stats(optimized)
    return tuple(found.get(name, {"calls": 0})["calls"] for name in ("learned", "original"))


def assert_same(optimized: Any, model: nn.Module, *given: Any) -> None:
    with torch.no_grad():
        torch.testing.assert_close(optimized(*given), model(*given))


def test_a_missing_path_answers_from_the_second_call_on(tmp_path: Path) -> None:
    model = ByValue()
    optimized = optimize(model, middle())
    high, low = middle() + 100.0, middle(6) - 100.0
    assert_same(optimized, model, high)
    assert calls(optimized) == (0, 1)
    assert blade.wait(optimized, WAIT_S)
    assert_same(optimized, model, high)
    assert_same(optimized, model, middle(9) + 100.0)
    assert calls(optimized) == (2, 1)
    for one in (
        low,
        high,
        middle(3) - 100.0,
        middle(5),
    ):  # capture has found the third way by itself
        assert_same(optimized, model, one)
        assert blade.wait(optimized, WAIT_S)
    assert calls(optimized) == (5, 1)
    torch.jit.save(optimized, tmp_path / "model.pt")
    with pytest.raises(RuntimeError, match="No captured path answers"):
        run_elsewhere(tmp_path / "model.pt")


def run_elsewhere(path: Path) -> None:
    code = f"import blade, torch; torch.jit.load({str(path)!r})(torch.ones(4, 8) * 100)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)


def test_arguments_are_learned_as_well() -> None:
    model = ByMode()
    x = torch.randn(3, 8)
    optimized = optimize(model, {"x": x, "mode": "relu", "scale": 1.0})
    want = {**model(x, "tanh", scale=2.0)}["out"]
    for _ in range(2):
        torch.testing.assert_close(optimized(x, "tanh", 2.0)[0], want)
        assert blade.wait(optimized, WAIT_S)
    assert calls(optimized) == (1, 1)
    with pytest.raises(Exception, match="mode 'cos'"):
        optimized(x, "cos", 2.0)
    assert blade.wait(optimized, WAIT_S)
    torch.testing.assert_close(optimized(x, "tanh", 2.0)[0], want)


def test_no_more_than_max_paths() -> None:
    model = ByValue()
    optimized = optimize(model, middle(), max_paths=2)
    learner = module_under_test._learners[optimized]
    for one in (middle() + 100.0, middle() - 100.0):
        for _ in range(2):
            assert_same(optimized, model, one)
            assert blade.wait(optimized, WAIT_S)
    assert len(learner._missed) == 1 and calls(optimized) == (1, 3)
    without = optimize(model, middle(), max_paths=1)
    assert_same(without, model, middle() + 100.0)
    assert module_under_test._learners.get(without) is None


def test_what_cannot_be_captured_stays_the_originals(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ByValue()
    optimized = optimize(model, middle(), max_paths=3)
    tried = []

    def broken(*_: Any) -> Any:
        tried.append(1)
        raise blade.InputError("no such luck") if len(tried) == 1 else ValueError("nor now")

    monkeypatch.setattr(module_under_test._learners[optimized], "_optimize", broken)
    for _ in range(4):
        assert_same(optimized, model, middle() + 100.0)
        assert blade.wait(optimized, WAIT_S)
    assert calls(optimized) == (0, 4) and len(tried) == 2


def test_calls_from_threads_meanwhile() -> None:
    model = ByValue()
    optimized = optimize(model, middle())
    given = [middle(rows) + shift for rows in (2, 4, 7) for shift in (-100.0, 0.0, 100.0)]
    with torch.no_grad():
        wanted = [model(one) for one in given]

    def many(_: int) -> None:
        with torch.no_grad():
            for _ in range(60):
                for one, want in zip(given, wanted):
                    torch.testing.assert_close(optimized(one), want)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(many, range(4)))
    assert blade.wait(optimized, WAIT_S)
    many(0)
    assert sum(calls(optimized)) == 5 * 60 * 6


def test_nothing_outlives_the_module() -> None:
    model = ByValue()
    optimized = optimize(model, middle())
    optimized(middle() + 100.0)
    assert blade.wait(optimized, WAIT_S)
    learner = weakref.ref(module_under_test._learners[optimized])
    assert learner() is not None
    del optimized
    gc.collect()
    assert learner() is None
    assert all("learn" not in one.name for one in threading.enumerate())


def test_the_interpreter_ends_although_a_path_is_captured(tmp_path: Path) -> None:
    script = tmp_path / "ends.py"
    script.write_text(
        "import blade, torch\n"
        "class M(torch.nn.Module):\n"
        "    def forward(self, x, n: int = 0):\n"
        "        return torch.relu(x) * n + vars(self).get('a', 1)\n"
        "x = torch.ones(4, 8)\n"
        "config = blade.Config(background_paths=True, optimization_pipeline='disc')\n"
        "m = blade.optimize(M().eval(), (x, 2), config)\n"
        "print(m(x, 3)[0, 0].item())\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=WAIT_S)
    assert (done.returncode, done.stdout) == (0, "4.0\n"), done.stderr
