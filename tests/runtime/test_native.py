# SPDX-License-Identifier: Apache-2.0
"""Native kernels: objects as LLVM writes them, linked, split over threads, with scratch."""

import struct
from pathlib import Path

import pytest
import torch
from programs import Writer

from blade.backends.disc.cpu.compile.ar_archive import archive

pytestmark = pytest.mark.needs("torch_mlir")

# y[i] = exp(x[i]) * 0.5 + k over [begin, end); exp is a call out of the object, 0.5 a constant in it
EXP = """
llvm.func @expf(f32) -> f32
llvm.func @exp_half(%ptrs: !llvm.ptr, %ints: !llvm.ptr, %begin: i64, %end: i64) {
  %x = llvm.load %ptrs : !llvm.ptr -> !llvm.ptr
  %slot = llvm.getelementptr %ptrs[1] : (!llvm.ptr) -> !llvm.ptr, !llvm.ptr
  %y = llvm.load %slot : !llvm.ptr -> !llvm.ptr
  %k = llvm.load %ints : !llvm.ptr -> i64
  %kf = llvm.sitofp %k : i64 to f32
  %half = llvm.mlir.constant(0.5 : f32) : f32
  %b = arith.index_cast %begin : i64 to index
  %e = arith.index_cast %end : i64 to index
  %one = arith.constant 1 : index
  scf.for %i = %b to %e step %one {
    %j = arith.index_cast %i : index to i64
    %px = llvm.getelementptr %x[%j] : (!llvm.ptr, i64) -> !llvm.ptr, f32
    %v = llvm.load %px : !llvm.ptr -> f32
    %exp = llvm.call @expf(%v) : (f32) -> f32
    %h = llvm.fmul %exp, %half : f32
    %r = llvm.fadd %h, %kf : f32
    %py = llvm.getelementptr %y[%j] : (!llvm.ptr, i64) -> !llvm.ptr, f32
    llvm.store %r, %py : f32, !llvm.ptr
  }
  llvm.return
}
"""

# writes i to scratch[i - begin], then y[i] = scratch[i - begin] * 2: wrong if threads share scratch
SCRATCH = """
llvm.func @through_scratch(%ptrs: !llvm.ptr, %ints: !llvm.ptr, %begin: i64, %end: i64) {
  %y = llvm.load %ptrs : !llvm.ptr -> !llvm.ptr
  %slot = llvm.getelementptr %ptrs[1] : (!llvm.ptr) -> !llvm.ptr, !llvm.ptr
  %s = llvm.load %slot : !llvm.ptr -> !llvm.ptr
  %b = arith.index_cast %begin : i64 to index
  %e = arith.index_cast %end : i64 to index
  %one = arith.constant 1 : index
  scf.for %i = %b to %e step %one {
    %j = arith.index_cast %i : index to i64
    %at = llvm.sub %j, %begin : i64
    %ps = llvm.getelementptr %s[%at] : (!llvm.ptr, i64) -> !llvm.ptr, i64
    llvm.store volatile %j, %ps : i64, !llvm.ptr
  }
  scf.for %i = %b to %e step %one {
    %j = arith.index_cast %i : index to i64
    %at = llvm.sub %j, %begin : i64
    %ps = llvm.getelementptr %s[%at] : (!llvm.ptr, i64) -> !llvm.ptr, i64
    %v = llvm.load volatile %ps : !llvm.ptr -> i64
    %w = llvm.add %v, %v : i64
    %py = llvm.getelementptr %y[%j] : (!llvm.ptr, i64) -> !llvm.ptr, i64
    llvm.store %w, %py : i64, !llvm.ptr
  }
  llvm.return
}
"""

