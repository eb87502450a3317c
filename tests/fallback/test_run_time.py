# SPDX-License-Identifier: Apache-2.0
"""Engines that were right when they were built, and then fail: at a call, or when a file is loaded."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_backends as fakes
import pytest
import torch
from fake_backends import Fake, Fault, produces, raises, registered, right
from torch import nn

import blade
from blade.core.reason import Code
from blade.errors import InputError

pytestmark = pytest.mark.needs("runtime")
X = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))


class Fickle:
    """A fault that is right until told otherwise: engines are verified before they fail."""

    def __init__(self) -> None:
        self.fault: Fault = right

    def __call__(self, *args: Any) -> Any:
        return self.fault(*args)


@pytest.fixture
def served() -> Iterator[tuple[torch.jit.ScriptModule, nn.Module, Fickle]]:
    """An optimized module with one fake engine, the original, and the switch that breaks the engine."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    fickle = Fickle()
    with registered(Fake(run=fickle, even_only=True)):
        config = blade.Config(optimization_pipeline="fake", timing=False, strict=True)
        yield blade.optimize(model, X, config), model, fickle


Served = tuple[torch.jit.ScriptModule, nn.Module, Fickle]


def counts(optimized: nn.Module) -> dict[str, int]:
    return blade.stats(optimized)["cluster_0"]


def assert_same(optimized: nn.Module, model: nn.Module, x: torch.Tensor) -> None:
    """The same answer, or the same exception."""
    try:
        expected = model(x)
    except (RuntimeError, TypeError) as error:
        message = str(error).splitlines()[0]
        with pytest.raises(type(error)) as caught:
            optimized(x)
        assert message in str(caught.value)
        return
    torch.testing.assert_close(optimized(x), expected)


@produces(Code.GUARD_DTYPE, Code.GUARD_RANK, Code.GUARD_DEVICE, Code.GUARD_GRAD)
def test_calls_the_guard_turns_away(served: Served) -> None:
    optimized, model, _ = served
    with torch.no_grad():
        for x, code in [
            (X.double(), Code.GUARD_DTYPE),
            (X[None], Code.GUARD_RANK),
            (X.to("meta"), Code.GUARD_DEVICE),
        ]:
            before = counts(optimized)
            assert_same(optimized, model, x) if x.device.type == "cpu" else _run(optimized, x)
            after = counts(optimized)
            assert after.get(code.value, 0) == before.get(code.value, 0) + 1, (code, after)
    optimized(X.clone().requires_grad_()).sum().backward()
    assert counts(optimized)[Code.GUARD_GRAD.value] == 1
    assert counts(optimized)["engine_runs"] == 0


def _run(optimized: nn.Module, x: torch.Tensor) -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        optimized(x)


@produces(Code.ENGINE_RAISED, Code.CIRCUIT_OPEN)
def test_failures_in_a_row_open_the_circuit_and_rearm_closes_it(served: Served) -> None:
    optimized, model, fickle = served
    fickle.fault = raises
    with torch.no_grad():
        for _ in range(5):
            assert_same(optimized, model, X)
        assert counts(optimized)[Code.ENGINE_RAISED.value] == 3
        assert counts(optimized)[Code.CIRCUIT_OPEN.value] == 2
        assert_same(optimized, model, X[:2])
        assert counts(optimized)[Code.CIRCUIT_OPEN.value] == 3  # at every size
        assert "the device caught fire" in optimized.cluster_0.engine.last_error()
        fickle.fault = right
        assert_same(optimized, model, X)  # the engine is well again, but is not asked
        blade.rearm(optimized)
        assert_same(optimized, model, X)
    assert counts(optimized)["engine_runs"] == 1


@produces(Code.ENGINE_RAISED)
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (fakes.raises, "the device caught fire"),
        (fakes.runs_out_of_memory, "tried to allocate 64 GiB"),
        (fakes.runs_out_of_host_memory, "MemoryError"),
        (fakes.wrong_shape, "output 0 of the engine has the wrong shape [1, 4, 4]"),
        (fakes.wrong_dtype, "output 0 of the engine is Double, not Float"),
        (fakes.too_many, "the engine returned 2 tensors, not 1"),
    ],
)
def test_an_engine_that_breaks_later_loses_no_answer(
    served: Served, fault: Fault, says: str
) -> None:
    optimized, model, fickle = served
    with torch.no_grad():
        assert_same(optimized, model, X)
        fickle.fault = fault
        assert_same(optimized, model, X)
        assert says in optimized.cluster_0.engine.last_error()
        fickle.fault = right
        assert_same(optimized, model, X)
    assert counts(optimized)[Code.ENGINE_RAISED.value] == 1
    assert counts(optimized)["engine_runs"] == 2


def test_wrong_values_later_are_not_noticed(served: Served) -> None:
    """As docs/limits.md says; this test is to be turned around on the day they are."""
    optimized, model, fickle = served
    fickle.fault = fakes.puts_nan
    with torch.no_grad():
        assert optimized(X).isnan().any()
        assert not model(X).isnan().any()


