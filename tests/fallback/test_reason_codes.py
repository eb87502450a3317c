# SPDX-License-Identifier: Apache-2.0
"""Every Reason code has a test that produces it: the list is checked here, the rest is produced here."""

import ast
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_backends import produces
from torch import nn

import blade
from blade.backends import registry
from blade.core.cluster import OpNode, ValueInfo
from blade.core.reason import Code, Stage

TESTS = Path(__file__).parent.parent
X = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))


def _claims() -> dict[str, list[str]]:
    """Code name -> the tests that carry ``@produces(Code.NAME)``."""
    found: dict[str, list[str]] = {}
    for path in TESTS.rglob("test_*.py"):
        text = path.read_text()
        tests = ast.parse(text).body if "@produces(" in text else []
        for test in tests:
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


class Noise(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)


class ViewOfInput(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(0, 1)


class Counts(nn.Module):
    """As many numbers as the largest one says, and no backend takes the op."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bincount((x.flatten() * 4).abs().long())


class Accumulate(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        x.add_(y)  # the caller's tensor
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
        (Counts(), Code.DATA_DEPENDENT),
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


class Counts(nn.Module):
    """Only a script can return an int."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return x * 2, x.shape[0]


class Doubts(nn.Module):
    """Decides on elements by NumPy, which cannot be scripted, and which a trace holds for one answer of."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.tensor(np.sign(x.numpy().sum()))


class Resized(nn.Module):
    def forward(self, x: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        return nn.functional.interpolate(x, size)


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
        (Counts(), X, {Code.TRACE_FAILED}),
        (Doubts(), X, {Code.TRACER_WARNING, Code.SCRIPT_FAILED, Code.TRACE_SPECIALIZED}),
        (Resized(), {"x": X[None, None], "size": (3, 5)}, {Code.BAKED_ARGUMENT}),
    ],
)
def test_how_the_model_was_captured(model: nn.Module, inputs: Any, expected: set[Code]) -> None:
    optimized = blade.optimize(model.eval(), inputs, blade.Config(timing=False))
    found = {r.code for r in blade.report(optimized).reasons if r.stage is Stage.CAPTURE}
    assert expected <= found
