# SPDX-License-Identifier: Apache-2.0
"""``options={"background": True}``: the original answers at once, and engines take over when they are ready."""

import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import graphs
import pytest
import torch
from aot_models import Noisy
from fake_backends import Fake, Gate, registered, wrong_values
from torch import nn

import blade
from blade.core.reason import Code
from blade.errors import BackendError
from blade.report import ORIGINAL, READY, SEARCHING

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
pytestmark = pytest.mark.needs("runtime")
WAIT_S = 300.0


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open.set()
    blade.dynamo.wait(WAIT_S)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 4)).eval()


def compiled(model: Any, backend: Any = None, **options: Any) -> Any:
    given = {"optimization_pipeline": "fake", "timing": False, "background": True, **options}
    return torch.compile(model, backend=backend or blade.dynamo.disc, dynamic=True, options=given)


def assert_same(run: Any, model: nn.Module) -> None:
    with torch.no_grad():
        for rows in (4, 9):
            x = torch.randn(rows, 16)
            torch.testing.assert_close(run(x), model(x))


def test_the_original_answers_until_the_engine_is_there(gate: Gate) -> None:
    model = mlp()
    with registered(Fake(convert=gate)):
        run = compiled(model)
        assert_same(run, model)
        assert gate.reached.wait(WAIT_S)
        assert [r.state for r in graphs.reports()] == [SEARCHING]
        assert not blade.dynamo.wait(0.01)
        assert_same(run, model)
        assert graphs.stats() == {}
        gate.open.set()
        assert blade.dynamo.wait(WAIT_S)
        before = sum(counts["engine_runs"] for counts in graphs.stats().values())
        assert_same(run, model)
        assert sum(counts["engine_runs"] for counts in graphs.stats().values()) == before + 2
        assert [r.state for r in graphs.reports()] == [READY]
        assert set(graphs.served().values()) == {"fake"}


def test_training_goes_on_meanwhile(gate: Gate) -> None:
    model = nn.Sequential(nn.Linear(16, 24), nn.LayerNorm(24), nn.GELU(), nn.Linear(24, 4))
    other = copy.deepcopy(model)
    with registered(Fake(convert=gate)):
        run = compiled(model, blade.dynamo.aot_disc)
        pairs = [
            (f, torch.optim.SGD(m.parameters(), lr=0.1)) for f, m in ((run, model), (other, other))
        ]
        for step in range(6):
            if step == 3:  # weights changed since the copies were made
                gate.open.set()
                assert blade.dynamo.wait(WAIT_S)
            x = torch.randn(8, 16)
            for f, optimizer in pairs:
                optimizer.zero_grad()
                f(x).square().mean().backward()
                optimizer.step()
            for p, q in zip(model.parameters(), other.parameters(), strict=True):
                torch.testing.assert_close(p, q)
        assert blade.dynamo.wait(WAIT_S)
    assert set(graphs.served().values()) == {"fake"}
    assert len(graphs.served()) >= 2


def test_wrong_engines_leave_the_original() -> None:
    model = mlp()
    with registered(Fake(run=wrong_values)):
        run = compiled(model)
        assert_same(run, model)
        assert blade.dynamo.wait(WAIT_S)
        assert_same(run, model)
    assert set(graphs.served().values()) == {ORIGINAL}
    [report] = graphs.reports()
    assert Code.WRONG_VALUES in {r.code for r in report.all_reasons()}


@pytest.mark.parametrize("strict", [False, True])
def test_errors_in_the_thread_are_reasons_and_raised_by_wait_if_strict(
    monkeypatch: pytest.MonkeyPatch, strict: bool
) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("no such luck")

    monkeypatch.setattr("blade.dynamo.compile_graph.support", broken)
    model = mlp()
    with registered(Fake()):
        run = compiled(model, strict=strict)
        assert_same(run, model)
        if strict:
            with pytest.raises(BackendError, match="no such luck"):
                blade.dynamo.wait(WAIT_S)
        assert blade.dynamo.wait(WAIT_S)
        assert_same(run, model)
    [report] = graphs.reports()
    assert report.state == READY
    assert "ValueError" in report.reasons[0].detail


def test_a_graph_that_draws_is_compiled_in_the_foreground() -> None:
    model = Noisy()
    with registered(Fake()), torch.no_grad():
        run, x = compiled(model), torch.randn(3, 16)
        torch.manual_seed(3)
        got = run(x)
        torch.manual_seed(3)
        torch.testing.assert_close(got, model(x))
    [report] = graphs.reports()
    assert report.state == READY
    assert [r for r in report.reasons if r.code is Code.RANDOM and "background" in r.detail]


def test_random_numbers_and_threads_are_left_alone(gate: Gate) -> None:
    model = mlp()
    with registered(Fake(convert=gate)), torch.no_grad():
        run, x = compiled(model), torch.randn(4, 16)
        want = model(x)
        torch.testing.assert_close(run(x), want)
        torch.manual_seed(3)

        def call(thread: int) -> float:
            if thread == 1:
                gate.open.set()
            with torch.no_grad():
                return max(float((run(x) - want).abs().max()) for _ in range(100))

        with ThreadPoolExecutor(4) as pool:
            assert max(pool.map(call, range(4))) < 1e-5
        assert blade.dynamo.wait(WAIT_S)
        drawn = torch.rand(4)
        torch.manual_seed(3)
        assert torch.equal(drawn, torch.rand(4))


def test_a_fork_compiles_again(gate: Gate) -> None:
    model = mlp()
    with registered(Fake(convert=gate)):
        run = compiled(model)
        assert_same(run, model)
        assert gate.reached.wait(WAIT_S)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                gate.open.set()
                assert blade.dynamo.wait(0)  # nothing runs here
                assert_same(run, model)
                assert blade.dynamo.wait(60.0)
                assert_same(run, model)
                code = 0 if sum(c["engine_runs"] for c in graphs.stats().values()) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


FRESH = """
import sys
import torch, blade
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4)).eval()
options = {"background": True, "min_cluster_size": 1}
run = torch.compile(model, backend=blade.dynamo.disc, dynamic=True, options=options)
with torch.no_grad():
    for rows in (3, 5):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-5)
    if WAITS:
        assert blade.dynamo.wait(120)
        before = sum(c["engine_runs"] for c in blade.dynamo.stats().values())
        torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-5)
        assert sum(c["engine_runs"] for c in blade.dynamo.stats().values()) == before + 1
sys.exit(7)
"""


@pytest.mark.needs("torch_mlir")
@pytest.mark.parametrize("waits", [True, False])
def test_a_fresh_process_compiles_and_ends(waits: bool) -> None:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"WAITS = {waits}\n{FRESH}"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 7, done.stderr