@produces(Code.CIRCUIT_OPEN)
@pytest.mark.parametrize("max_failures", [1, 4])
def test_config_says_after_how_many_failures(max_failures: int) -> None:
    fickle = Fickle()
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    with registered(Fake(run=fickle)), torch.no_grad():
        config = blade.Config(optimization_pipeline="fake", timing=False, max_failures=max_failures)
        optimized = blade.optimize(model, X, config)
        for failures, fault in [(max_failures - 1, raises), (1, right), (max_failures + 3, raises)]:
            fickle.fault = fault
            for _ in range(failures):
                assert_same(optimized, model, X)
    found = counts(optimized)
    assert found[Code.CIRCUIT_OPEN.value] == 3  # a success in between starts the count again
    assert found[Code.ENGINE_RAISED.value] == 2 * max_failures - 1


def test_rearm_wants_an_optimized_module() -> None:
    with pytest.raises(InputError, match="a module returned by"):
        blade.rearm(nn.Linear(2, 2))


@produces(Code.DISABLED)
def test_an_engine_can_be_switched_off(served: Served) -> None:
    optimized, model, _ = served
    optimized.cluster_0.engine.set_enabled(False)
    with torch.no_grad():
        assert_same(optimized, model, X)
    assert counts(optimized)[Code.DISABLED.value] == 1


State = tuple[int, list[str], dict[str, int], list[torch.Tensor]]


def _other_version(state: State) -> State:
    return (state[0] + 1, *state[1:])


def _damaged(state: State) -> State:
    payload = state[3][0].clone()
    payload[0] += 1
    return (*state[:3], [payload, *state[3][1:]])


def _other_cpu(state: State) -> State:
    from blade.runtime.engine import make_engine

    program = state[1][2].replace("isa", "isa quantum_fma", 1)
    fresh: State = make_engine("cluster_0", "disc", program, b"")._get_method("__getstate__")()
    return fresh


@produces(Code.VERSION_MISMATCH, Code.CORRUPT_PAYLOAD, Code.CPU_MISMATCH)
@pytest.mark.parametrize(
    ("change", "code"),
    [
        (_other_version, Code.VERSION_MISMATCH),
        (_damaged, Code.CORRUPT_PAYLOAD),
        (_other_cpu, Code.CPU_MISMATCH),
    ],
)
def test_a_file_that_does_not_suit_runs_the_original(
    served: Served, change: Callable[[State], State], code: Code, tmp_path: Path, capfd: Any
) -> None:
    optimized, model, _ = served
    engine = optimized.cluster_0.engine
    with pytest.warns(UserWarning, match="is not used; the original runs instead"):
        engine._get_method("__setstate__")(change(engine._get_method("__getstate__")()))
    torch.jit.save(optimized, tmp_path / "model.pt")
    capfd.readouterr()
    loaded = torch.jit.load(tmp_path / "model.pt")
    with torch.no_grad():
        assert_same(loaded, model, X)
        assert_same(loaded, model, X)
    # said once, not at every call; torch.jit.load has C++ warnings go to stderr
    assert capfd.readouterr().err.count("is not used; the original runs instead") == 1
    assert counts(loaded)[code.value] == 2
    assert loaded.cluster_0.engine.why_unavailable()
    blade.rearm(loaded)  # nothing that trying again could mend
    with torch.no_grad():
        assert_same(loaded, model, X)
    assert counts(loaded)[code.value] == 3


@produces(Code.DEVICE_MISMATCH)
def test_weights_on_another_device_than_the_engine_is_for(served: Served) -> None:
    """As after ``torch.jit.load(path, map_location=...)``."""
    from blade.runtime.engine import make_engine

    optimized, _, _ = served
    state = optimized.cluster_0.engine._get_method("__getstate__")()
    moved: Any = make_engine("cluster_0", "disc", state[1][2], b"", [X.to("meta")])
    assert moved.try_execute([X]) is None
    assert moved.stats()[Code.DEVICE_MISMATCH.value] == 1
    assert "its weights are on meta" in moved.why_unavailable()


@produces(Code.BACKEND_UNAVAILABLE)
def test_a_file_whose_backend_is_missing_runs_the_original(served: Served, tmp_path: Path) -> None:
    optimized, model, _ = served
    torch.jit.save(optimized, tmp_path / "model.pt")
    torch.save((X, model(X).detach()), tmp_path / "expected.pt")
    code = f"""
import torch, blade
folder = {str(tmp_path)!r}
x, y = torch.load(folder + "/expected.pt")
loaded = torch.jit.load(folder + "/model.pt")
for _ in range(2):
    torch.testing.assert_close(loaded(x), y)
found = blade.stats(loaded)["cluster_0"]
assert found[{Code.BACKEND_UNAVAILABLE.value!r}] == 2, found
"""
    command = [sys.executable, "-W", "ignore", "-c", code]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("No backend 'fake' is registered in this process.") == 1
