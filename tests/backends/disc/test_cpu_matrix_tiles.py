# SPDX-License-Identifier: Apache-2.0
"""Products by matrix tiles (AMX), on this CPU where it has them.

Elsewhere loops of this file compute what the tiles would, so that everything around them is tested; and the machine
code of the tiles is looked at.
"""

import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from shutil import which

import pytest
import torch
from disc_programs import S0, S1, S2, add_input, compile_to_engine, finish, new_builder
from test_cpu_bf16_attention import SIZES, engine_of
from test_cpu_bf16_attention import check as check_attention
from test_cpu_bf16_conv import Shape
from test_cpu_bf16_conv import check as check_conv
from test_cpu_bf16_gemm import check, check_linear, linear_engine, numbers
from test_cpu_bf16_gemm import run as run_bf16
from test_cpu_int8_conv import check_sizes, conv_engine
from test_cpu_int8_gemm import bytes_of, check_integers, int8_engine, plain_engine, run

from blade.backends.disc.cpu.attention import bf16_matrix
from blade.backends.disc.cpu.attention import kernel as attention
from blade.backends.disc.cpu.compile.llvm import compile_kernel
from blade.backends.disc.cpu.conv import bf16_conv
from blade.backends.disc.cpu.emit import matrix_tiles
from blade.backends.disc.cpu.emit.bf16_dot import bf16_dot
from blade.backends.disc.cpu.emit.int8_dot import int8_dot
from blade.backends.disc.cpu.emit.mlir_builder import SsaValue
from blade.backends.disc.cpu.emit.mlir_function import POINTER, MlirRoutine
from blade.backends.disc.cpu.gemm import bf16_gemm, bf16_matmul
from blade.backends.disc.cpu.gemm.driver import tiling
from blade.backends.disc.cpu.gemm.int8_gemm import gemm_text as int8_text
from blade.backends.disc.cpu.gemm.int8_micro_kernel import Int8KernelSpec
from blade.backends.disc.target.cpu import CpuTarget, host

pytestmark = [
    pytest.mark.needs("torch_mlir"),
    pytest.mark.skipif(not host().has_bf16_products, reason="the vector kernels beside the tiles"),
]

BF16, F32 = torch.bfloat16, torch.float32
XEON = CpuTarget(
    tuple("avx512f avx512bw avx512dq avx512vl avx512_vnni avx512_bf16".split())
    + ("amx_tile", "amx_bf16", "amx_int8"),
    16,
)
# too few for tiles of bytes; one tile of rows, whole and not; two; several groups of 32
ROWS = (0, 1, 3, 4, 15, 16, 17, 31, 32, 33, 47, 49, 97, 300)


class Tiled(CpuTarget):
    """A CPU that is said to have matrix tiles."""

    @property
    def has_bf16_tiles(self) -> bool:
        return True

    @property
    def has_int8_tiles(self) -> bool:
        return True


