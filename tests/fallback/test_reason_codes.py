# SPDX-License-Identifier: Apache-2.0
"""Every Reason code has a test that produces it: the list is checked here, the rest is produced here."""

import ast
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_backends import Fake, Fault, produces, raises, registered, right
from torch import nn

import blade
from blade.backends import registry
from blade.backends.base import OpNode, ValueInfo
from blade.reason import Code, Stage

TESTS = Path(__file__).parent.parent
X = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))


def _claims() -> dict[str, list[str]]:
    """Code name -> the tests that carry ``@produces(Code.NAME)``."""
    found: dict[str, list[str]] = {}
    for path in TESTS.rglob("test_*.py"):
        for test in ast.walk(ast.parse(path.read_text())):
            if isinstance(test, ast.FunctionDef):
                for name in _claimed(test):
                    found.setdefault(name, []).append(f"{path.name}::{test.name}")
    return found


def _claimed(test: ast.FunctionDef) -> list[str]:
    marks = [m for m in test.decorator_list if ast.unparse(m).startswith("produces(")]
    names = [ast.unparse(a).removeprefix("Code.") for m in marks for a in m.args]  # type: ignore[attr-defined]
    rest = [ast.unparse(part) for part in [*test.decorator_list, *test.body] if part not in marks]
    for name in names:
        assert any(f"Code.{name}" in text for text in rest), f"{test.name} does not check {name}"
    return names


def test_every_code_is_produced_by_a_test() -> None:
    claims = _claims()
    assert [code.name for code in Code if code.name not in claims] == []
    assert [name for name in claims if name not in Code.__members__] == []


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
    even = "registers 4\nreg 0 dim 0 0\nreg 1 const 2\nreg 2 mod 0 1\nreg 3 ne 2 1\nguards 0"
    with registered(Fake(run=fickle, guard=even)):
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


@pytest.mark.needs("runtime")
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


@pytest.mark.needs("runtime")
@produces(Code.ENGINE_RAISED, Code.CIRCUIT_OPEN)
def test_failures_in_a_row_open_the_circuit_and_rearm_closes_it(served: Served) -> None:
    optimized, model, fickle = served
    fickle.fault = raises
    with torch.no_grad():
        for _ in range(5):
            assert_same(optimized, model, X)
        assert counts(optimized)[Code.ENGINE_RAISED.value] == 3
        assert counts(optimized)[Code.CIRCUIT_OPEN.value] == 2
        assert "the device caught fire" in optimized.cluster_0.engine.last_error()
        fickle.fault = right
        optimized.cluster_0.engine.rearm()
        assert_same(optimized, model, X)
    assert counts(optimized)["engine_runs"] == 1


@pytest.mark.needs("runtime")
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


@pytest.mark.needs("runtime")
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
    served: Served, change: Callable[[State], State], code: Code, tmp_path: Path
) -> None:
    optimized, model, _ = served
    engine = optimized.cluster_0.engine
    engine._get_method("__setstate__")(change(engine._get_method("__getstate__")()))
    torch.jit.save(optimized, tmp_path / "model.pt")
    loaded = torch.jit.load(tmp_path / "model.pt")
    with torch.no_grad():
        assert_same(loaded, model, X)
    assert counts(loaded)[code.value] == 1
    assert loaded.cluster_0.engine.why_unavailable()


class Noise(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)


class ViewOfInput(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(0, 1)


class Positive(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nonzero(x > 0)


class Accumulate(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.add_(x)
        return y


class ThroughFloat8(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 2).to(torch.float8_e4m3fn).to(torch.float32) + 1


@pytest.mark.needs("runtime", "torch_mlir")
@produces(Code.RANDOM, Code.ALIASES, Code.DATA_DEPENDENT, Code.MUTATES, Code.UNSUPPORTED_DTYPE)
@pytest.mark.parametrize(
    ("model", "code"),
    [
        (Noise(), Code.RANDOM),
        (ViewOfInput(), Code.ALIASES),
        (Positive(), Code.DATA_DEPENDENT),
        (Accumulate(), Code.MUTATES),
        (ThroughFloat8(), Code.UNSUPPORTED_DTYPE),
    ],
)
def test_nodes_that_stay_and_keep_their_meaning(model: nn.Module, code: Code) -> None:
    model.eval()
    config = blade.Config(timing=False, min_cluster_size=1, strict=True)
    optimized = blade.optimize(model, X, config)
    assert code in {reason.code for reason in blade.report(optimized).all_reasons()}
    for shape in ((4, 16), (1, 16), (5, 3)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(2))
        torch.manual_seed(3)
        expected = model(x.clone())
        torch.manual_seed(3)
        assert torch.equal(optimized(x.clone()), expected)


@pytest.mark.needs("torch_mlir")
@produces(Code.UNSUPPORTED_DEVICE, Code.UNKNOWN_TYPE)
def test_values_disc_does_not_take() -> None:
    cpu = ValueInfo("tensor", torch.float32, torch.device("cpu"), 2)
    for changed, code in [
        (replace(cpu, device=torch.device("xpu")), Code.UNSUPPORTED_DEVICE),
        (replace(cpu, rank=None), Code.UNKNOWN_TYPE),
    ]:
        node = OpNode("%y = aten::relu", torch.ops.aten.relu.default, (changed,), {}, (cpu,))
        reason = registry.load("disc").why_not(node, blade.Config())
        assert reason is not None
        assert reason.code is code


class Branches(nn.Module):
    """A trace keeps the branch of its sample; a script keeps both."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > 5:
            return x * 2
        return x + 1


class Counts(nn.Module):
    """Only a script can return an int."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return x * 2, x.shape[0]


class Doubts(nn.Module):
    """A branch on a value, in code that cannot be scripted."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool(x.isnan().any()):
            x = {key: value for key, value in [("x", x)]}["x"]  # noqa: C416
            return globals()["torch"].nan_to_num(x)
        return x * 2


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        return x * scale


@pytest.mark.needs("runtime", "torch_mlir")
@produces(
    Code.TRACE_SPECIALIZED,
    Code.TRACE_FAILED,
    Code.SCRIPT_FAILED,
    Code.TRACER_WARNING,
    Code.BAKED_ARGUMENT,
)
@pytest.mark.parametrize(
    ("model", "inputs", "expected"),
    [
        (Branches(), X, {Code.TRACE_SPECIALIZED}),
        (Counts(), X, {Code.TRACE_FAILED}),
        (Doubts(), X, {Code.TRACER_WARNING, Code.SCRIPT_FAILED}),
        (Scaled(), {"x": X, "scale": 0.5}, {Code.BAKED_ARGUMENT}),
    ],
)
def test_how_the_model_was_captured(model: nn.Module, inputs: Any, expected: set[Code]) -> None:
    optimized = blade.optimize(model.eval(), inputs, blade.Config(timing=False))
    found = {r.code for r in blade.report(optimized).reasons if r.stage is Stage.CAPTURE}
    assert expected <= found
