# SPDX-License-Identifier: Apache-2.0
"""Units compiled to cubins for sm_90, on any machine: the object, the cache, the PTX, what fails."""

import pickle
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from cpu_native import pointwise_kernel
from test_cpu_kernels import F16, F32, S0, S1, _args, layer_norm, softmax
from test_cpu_pointwise import DTYPES
from test_gpu_emit import chain, masked_softmax
from test_gpu_pointwise import EXACT
from triton_interpreter import TARGET

from blade.backends.disc.gpu.compile import compile as compiling
from blade.backends.disc.gpu.compile import cubin
from blade.backends.disc.gpu.compile.compile import (
    Cubin,
    compile_units,
    why_unavailable,
    write_object,
)
from blade.backends.disc.gpu.compile.triton_unit import TritonUnit, named_unit
from blade.backends.disc.gpu.emit.kernel import emit
from blade.backends.disc.gpu.emit.pointwise import supports
from blade.backends.disc.ir.kernel import (
    POINTWISE,
    Access,
    Compute,
    Const,
    Gather,
    Kernel,
    Load,
    Reduce,
    Stmt,
    Store,
)
from blade.core.disk_cache import DiskCache
from blade.errors import Refused

pytestmark = pytest.mark.needs("triton")

_PTX = """
import importlib.util as u, pickle, sys, tempfile, types
spec = u.spec_from_file_location("cubin", {path!r})
module = u.module_from_spec(spec); spec.loader.exec_module(module)
unit = types.SimpleNamespace(**pickle.load(sys.stdin.buffer))
with tempfile.TemporaryDirectory() as folder:
    print(module.compile_unit(unit, ("cuda", 90, 32), folder).asm["ptx"])
"""


def ptx(unit: TritonUnit, folder: Path) -> str:
    """In another process: in this one Triton interprets."""
    run = subprocess.run(
        [sys.executable, "-c", _PTX.format(path=cubin.__file__)],
        input=pickle.dumps(asdict(unit)),
        stdout=subprocess.PIPE,
        check=True,
        env={"TRITON_CACHE_DIR": str(folder), "PATH": "/usr/bin:/bin", "HOME": str(folder)},
    )
    return run.stdout.decode()


