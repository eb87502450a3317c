# SPDX-License-Identifier: Apache-2.0
"""AOTInductor and TVM on a bad day: no compiler, no library, or code that cannot be loaded.

Nothing is compiled here: stand-ins for the compilers give out code that is damaged.
"""

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_backends import Fake, produces, registered
from torch import nn

import blade
from blade.backends import registry
from blade.backends.inductor import run as inductor_run
from blade.backends.inductor.backend import InductorBackend
from blade.backends.inductor.package import InductorPackage
from blade.backends.shared.archive import EngineArchive
from blade.backends.shared.host_isa import for_this_cpu
from blade.backends.tvm import compile as tvm_compile
from blade.backends.tvm import run as tvm_run
from blade.backends.tvm.backend import TvmBackend
from blade.config import Config
from blade.core.cluster import Cluster, OpNode, ValueInfo
from blade.core.reason import Code
from blade.errors import BackendError
from blade.program.guard_program import guard_program
from blade.runtime.engine import make_engine, register_runner

pytestmark = pytest.mark.needs("runtime")
LIBRARY = "model.so"
LOADERS = {"inductor": inductor_run.load, "tvm": tvm_run.load}
NATIVE = ["inductor", pytest.param("tvm", marks=pytest.mark.needs("tvm"))]
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(6, 6).eval()


def payload(backend: str, library: bytes) -> bytes:
    """What ``backend`` makes of a ``library`` that needs no weights."""
    if backend == "inductor":
        return InductorPackage((None, None, None), {}, (), {}, {LIBRARY: library}).to_bytes()
    facts = {"weights": 0, "orders": [None]}
    return EngineArchive(tvm_run.stamp(), facts, {LIBRARY: library}).to_bytes()


def cut_off() -> bytes:
    """A library of which the disk took only half: the system's loader dies of it."""
    [whole] = Path(blade.__file__).parent.glob("libblade_runtime*.so")
    return whole.read_bytes()[: whole.stat().st_size // 2]


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty PATH, and no compiler that CXX names by its place."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("name", NATIVE)
def test_without_a_compiler_it_says_how_to_get_one(name: str) -> None:
    why = registry.available(name)
    assert why is not None
    assert "compile" in why
    assert "`apt-get install g++`" in why
    with pytest.raises(BackendError, match=r"apt-get install g\+\+"):
        blade.optimize(model(), X, Config(optimization_pipeline=name))


@pytest.mark.parametrize("package", ["tvm", "tvm_ffi"])
def test_without_tvm_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    for name in ("tvm", "tvm_ffi"):
        found = None if name == package else sys  # None: Python says it is not installed
        monkeypatch.setitem(sys.modules, name, found)
    why = registry.available("tvm")
    assert why == f"TVM is not installed (there is no {package}): `pip install apache-tvm`."


@pytest.fixture
def broken_tvm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """An installation that is found, but has no libraries."""
    (tmp_path / "tvm").mkdir()
    (tmp_path / "tvm" / "__init__.py").touch()
    for name in [name for name in sys.modules if name.partition(".")[0] == "tvm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    tvm_run._load_runtime.cache_clear()
    yield
    tvm_run._load_runtime.cache_clear()


@pytest.mark.needs("tvm")
@pytest.mark.usefixtures("broken_tvm")
def test_a_tvm_without_its_runtime_is_told_at_load() -> None:
    data = torch.frombuffer(bytearray(payload("tvm", b"code")), dtype=torch.uint8)
    with pytest.raises(BackendError, match=r"TVM's runtime cannot be loaded: .*libtvm_runtime\.so"):
        tvm_run.load("cluster_0", data, [], "")


class _Damaged:
    """Its compiler wrote half a library."""

    name: str

    def why_unavailable(self) -> str | None:
        return None

    def why_not(self, node: OpNode, config: Config) -> None:
        return None

    def convert(self, cluster: Cluster, config: Config) -> torch.ScriptObject:
        program = guard_program(cluster)
        return make_engine(cluster.name, self.name, program, payload(self.name, cut_off()))


class DamagedInductor(_Damaged, InductorBackend): ...


class DamagedTvm(_Damaged, TvmBackend): ...


@produces(Code.CONVERSION_CRASHED)
@pytest.mark.parametrize("name", NATIVE)
def test_a_library_that_kills_whoever_loads_it_costs_a_reason(name: str) -> None:
    damaged: Any = {"inductor": DamagedInductor, "tvm": DamagedTvm}[name]()
    registry.register(damaged)
    try:
        config = Config(optimization_pipeline=name, timing=False, min_cluster_size=1)
        optimized = blade.optimize(model(), X, config)
    finally:
        registry.unregister(name)
    torch.testing.assert_close(optimized(X), model()(X))
    [reason] = [r for r in blade.report(optimized).all_reasons() if r.backend == name]
    assert reason.code is Code.CONVERSION_CRASHED
    assert "SIGBUS" in reason.detail
    assert blade.stats(optimized) == {}


OLD = EngineArchive({"torch": "1.0", "apache-tvm": "0.1", "apache-tvm-ffi": "0.1"}).to_bytes()


@produces(Code.BACKEND_UNAVAILABLE)
@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"no archive", "compiled is damaged"),
        (OLD, "optimize the model again"),
        (None, "library cannot be loaded"),
    ],
    ids=["damaged", "other version", "no code"],
)
def test_a_file_that_cannot_be_loaded_runs_the_original(
    name: str, data: bytes | None, why: str
) -> None:
    with registered(Fake(name)):
        config = Config(optimization_pipeline=name, timing=False, min_cluster_size=1)
        optimized = blade.optimize(model(), X, config)
    engine = optimized.cluster_0.engine
    register_runner(name, LOADERS[name])  # again: the stand-in's was in its place
    data = payload(name, b"no code") if data is None else data
    made: Any = make_engine("cluster_0", name, engine.program(), data)
    engine._get_method("__setstate__")(made._get_method("__getstate__")())
    saved = io.BytesIO()
    torch.jit.save(optimized, saved)
    loaded = torch.jit.load(io.BytesIO(saved.getvalue()))
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(loaded(X), model()(X))
    [counted] = blade.stats(loaded).values()
    assert counted[Code.BACKEND_UNAVAILABLE.value] == 2
    assert counted["engine_runs"] == 0
    assert why in loaded.cluster_0.engine.why_unavailable()