# y[0] = table[begin]: a constant array that does not fit an immediate
TABLE = """
llvm.mlir.global internal constant @table(dense<[10, 20, 30, 40, 50, 60, 70, 80]> : tensor<8xi64>)
    {alignment = 64 : i64} : !llvm.array<8 x i64>
llvm.func @look_up(%ptrs: !llvm.ptr, %ints: !llvm.ptr, %begin: i64, %end: i64) {
  %y = llvm.load %ptrs : !llvm.ptr -> !llvm.ptr
  %table = llvm.mlir.addressof @table : !llvm.ptr
  %k = llvm.load %ints : !llvm.ptr -> i64
  %p = llvm.getelementptr %table[%k] : (!llvm.ptr, i64) -> !llvm.ptr, i64
  %v = llvm.load %p : !llvm.ptr -> i64
  llvm.store %v, %y : i64, !llvm.ptr
  llvm.return
}
"""

UNKNOWN = """
llvm.func @system(!llvm.ptr) -> i32
llvm.func @run_system(%ptrs: !llvm.ptr, %ints: !llvm.ptr, %begin: i64, %end: i64) {
  %r = llvm.call @system(%ptrs) : (!llvm.ptr) -> i32
  llvm.return
}
"""

PIPELINE = (
    "builtin.module(convert-scf-to-cf,convert-arith-to-llvm,convert-index-to-llvm,"
    "convert-cf-to-llvm,reconcile-unrealized-casts)"
)


def assemble(folder: Path, source: str, name: str) -> bytes:
    pytest.importorskip("torch_mlir._mlir_libs._mlirRegisterEverything")
    from torch_mlir import execution_engine, ir, passmanager

    path = folder / f"{name}.o"
    with ir.Context():
        module = ir.Module.parse(f"module {{ {source} }}")
        passmanager.PassManager.parse(PIPELINE).run(module.operation)
        engine = execution_engine.ExecutionEngine(module, opt_level=2, enable_pic=True)
        engine.raw_lookup(name)
        engine.dump_to_object_file(str(path))
    return path.read_bytes()