class Loops(matrix_tiles._Sums):
    """The same sums, unit by unit."""

    def emit(self) -> MlirRoutine:
        f, form = self.f, self.form
        f.features = ""
        units = f.over(f["k"], form.per)
        whole = f.floor_to(units, form.dot.step)
        with f.range(0, f["rows"]) as r:
            for v in range(form.columns):
                at = f.sum(f.product(r, self.width), v * form.dot.lanes)
                total = self._sum(r, v * form.dot.lanes, units, whole)
                if form.adds:
                    total = f.add(total, f.get(f["to"], at, total.element, total.lanes))
                f.put(total, f["to"], at)
        return f

    def _sum(self, r: SsaValue, column: int, units: SsaValue, whole: SsaValue) -> SsaValue:
        f, form, dot = self.f, self.form, self.form.dot
        taps = f["taps"] if form.in_taps else f.whole(1)
        with f.carrying(f.whole(0), taps, 1, [dot.nothing(f)]) as tap:
            if form.in_taps:
                table = f.at(f["table"], f.product(tap.index, f["pitch"]), POINTER)
                row = f.at(f.get(table, r, POINTER), f["start"], form.element)
            else:
                row = f.at(f["a"], f.product(r, f["lda"]), form.element)
            panel = f.at(f["b"], f.product(tap.index, units, self.width), "i32")
            with f.carrying(f.whole(0), whole, 1, tap.values) as unit:
                b = f.get(f.at(panel, f.product(unit.index, self.width), "i32"), column, "i32", 16)
                a = dot.spread(f, f.get(row, unit.index, "i32"))
                unit.next([dot.add(f, unit.values[0], a, dot.widened(f, b))])
            tap.next(unit.results)
        return tap.results[0]


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Iterator[CpuTarget]:
    """A CPU with matrix tiles: this one, or one whose tiles are loops."""
    if host().has_bf16_tiles and host().has_int8_tiles:
        yield host()
        return
    monkeypatch.setattr(matrix_tiles, "_Sums", Loops)
    for module in (matrix_tiles, bf16_matrix):
        monkeypatch.setattr(module, "configured", lambda f, dot: nullcontext())
    caches = (
        *(bf16_gemm.gemm_text, bf16_matmul.matmul_text),
        *(bf16_conv.conv_text, attention.bf16_text),
    )
    for texts in caches:
        texts.cache_clear()
    yield Tiled(host().isa, host().lanes)
    for texts in caches:
        texts.cache_clear()


@pytest.mark.parametrize("depth", [1, 28, 31, 32, 64, 80, 99, 800])
@pytest.mark.parametrize("columns", [1, 32, 50])
def test_bf16_weights(target: CpuTarget, depth: int, columns: int) -> None:
    weight, bias = numbers(columns, depth, dtype=F32), numbers(columns, seed=1, dtype=F32)
    engine = linear_engine(weight, bias, BF16, target)
    assert "_tiles_" in engine.program()
    for rows in ROWS:
        check_linear(engine, weight, bias, rows)


def test_two_computed_matrices(target: CpuTarget) -> None:
    b = new_builder()
    x, y = add_input(b, (S0, S1, S2), BF16), add_input(b, (S0, S2, 50), BF16)
    engine = compile_to_engine(finish(b, b.make("matmul", [x, y], (S0, S1, 50), BF16)), target)
    for m, k in ((1, 64), (5, 31), (33, 70), (200, 128)):
        x, y = numbers(2, m, k), numbers(2, k, 50, seed=1)
        check(run_bf16(engine, x, y), x, y, None)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(64, 64, (1, 1), padding=0),
        Shape(32, 65),
        Shape(3, 64, (7, 7), 2, 3),
        Shape(20, 40),
        Shape(100, 48, activation="relu", residual=F32),
        Shape(200, 40, (3, 3), 2, 2, dilation=2),
    ],
)
def test_bf16_convolutions(target: CpuTarget, shape: Shape) -> None:
    check_conv(shape, BF16, BF16, target)


@pytest.mark.parametrize("bias", ["", "full", "by key"])
def test_attention(target: CpuTarget, bias: str) -> None:
    engine = engine_of(BF16, bias, bias == "", target)
    assert "_tiles" in attention.bf16_text(target, "i16")
    more = ((1, 2, 31, 33, 32, 40), (1, 1, 70, 530, 96, 16), (2, 1, 16, 47, 64, 80))
    for sizes in (*SIZES, *more):
        check_attention(engine, sizes, bias, bias == "", 2.0**-7)


@pytest.mark.parametrize("depth", [3, 64, 65, 192, 900])
def test_bytes(target: CpuTarget, depth: int) -> None:
    """The integers are exact."""
    weight = bytes_of(70, depth, dtype=torch.int8, seed=depth)
    engine = plain_engine(weight, target, zero=128)
    assert "_tiles_" in engine.program()
    for rows in ROWS:
        check_integers(engine, weight, rows, 128)


