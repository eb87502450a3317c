# SPDX-License-Identifier: Apache-2.0
"""The warnings that torch.jit's entry points begin with, from torch 2.14 on, do not reach users where blade calls them.

With an older torch, the entry points are made to warn as those of 2.14 do.
"""

import ast
import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import blade
from blade.capture.decisions import checks
from blade.cli.shared.files import read_torchscript
from blade.core import torchscript

PACKAGE = Path(blade.__file__).parent
# What warns in torch 2.14 and 2.15.
ENTRY_POINTS = {
    *("script", "trace", "script_method", "interface", "save", "load"),
    *("freeze", "optimize_for_inference", "set_fusion_strategy", "fork", "wait"),
}
MODEL = nn.Sequential(nn.Linear(16, 16), nn.ReLU()).eval()
X = torch.randn(4, 16)


def _warning(name: str, entry: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(entry)
    def call(*args: Any, **kwargs: Any) -> Any:
        warnings.warn(
            f"`torch.jit.{name}` is deprecated. Please switch.", FutureWarning, stacklevel=1
        )
        return entry(*args, **kwargs)

    return call


@pytest.fixture(autouse=True)
def shown(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[warnings.WarningMessage]]:
    """What a user with the strictest filter is shown of torch.jit's entry points."""
    for name in ENTRY_POINTS:
        monkeypatch.setattr(torch.jit, name, _warning(name, getattr(torch.jit, name)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


def _entries(shown: list[warnings.WarningMessage]) -> list[str]:
    return [str(w.message) for w in shown if "`torch.jit." in str(w.message)]


def test_a_users_own_call_warns(shown: list[warnings.WarningMessage]) -> None:
    torch.jit.trace(MODEL, X)
    assert any("`torch.jit.trace`" in text for text in _entries(shown))


@pytest.mark.needs("runtime", "torch_mlir")
def test_optimizing_pickling_and_copying_do_not(shown: list[warnings.WarningMessage]) -> None:
    scripted = torch.jit.trace(MODEL, X)  # is copied as its file
    shown.clear()
    for model in (MODEL, scripted):
        optimized = blade.optimize(model, X)
        again = pickle.loads(pickle.dumps(optimized))
        torch.testing.assert_close(again(X), MODEL(X))
    assert _entries(shown) == []


class _Decides(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if float(x.sum()) > 0 else x - 1


@pytest.mark.needs("runtime", "torch_mlir")
def test_checks_of_decisions_do_not(shown: list[warnings.WarningMessage]) -> None:
    """They are functions that blade scripts, once in a process."""
    for compiled in checks._all:
        compiled.cache_clear()  # type: ignore[attr-defined]
    optimized = blade.optimize(_Decides().eval(), [(X.abs(),), (-X.abs(),)])
    torch.testing.assert_close(optimized(-X.abs()), -X.abs() - 1)
    assert _entries(shown) == []


@pytest.mark.needs("runtime", "torch_mlir")
def test_drop_ins_and_their_files_do_not(
    shown: list[warnings.WarningMessage], tmp_path: Path
) -> None:
    blade.save(blade.accelerate(copy.deepcopy(MODEL), X), tmp_path / "model.blade")
    loaded = blade.load(tmp_path / "model.blade", copy.deepcopy(MODEL))
    torch.testing.assert_close(loaded(X), MODEL(X))
    assert _entries(shown) == []


def test_files_are_those_of_torch(shown: list[warnings.WarningMessage], tmp_path: Path) -> None:
    module = torchscript.script(_positive)
    holder = torch.jit.trace(MODEL, X)
    shown.clear()
    torchscript.save(holder, tmp_path / "model.pt")
    read = [
        torchscript.load(tmp_path / "model.pt"),
        torchscript.load(str(tmp_path / "model.pt"), "cpu"),
        torchscript.load(io.BytesIO(torchscript.to_bytes(holder))),
        read_torchscript(tmp_path / "model.pt"),
    ]
    assert _entries(shown) == []
    for one in read + [torch.jit.load(tmp_path / "model.pt")]:
        assert isinstance(one, torch.jit.ScriptModule)
        assert torch.equal(one(X), MODEL(X))
    assert torch.equal(module(X), X.abs())
    assert isinstance(module, torch.jit.ScriptFunction)
    with pytest.raises(RuntimeError):
        torchscript.load(io.BytesIO(b"no file of torch.jit"))


def _positive(x: torch.Tensor) -> torch.Tensor:
    if bool((x > 0).all()):
        return x
    return x.abs()


def test_no_module_calls_an_entry_point_that_warns() -> None:
    """Tracing alone does, under a filter that the tracer's own warnings need."""
    texts = {path: path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    found = {
        f"{path.relative_to(PACKAGE).as_posix()} {ast.unparse(node.func)}"
        for path, text in texts.items()
        if "torch.jit." in text
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in {f"torch.jit.{name}" for name in ENTRY_POINTS}
    }
    assert found == {"capture/trace.py torch.jit.trace", "capture/trace.py torch.jit.script"}