@pytest.fixture(scope="module")
def objects(tmp_path_factory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("objects")
    sources = {"exp_half": EXP, "through_scratch": SCRATCH, "look_up": TABLE}
    return {name: assemble(folder, source, name) for name, source in sources.items()}


def exp_half() -> Writer:
    w = Writer()
    x = w.input("f32", 2)
    rows, columns = w.dims(x, 2)
    elements = w.reg(f"mul {rows} {columns}")
    y = w.tensor("output", [rows, columns])
    a = w.slot(f"input {x}")
    w.kernel("exp_half", elements, w.const(1), w.const(0), [a, y], [w.const(3)])
    w.outputs = [y]
    return w


@pytest.mark.parametrize("shape", [(1, 1), (0, 5), (3, 0), (7, 11), (300, 1000)])
def test_a_kernel_with_a_constant_and_an_external_call(objects, shape):
    engine = exp_half().engine(object=objects["exp_half"])
    assert engine.why_unavailable() == ""
    x = torch.randn(shape)
    for _ in range(2):
        (y,) = engine.try_execute([x])
        torch.testing.assert_close(y, x.exp() * 0.5 + 3)


def test_every_thread_has_its_own_scratch(objects):
    w = Writer()
    x = w.input("f32", 1)
    (n,) = w.dims(x, 1)
    scratch = w.reg(f"mul {n} {w.const(8)}")
    y = w.tensor("output", [n], "i64")
    w.kernel("through_scratch", n, w.const(16384), scratch, [y], [])
    w.outputs = [y]
    engine = w.engine(object=objects["through_scratch"])
    for size in (1, 10, 100_000, 5):
        (y,) = engine.try_execute([torch.empty(size)])
        assert torch.equal(y, torch.arange(size) * 2)


def test_constant_tables_are_found(objects):
    w = Writer()
    x = w.input("f32", 1)
    (n,) = w.dims(x, 1)
    one = w.const(1)
    y = w.tensor("output", [one], "i64")
    w.kernel("look_up", one, one, w.const(0), [y], [n])
    w.outputs = [y]
    engine = w.engine(object=objects["look_up"])
    assert [engine.try_execute([torch.empty(k)])[0].item() for k in range(8)] == [
        10, 20, 30, 40, 50, 60, 70, 80
    ]  # fmt: skip


def test_kernels_write_the_arena_and_read_views(objects):
    """exp_half over rows 1.. of relu(x): a pointer that is a view of an arena slot."""
    w = Writer()
    x = w.input("f32", 2)
    rows, columns = w.dims(x, 2)
    one = w.const(1)
    fewer = w.reg(f"sub {rows} {one}")
    h = w.tensor("arena", [rows, columns])
    part = w.view(h, [fewer, columns], [columns, one], columns)
    y = w.tensor("output", [fewer, columns])
    w.call("aten::relu.out", f"t:{w.slot(f'input {x}')}", f"t:{h}")
    extent = w.reg(f"mul {fewer} {columns}")
    w.kernel("exp_half", extent, one, w.const(0), [part, y], [w.const(0)])
    w.outputs = [y]
    engine = w.engine(object=objects["exp_half"])
    for shape in ((3, 4), (1, 4), (100, 7), (3, 4)):
        x = torch.randn(shape)
        (y,) = engine.try_execute([x])
        torch.testing.assert_close(y, x.relu()[1:].exp() * 0.5)


def test_code_is_never_writable_and_executable_at_once(objects):
    def open_to_both() -> set[str]:
        """Address ranges; libraries with a JIT of their own (oneDNN's) may have some already."""
        with open("/proc/self/maps") as maps:
            return {line.split()[0] for line in maps if "rwx" in line}

    torch.randn(2, 2).relu()  # whatever torch maps for its first kernels
    before = open_to_both()
    engine = exp_half().engine(object=objects["exp_half"])
    assert engine.try_execute([torch.randn(2, 2)]) is not None
    assert not open_to_both() - before


def test_unknown_external_functions_are_refused(tmp_path):
    w = Writer()
    n = w.const(1)
    w.kernel("run_system", n, n, w.const(0), [], [])
    engine = w.engine(object=assemble(tmp_path, UNKNOWN, "run_system"))
    assert "'system', which the runtime does not provide" in engine.why_unavailable()


def test_a_kernel_that_is_not_in_the_object(objects):
    engine = exp_half().engine(object=objects["look_up"])
    assert "kernel 'exp_half' is not in it" in engine.why_unavailable()


def test_another_machine_is_a_cpu_mismatch(objects):
    data = bytearray(objects["exp_half"])
    struct.pack_into("<H", data, 18, 0x1234)  # e_machine
    engine = exp_half().engine(object=bytes(data))
    assert engine.try_execute([torch.randn(2, 2)]) is None
    assert engine.stats()["cpu_mismatch"] == 1


def test_damaged_objects_are_refused_and_never_crash(objects):
    """Every truncation and many flipped header bytes: available or not, loading must survive."""
    data = objects["exp_half"]
    for size in range(1, len(data), 7):
        assert exp_half().engine(object=data[:size]).why_unavailable() != ""
    for position in range(len(data)):
        if position in range(64) or position > len(data) * 2 // 3:
            broken = bytearray(data)
            broken[position] ^= 0xFF
            exp_half().engine(object=bytes(broken)).why_unavailable()


def test_an_archive_of_several_objects(objects):
    data = archive({name: objects[name] for name in ("look_up", "exp_half")})
    engine = exp_half().engine(object=data)
    x = torch.randn(3, 5)
    [y] = engine.try_execute([x])
    [alone] = exp_half().engine(object=objects["exp_half"]).try_execute([x])
    assert torch.equal(y, alone)
    engine = exp_half().engine(object=archive({"look_up": objects["look_up"]}))
    assert "kernel 'exp_half' is not in it" in engine.why_unavailable()


def test_damaged_archives_are_refused_and_never_crash(objects):
    data = archive({"exp_half": objects["exp_half"]})
    head = 8 + 60 + len("exp_half/\n") + 60
    for size in [*range(1, head + 64), *range(head + 64, len(data) - 1, 7)]:
        assert exp_half().engine(object=data[:size]).why_unavailable() != ""
    for position in range(head):
        broken = bytearray(data)
        broken[position] ^= 0xFF
        exp_half().engine(object=bytes(broken)).why_unavailable()
