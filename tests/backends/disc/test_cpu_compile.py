# SPDX-License-Identifier: Apache-2.0
"""Kernels are compiled once, in as many processes as pay, and kept one by one."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from blade.backends.disc.cpu.compile import llvm
from blade.backends.disc.cpu.compile import parallel as module
from blade.backends.disc.cpu.compile.ar_archive import archive
from blade.backends.disc.cpu.compile.parallel import compile_kernels
from blade.backends.disc.target import cpu
from blade.backends.disc.target.cpu import host
from blade.core.disk_cache import DiskCache

pytestmark = pytest.mark.needs("torch_mlir")


def kernel(name: str, lines: int = 0) -> tuple[str, str]:
    padding = "".join(f"    // {i}\n" for i in range(lines))
    arguments = "%ptrs: !llvm.ptr, %ints: !llvm.ptr, %begin: i64, %end: i64"
    return name, f"llvm.func @{name}({arguments}) {{\n{padding}    llvm.return\n}}\n"


def test_only_the_dialects_of_a_kernel_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code is the same as with all of them."""
    from torch_mlir import ir

    plain, loaded = ir.Context, []

    class Counted(plain):  # type: ignore[misc,valid-type]
        def __exit__(self, *error: object) -> None:
            loaded.append(
                [d for d in ("llvm", "arith", "tosa", "spirv") if self.is_dialect_loaded(d)]
            )
            super().__exit__(*error)

    class Whole(plain):  # type: ignore[misc,valid-type]
        def __init__(self, load_on_create_dialects: object) -> None:
            super().__init__()

    add = "    %sum = arith.addi %begin, %end : i64\n    llvm.store %sum, %ints : i64, !llvm.ptr\n"
    name, text = kernel("adds")
    text = text.replace("    llvm.return", f"{add}    llvm.return")
    monkeypatch.setattr(ir, "Context", Counted)
    code = llvm.compile_kernel(name, text)
    assert loaded == [["llvm", "arith"]]
    monkeypatch.setattr(ir, "Context", Whole)
    assert llvm.compile_kernel(name, text) == code


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that were compiled in this process."""
    names: list[str] = []
    plain = llvm.compile_kernel

    def counted(name: str, text: str) -> bytes:
        names.append(name)
        return plain(name, text)

    monkeypatch.setattr(llvm, "compile_kernel", counted)
    return names


def test_only_what_is_not_in_the_cache_is_compiled(tmp_path: Path, compiled: list[str]) -> None:
    cache = DiskCache(tmp_path)
    first = compile_kernels([kernel("a"), kernel("b")], host(), cache)
    assert sorted(compiled) == ["a", "b"]
    second = compile_kernels([kernel("a"), kernel("c"), kernel("b")], host(), cache)
    assert sorted(compiled) == ["a", "b", "c"]
    assert compile_kernels([kernel("a"), kernel("b")], host(), cache) == first != second
    compile_kernels([kernel("a", lines=1)], host(), cache)  # other text, other code
    assert sorted(compiled) == ["a", "a", "b", "c"]


def test_the_cpu_and_the_compiler_are_part_of_the_key(
    tmp_path: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = DiskCache(tmp_path)
    compile_kernels([kernel("a")], host(), cache)
    monkeypatch.setattr(module, "compiler", lambda: "another version or CPU")
    compile_kernels([kernel("a")], host(), cache)
    assert compiled == ["a", "a"]


def test_without_a_cache_everything_is_compiled(compiled: list[str]) -> None:
    for _ in range(2):
        compile_kernels([kernel("a")], host())
    assert compiled == ["a", "a"]


@pytest.fixture
def two_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(module, "KERNEL_S", 1.0)  # so slow that processes pay


@pytest.mark.usefixtures("two_processors")
def test_slow_kernels_are_shared_between_processes(compiled: list[str]) -> None:
    kernels = [kernel(f"k{i}") for i in range(5)]
    data = compile_kernels(kernels, host())
    assert 0 < len(compiled) < 5  # the others elsewhere
    alone = archive({name: llvm.compile_kernel(name, text) for name, text in kernels})
    assert data == alone


@pytest.mark.usefixtures("two_processors")
@pytest.mark.parametrize("python", ["/bin/false", "/no/such/python"])
def test_what_a_process_does_not_deliver_is_compiled_here(
    python: str, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", python)
    compile_kernels([kernel(f"k{i}") for i in range(5)], host())
    assert sorted(compiled) == [f"k{i}" for i in range(5)]


def test_quick_kernels_start_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda pid: set(range(64)))
    assert len(module._shares([kernel(f"k{i}") for i in range(5)])) == 1
    monkeypatch.setattr(module, "KERNEL_S", 1.0)
    shares = module._shares([kernel(f"k{i}") for i in range(50)])
    assert len(shares) == module.MAX_PROCESSES
    assert sorted(name for share in shares for name, _ in share) == sorted(
        f"k{i}" for i in range(50)
    )


@pytest.mark.skipif(shutil.which("ar") is None, reason="no ar")
def test_an_archive_is_one_to_other_tools(tmp_path: Path) -> None:
    objects = {"a": b"\x7fELF odd", "a_name_longer_than_sixteen_characters": b"\x7fELF even"}
    (tmp_path / "k.a").write_bytes(archive(objects))
    subprocess.run(["ar", "x", "k.a"], cwd=tmp_path, check=True)
    assert {name: (tmp_path / name).read_bytes() for name in objects} == objects


def test_the_target_lists_features_by_linux_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Zen 5 as Linux 6.8 lists it: LLVM's code for it may use any of these."""
    vectors = set(
        "avx avx2 fma f16c avx512f avx512bw avx512dq avx512vl avx512cd avx512ifma avx512vbmi avx512_bf16 "
        "avx512_vbmi2 avx512_vnni avx512_bitalg avx512_vpopcntdq avx_vnni gfni vaes vpclmulqdq".split()
    )
    monkeypatch.setattr(cpu, "isa_features", lambda: frozenset({"fpu", "sse4_1", *vectors}))
    target = cpu.host.__wrapped__()
    assert set(target.isa) == {"sse4_1", *vectors}
    assert target.lanes == 16