@produces(Code.CPU_MISMATCH)
@pytest.mark.parametrize("name", NATIVE)
def test_a_library_for_another_cpu_is_not_mapped(
    name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with registered(Fake(name)):
        config = Config(optimization_pipeline=name, timing=False, min_cluster_size=1)
        optimized = blade.optimize(model(), X, config)
    register_runner(name, LOADERS[name])
    opened: list[Any] = []
    monkeypatch.setattr(f"blade.backends.{name}.run._open", opened.append)
    engine = optimized.cluster_0.engine
    program = for_this_cpu(engine.program())
    assert " sse2" in program
    program = program.replace(" sse2", " sse2 warp_drive", 1)
    made: Any = make_engine("cluster_0", name, program, payload(name, b"code"))
    engine._get_method("__setstate__")(made._get_method("__getstate__")())
    saved = io.BytesIO()
    torch.jit.save(optimized, saved)
    capfd.readouterr()
    loaded = torch.jit.load(io.BytesIO(saved.getvalue()))
    assert "'warp_drive', which this CPU lacks" in capfd.readouterr().err
    with torch.no_grad():
        torch.testing.assert_close(loaded(X), model()(X))
    [counted] = blade.stats(loaded).values()
    assert counted[Code.CPU_MISMATCH.value] == 1
    assert opened == []


@pytest.mark.needs("tvm")
def test_tvm_uses_no_vectors_that_the_machine_hides(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a hypervisor does: the model of the CPU has AVX-512, and its flags do not."""
    import tvm.target.codegen

    features = tvm.target.codegen.llvm_get_cpu_features
    plain = "sse2 ssse3 avx avx2 fma f16c vaes vpclmulqdq gfni".split()
    monkeypatch.setattr(tvm.target.codegen, "llvm_get_system_cpu", lambda: "znver4")
    monkeypatch.setattr(tvm_compile, "isa_features", lambda: frozenset(plain))
    used = set(map(str, features(tvm_compile.host_target())))
    assert {"avx2", "fma", "gfni"} <= used
    assert not [name for name in used if name.startswith("avx512")]
    some = [*plain, "avx512f", "avx512bw", "avx512_bf16"]
    monkeypatch.setattr(tvm_compile, "isa_features", lambda: frozenset(some))
    used = set(map(str, features(tvm_compile.host_target())))
    vectors = sorted(name for name in used if name.startswith("avx512"))
    assert vectors == ["avx512bf16", "avx512bw", "avx512f"]


@pytest.mark.parametrize("name", ["inductor", "tvm"])
def test_nobody_is_given_a_lookup_whose_code_would_not_raise(name: str) -> None:
    """AOTInductor's ends the process at an index out of range; here such an op stays where it raises."""
    index = ValueInfo("tensor", torch.int64, torch.device("cpu"), 1)
    weight = ValueInfo("tensor", torch.float32, torch.device("cpu"), 2)
    node = OpNode("e", torch.ops.aten.embedding.default, (weight, index), {}, (weight,))
    why = registry.load(name).why_not(node, blade.Config())
    assert why is not None and why.code is Code.UNSUPPORTED_OP