def accesses(text: str, kind: str) -> set[int]:
    """The bytes of every load or store (``kind``) of global memory."""
    found = re.findall(rf"{kind}\.global(?:\.[a-z0-9_:]+)*?(?:\.v(\d))?\.[bfsu](\d+) ", text)
    return {int(count or 1) * int(bits) // 8 for count, bits in found}


def test_memory_bound_kernels_access_16_bytes_at_a_time(tmp_path: Path) -> None:
    for kernel in (chain(), layer_norm(768), masked_softmax()):
        text = ptx(emit(kernel, TARGET)[0].unit, tmp_path)
        assert "ld.global.v4.b32" in text and "st.global.v4.b32" in text
        assert 16 in accesses(text, "ld") and 16 in accesses(text, "st")
    # the very same without a mask: nothing but whole vectors
    assert accesses(ptx(emit(layer_norm(1024), TARGET)[0].unit, tmp_path), "ld") == {16}


def test_indices_are_checked_in_the_kernel_that_uses_them(tmp_path: Path) -> None:
    def rows(bound: int | None) -> str:
        body: tuple[Stmt, ...] = (
            Load(Access(0, (1, 0)), torch.int64),
            Gather(Access(1, (0, 1)), 0, 768, F16, bound),
            Store(Access(2, (768, 1)), 1),
        )
        kernel = Kernel((S0,), 768, _args([torch.int64, F16], [F16]), body)
        return ptx(emit(kernel, TARGET)[0].unit, tmp_path)

    checked = rows(30522)
    assert "__assertfail" in checked and 16 in accesses(checked, "ld")
    assert "__assertfail" not in rows(None)


def test_a_whole_tensor_reduced_to_one_value_compiles() -> None:
    body: tuple[Stmt, ...] = (
        Load(Access(0, (1,)), F32),
        Reduce("sum", 0, F32),
        Store(Access(1, (0,)), 1),
    )
    choices = emit(Kernel((), S0, _args([F32], [F32]), body), TARGET)
    compile_units([choice.unit for choice in choices], TARGET)


def test_the_object_lists_its_cubins() -> None:
    units = [c.unit for k in (softmax(F16), layer_norm(768)) for c in emit(k, TARGET)]
    data = compile_units([*units, units[0]], TARGET)
    lines = data.split(b"\n", 2 + len(units))
    assert lines[:2] == [b"blade.cubins 1", str(len(units)).encode()]
    place = sum(len(line) + 1 for line in lines[: 2 + len(units)])
    for unit, line in zip(units, lines[2:]):
        isa, name, threads, _, size, *early = line.decode().split()
        assert early == (["early"] if unit.early else [])
        assert (isa, name, int(threads)) == ("sm_90", unit.name, 32 * unit.warps)
        code = data[place : place + int(size)]
        assert code.startswith(b"\x7fELF") and unit.name.encode() in code
        place += int(size)
    assert place == len(data)


def test_units_that_may_start_early_are_marked() -> None:
    code = Cubin(b"code", 128, 0)
    data = write_object({"plain": code, "waits": code}, TARGET, early={"waits"})
    assert data.splitlines()[2:4] == [b"sm_90 plain 128 0 4", b"sm_90 waits 128 0 4 early"]
    text = "def kernel(x):\n    pass\n"
    units = [named_unit("loop", text, (), early=early) for early in (False, True)]
    assert [unit.early for unit in units] == [False, True] and units[0].name != units[1].name


def test_registers_of_a_thread_are_limited_where_a_unit_says_so(tmp_path: Path) -> None:
    text = "import triton\n\n\n@triton.jit\ndef kernel(x):\n    pass\n"
    free, few = (named_unit("loop", text, (("x", "*fp32"),), registers=n) for n in (0, 32))
    assert free.name != few.name
    assert ".maxnreg 32" in ptx(few, tmp_path) and ".maxnreg" not in ptx(free, tmp_path)


def test_what_was_compiled_once_comes_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = DiskCache(tmp_path)
    unit = emit(pointwise_kernel("add", [F32, F32], F32), TARGET)[0].unit
    first = compile_units([unit], TARGET, cache)
    monkeypatch.setattr(compiling, "_compile", lambda units, target: {} if not units else None)
    assert compile_units([unit], TARGET, cache) == first
    assert cache.hits == 1


def test_without_units_there_is_still_an_object() -> None:
    assert compile_units([], TARGET) == b"blade.cubins 1\n0\n"


def test_what_triton_cannot_compile_is_refused_with_its_words() -> None:
    unit = emit(pointwise_kernel("add", [F32, F32], F32), TARGET)[0].unit
    broken = replace(unit, text=unit.text.replace("tl.load(", "tl.no_such_thing("))
    with pytest.raises(Refused, match="no_such_thing") as caught:
        compile_units([broken], TARGET)
    assert caught.value.code == "conversion_failed"


def test_without_triton_the_reason_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_unavailable() is None
    monkeypatch.setattr(compiling.importlib.util, "find_spec", lambda name: None)
    assert "install the package triton" in str(why_unavailable())


def all_ops(dtype: torch.dtype) -> Kernel:
    """Everything there is for ``dtype``, every cast and every reduction of it, added up to one number a row."""
    body: list[Stmt] = [Load(Access(k, (S1, 1)), dtype) for k in range(3)]
    body.append(Compute("ne", (0, 1), torch.bool))
    results: list[int] = []
    for op in (op for op in POINTWISE if op != "cast" and supports(op, dtype)):
        args = (3, 0, 1) if op == "where" else tuple(range(POINTWISE[op]))
        body.append(Compute(op, args, torch.bool if op in EXACT else dtype))
        results.append(len(body) - 1)
    for other in DTYPES:
        body.append(Compute("cast", (0,), other))
        results.append(len(body) - 1)
    for kind in ("any", "all") if dtype == torch.bool else ("sum", "prod", "max", "min"):
        body.append(Reduce(kind, 1, dtype))
        results.append(len(body) - 1)
    body.append(Const(0.0, F32))
    total = len(body) - 1
    for i in results:
        body.append(Compute("cast", (i,), F32))
        body.append(Compute("add", (total, len(body) - 1), F32))
        total = len(body) - 1
    body.append(Store(Access(3, (S1, 1)), total))
    return Kernel((S0,), S1, _args([dtype] * 3, [F32]), tuple(body))


def test_every_op_compiles() -> None:
    """Each type's in one kernel; one of the choices, as they differ in tiles alone."""
    compile_units([emit(all_ops(dtype), TARGET)[0].unit for dtype in DTYPES], TARGET)