def test_factors_of_rows(target: CpuTarget) -> None:
    weight = bytes_of(40, 128, dtype=torch.int8)
    scales, bias = torch.rand(40), torch.randn(40)
    engine = int8_engine(weight, scales, bias, target, "scale and zero")
    x = bytes_of(1, 75, 128, dtype=torch.uint8, seed=1)
    factors = torch.rand(1, 75, 1)
    zeros = torch.randint(0, 256, (1, 75, 1), dtype=torch.int32)
    sums = (x.long() - zeros.long()) @ weight.long().t()
    exact = sums.double() * (scales.double() * factors.double()) + bias.double()
    found = run(engine, x, factors, zeros)
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-4)


def test_int8_convolutions(target: CpuTarget) -> None:
    for channels, kernel in ((64, 3), (128, 1), (132, 2)):
        weight = bytes_of(48, channels, kernel, kernel, dtype=torch.int8, seed=channels)
        engine_and_more = conv_engine(weight, padding=kernel // 2, zero=9, target=target)
        check_sizes(*engine_and_more, channels)


def words_in_code(functions: Sequence[MlirRoutine], path: Path) -> Counter[str]:
    """How often each word occurs in the machine code of ``functions``, of any CPU."""
    tool = which("objdump") or which("llvm-objdump")
    if tool is None:
        pytest.skip("no disassembler")
    text = "\n".join(f.text(False) for f in functions)
    path.write_bytes(compile_kernel(functions[0].name, text))
    found = subprocess.run([tool, "-d", path], capture_output=True, text=True, check=True)
    return Counter(found.stdout.split())


INSTRUCTIONS = ("ldtilecfg", "tileloadd", "tilestored", "tilerelease")


@pytest.mark.parametrize("in_taps", [False, True])
@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_the_machine_code(kind: str, in_taps: bool, tmp_path: Path) -> None:
    """Compiling needs no CPU that can run it: the functions name their features."""
    dot = bf16_dot(XEON) if kind == "bf16" else int8_dot(XEON)
    element, per = ("i16", 2) if kind == "bf16" else ("i8", 4)
    made = matrix_tiles.matrix_tiles("f", dot, per, element, in_taps)
    assert made is not None
    code = words_in_code(made.functions, tmp_path / "kernel.o")
    # 2 + 4 products, 3 + 4 loads, 2 + 4 stores: no sum ever leaves its register. Each configures fewer rows than 16,
    # and the 16 again.
    assert code[{"bf16": "tdpbf16ps", "int8": "tdpbusd"}[kind]] == 6
    assert [code[word] for word in INSTRUCTIONS] == [4, 7, 6, 0]


def test_the_machine_code_around_them(tmp_path: Path) -> None:
    f = MlirRoutine("f")
    with matrix_tiles.configured(f, bf16_dot(XEON)):
        f.put(f.whole(0), f["ptrs"])
    code = words_in_code([f], tmp_path / "kernel.o")
    assert [code[word] for word in INSTRUCTIONS] == [1, 0, 0, 1]


def test_the_machine_code_of_attention(tmp_path: Path) -> None:
    form = matrix_tiles.TileSums(bf16_dot(XEON), 2, "i16", 2, None, adds=True)
    code = words_in_code([form.function("f", 2)], tmp_path / "kernel.o")
    assert [code[word] for word in ("tdpbf16ps", *INSTRUCTIONS)] == [4, 2, 8, 4, 0]


@pytest.mark.parametrize(
    ("units", "step"), [(0, 16), (3, 3), (14, 14), (16, 16), (40, 10), (48, 16), (51, 16), (34, 16)]
)
def test_steps(units: int, step: int) -> None:
    """A depth consists of its steps, unless these were less than half a tile."""
    assert matrix_tiles.step_of(units) == step
    assert matrix_tiles.in_steps(bf16_dot(XEON), units).step == step
    vectors = bf16_dot(CpuTarget((), 4))
    assert matrix_tiles.in_steps(vectors, units) == vectors  # one name, and code, for any depth


def test_other_cpus_have_no_tiles() -> None:
    dot = int8_dot(CpuTarget((), 4))
    form = Int8KernelSpec(dot, tiling(70, dot.rows, dot.vectors, dot.lanes), "none")
    assert "before" not in int8_text(form)
    assert matrix_tiles.matrix_tiles("f", dot, 4, "i8", False) is None
