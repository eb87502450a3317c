# SPDX-License-Identifier: Apache-2.0
"""``Config(background=True)``: a module that serves at once, and engines that take over when they are ready."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_backends import Fake, Gate, produces, registered, wrong_values
from race import mlp
from torch import nn

import blade
from blade.core.reason import Code
from blade.errors import BackendError
from blade.report import ORIGINAL, READY, SEARCHING
from blade.runtime.engine import make_engine, make_pending

pytestmark = pytest.mark.needs("runtime")
X = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
WAIT_S = 300.0


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open.set()


def optimize(model: nn.Module, name: str = "fake", **fields: Any) -> torch.jit.ScriptModule:
    config = {"optimization_pipeline": name, "timing": False, "background": True, **fields}
    return blade.optimize(model, X, blade.Config(**config))


def assert_same(module: Any, model: nn.Module) -> None:
    with torch.no_grad():
        for rows in (4, 1, 9):
            x = torch.randn(rows, 16)
            torch.testing.assert_close(module(x), model(x))


@produces(Code.PENDING)
def test_the_original_serves_until_the_engine_is_there(gate: Gate, tmp_path: Path) -> None:
    model = mlp()
    with registered(Fake(convert=gate)):
        optimized = optimize(model)
        assert blade.report(optimized).state == SEARCHING
        assert gate.reached.wait(WAIT_S)
        assert not blade.wait(optimized, timeout=0.01)
        assert_same(optimized, model)
        before = blade.stats(optimized)["cluster_0"]
        assert before == {"calls": 3, "engine_runs": 0, "fallbacks": 3, Code.PENDING.value: 3}
        torch.jit.save(optimized, tmp_path / "early.pt")
        gate.open.set()
        assert blade.wait(optimized, WAIT_S)
        assert_same(optimized, model)
        after = blade.stats(optimized)["cluster_0"]
        assert (after["calls"], after["engine_runs"]) == (6, 3)
        report = blade.report(optimized)
        assert report.state == READY
        assert [c.backend for c in report.clusters] == ["fake"]
        torch.jit.save(optimized, tmp_path / "late.pt")
        for name, runs in (("early", 0), ("late", 3)):
            loaded = torch.jit.load(tmp_path / f"{name}.pt")
            assert_same(loaded, model)
            assert blade.stats(loaded)["cluster_0"]["engine_runs"] == runs
            assert blade.wait(loaded)


def test_a_search_that_finds_nothing_leaves_the_original_and_says_why() -> None:
    model = mlp()
    with registered(Fake(run=wrong_values)):
        optimized = optimize(model)
        assert blade.wait(optimized, WAIT_S)
    report = blade.report(optimized)
    assert [c.backend for c in report.clusters] == [ORIGINAL]
    assert Code.WRONG_VALUES in {r.code for r in report.all_reasons()}
    assert_same(optimized, model)
    assert blade.stats(optimized)["cluster_0"][Code.DISABLED.value] == 3


def test_errors_in_the_thread_are_reasons_and_raised_by_wait_if_strict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*args: Any) -> Any:
        raise ValueError("no such luck")

    monkeypatch.setattr("blade.api.cluster_graph", broken)
    with registered(Fake()):
        for strict in (False, True):
            model = mlp()
            optimized = optimize(model, strict=strict)
            if strict:
                with pytest.raises(BackendError, match="no such luck"):
                    blade.wait(optimized, WAIT_S)
            else:
                assert blade.wait(optimized, WAIT_S)
            [reason] = blade.report(optimized).reasons
            assert "ValueError" in reason.detail
            assert blade.report(optimized).state == READY
            assert_same(optimized, model)


def test_calls_from_many_threads_while_engines_come(gate: Gate) -> None:
    model = mlp()
    with registered(Fake(convert=gate)):
        optimized = optimize(model)
        with torch.no_grad():
            want = model(X)

        def call(thread: int) -> float:
            if thread == 3:
                gate.open.set()
            with torch.no_grad():
                return max(float((optimized(X) - want).abs().max()) for _ in range(200))

        with ThreadPoolExecutor(8) as pool:
            assert max(pool.map(call, range(8))) < 1e-5
        assert blade.wait(optimized, WAIT_S)
        counts = blade.stats(optimized)["cluster_0"]
        assert counts["calls"] == 8 * 200
        assert counts["engine_runs"] + counts["fallbacks"] == counts["calls"]


def test_two_at_once() -> None:
    models = [mlp(), nn.Sequential(nn.Linear(16, 4), nn.Tanh(), nn.Softmax(-1)).eval()]
    with registered(Fake("one"), Fake("two")):
        pair = [optimize(m, name) for m, name in zip(models, ("one", "two"), strict=True)]
        assert all(blade.wait(one, WAIT_S) for one in pair)
        for one, model in zip(pair, models, strict=True):
            assert_same(one, model)
            assert blade.stats(one)["cluster_0"]["engine_runs"] == 3


class Noisy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.tanh() * 2 + 1).relu() + torch.rand_like(x)


@produces(Code.RANDOM)
def test_a_model_that_draws_random_numbers_is_optimized_in_the_foreground() -> None:
    with registered(Fake()):
        optimized = optimize(Noisy().eval())
    report = blade.report(optimized)
    assert report.state == READY
    assert any(r.code is Code.RANDOM and "background" in r.detail for r in report.reasons)
    assert blade.wait(optimized)


def test_the_users_random_numbers_are_left_alone(gate: Gate) -> None:
    with registered(Fake(convert=gate)):
        optimized = optimize(mlp())
        torch.manual_seed(3)
        gate.open.set()
        assert blade.wait(optimized, WAIT_S)
        drawn = torch.rand(4)
        torch.manual_seed(3)
        assert torch.equal(drawn, torch.rand(4))


@pytest.mark.parametrize("in_process", [False, True])
def test_the_interpreter_ends_although_something_converts(in_process: bool) -> None:
    code = f"""
import sys, threading, time
sys.path[:0] = {sys.path!r}
import torch, blade, fake_backends
from fake_backends import Fake, registered
slow = lambda cluster: time.sleep(3)
hangs = fake_backends.hangs_converting
fake = Fake(convert=slow if {in_process} else hangs, in_process={in_process})
with registered(fake):
    config = blade.Config(optimization_pipeline="fake", background=True, min_cluster_size=1)
    optimized = blade.optimize(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh()).eval(), torch.randn(3, 4), config)
    time.sleep(1)
    print("served", tuple(optimized(torch.randn(2, 4)).shape))
    sys.exit(7)
"""
    command = [sys.executable, "-W", "ignore", "-c", code]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 7, ran.stderr
    assert ran.stdout == "served (2, 4)\n"


def test_an_engine_is_adopted_once() -> None:
    pending: Any = make_pending("cluster_0")
    first, second = (make_engine(name, "disc", "", b"") for name in ("a", "b"))
    adopt: Callable[[Any], bool] = pending.adopt
    assert not adopt(pending)
    assert pending.backend() == "pending"
    assert "still being made" in pending.why_unavailable()
    assert [adopt(first), adopt(second)] == [True, False]
    assert pending.backend() == "disc"
    other: Any = second
    assert not other.adopt(first)
