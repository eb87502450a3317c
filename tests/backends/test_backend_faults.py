# SPDX-License-Identifier: Apache-2.0
"""Every backend of a library on a bad day: it is not installed, it is broken, its converter dies.

Whatever happens, the answer is right and the report says what happened and, where something is missing, how to
get it. What is special about one of them is in its own tests.
"""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_backends import produces
from torch import nn

import blade
from blade.backends import registry
from blade.backends.inductor.backend import InductorBackend
from blade.backends.onnxruntime.backend import OnnxRuntimeBackend
from blade.backends.openvino.backend import OpenVinoBackend
from blade.backends.tensorrt import library
from blade.backends.tensorrt.backend import TensorRTBackend
from blade.backends.tvm.backend import TvmBackend
from blade.config import Config
from blade.core.cluster import Cluster, OpNode
from blade.core.reason import Code, Reason
from blade.errors import BackendError
from blade.fallback.isolated_convert import close_workers

pytestmark = pytest.mark.needs("runtime")
MODULES = {  # that bring them; AOTInductor's library is a compiler
    "onnxruntime": ("onnxruntime",),
    "openvino": ("openvino",),
    "tensorrt": tuple(name for name, _ in library.MODULES),
    "tvm": ("tvm",),
    "inductor": (),
}
NEEDED = {"inductor": (), "tvm": ("tvm", "g++")}  # the others want an exporter first
ALL = [pytest.param(n, marks=pytest.mark.needs(*NEEDED.get(n, ("onnx",)))) for n in MODULES]
BROKEN = "libbroken.so.1: cannot open shared object file"
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
Break = Callable[[str], None]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No process that converts has seen the libraries as they were, or sees them as they were here."""
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(
        library, "why_no_device", lambda: None
    )  # or TensorRT would not be looked at
    library.find_library.cache_clear()
    close_workers()
    yield
    library.find_library.cache_clear()
    close_workers()


@pytest.fixture
def uninstall(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Break:
    def uninstall(name: str) -> None:
        for module in MODULES[name]:
            monkeypatch.setitem(sys.modules, module, None)  # Python's word for "not there"
        if name == "inductor":
            monkeypatch.setenv("PATH", str(tmp_path))

    return uninstall


@pytest.fixture
def break_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Break:
    """It is found, and fails where it is imported or run, here and in processes that convert."""

    def break_it(name: str) -> None:
        for module in MODULES[name]:
            for loaded in [m for m in sys.modules if m.partition(".")[0] == module]:
                monkeypatch.delitem(sys.modules, loaded)
            (tmp_path / module).mkdir()
            (tmp_path / module / "__init__.py").write_text(f"raise OSError({BROKEN!r})\n")
        monkeypatch.syspath_prepend(tmp_path)
        if name == "inductor":
            compiler = tmp_path / "g++"
            fails = f"echo '{BROKEN}' >&2; exit 1"
            compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exec echo 13\n{fails}\n')
            compiler.chmod(0o755)
            monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return break_it


def optimized_with(name: str, **fields: Any) -> tuple[nn.Module, list[Reason]]:
    """A module that answers as its original does, and what the report has against backend ``name``."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU()).eval()
    config = Config(timing=False, cache=False, min_cluster_size=1, **fields)
    optimized = blade.optimize(model, X, config)
    with torch.no_grad():
        for x in (X, X[:1]):
            torch.testing.assert_close(optimized(x), model(x))
    return optimized, [r for r in blade.report(optimized).all_reasons() if r.backend == name]


@produces(Code.BACKEND_UNAVAILABLE)
@pytest.mark.parametrize("name", ALL)
def test_uninstalled(name: str, uninstall: Break, monkeypatch: pytest.MonkeyPatch) -> None:
    uninstall(name)
    monkeypatch.setenv("BLADE_BACKENDS", name)
    _, [reason] = optimized_with(name)
    assert reason.code is Code.BACKEND_UNAVAILABLE
    assert "install" in reason.detail
    with pytest.raises(BackendError, match="install"):
        optimized_with(name, optimization_pipeline=name)


@produces(Code.BACKEND_UNAVAILABLE, Code.CONVERSION_FAILED)
@pytest.mark.parametrize("name", ALL)
def test_broken(name: str, break_it: Break, monkeypatch: pytest.MonkeyPatch) -> None:
    break_it(name)
    monkeypatch.setenv("BLADE_BACKENDS", name)
    optimized, against = optimized_with(name)
    assert {r.code for r in against} <= {Code.BACKEND_UNAVAILABLE, Code.CONVERSION_FAILED}
    assert any(BROKEN in f"{r.detail} {r.error}" for r in against)
    assert blade.stats(optimized) == {}


class _Dies:
    """Takes all nodes, and the process that converts with it."""

    def why_unavailable(self) -> str | None:
        return None

    def why_not(self, node: OpNode, config: Config) -> Reason | None:
        return None

    def survey(self, *anything: object) -> None: ...

    def convert(self, cluster: Cluster, config: Config) -> torch.ScriptObject:
        os.abort()


class DyingOnnxRuntime(_Dies, OnnxRuntimeBackend): ...


class DyingOpenVino(_Dies, OpenVinoBackend): ...


class DyingTensorRT(_Dies, TensorRTBackend): ...


class DyingTvm(_Dies, TvmBackend): ...


class DyingInductor(_Dies, InductorBackend): ...


DYING: tuple[Any, ...] = (
    DyingOnnxRuntime,
    DyingOpenVino,
    DyingTensorRT,
    DyingTvm,
    DyingInductor,
)


@produces(Code.CONVERSION_CRASHED)
@pytest.mark.parametrize("kind", DYING)
def test_its_converter_dies(kind: Any) -> None:
    registry.register(kind())
    try:
        optimized, against = optimized_with(kind.name, optimization_pipeline=kind.name)
    finally:
        registry.unregister(kind.name)
    assert {r.code for r in against} == {Code.CONVERSION_CRASHED}
    assert all("SIGABRT" in r.detail for r in against)
    assert blade.stats(optimized) == {}


def test_no_backend_is_forgotten() -> None:
    ours = {"disc", "quant"}  # they need no library
    assert {*MODULES} == {kind.name for kind in DYING} == {*registry._BUILT_IN} - ours
