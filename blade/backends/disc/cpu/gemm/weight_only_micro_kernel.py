# SPDX-License-Identifier: Apache-2.0
"""The micro-kernels of weight-only products: narrow weights are widened to floats in registers.

    C[r, j] = init[r, j] + scales[j] * sum_k A[r, k] * (B[k, j] - zeros[j])

B is stored in panels of units, ``panel[unit][j]``. With 8 bits a unit is a byte, one row of a column; with 4 bits
it is a byte of two rows, or a word of eight where a lookup by the lanes' lower four bits is one instruction
(AVX-512): the first row in the lowest bits. Products with few rows are bound by memory, and read a quarter or an
eighth of the bytes of floats.
"""

from dataclasses import dataclass

from blade.backends.disc.cpu.emit.mlir_builder import SsaValue
from blade.backends.disc.cpu.emit.mlir_function import POINTER, Carry, MlirRoutine
from blade.backends.disc.cpu.gemm.driver import PanelTiling, joined
from blade.backends.disc.cpu.gemm.micro_kernel import MicroKernelTile
from blade.backends.disc.target.cpu import CpuTarget

_CHAINS = 8
_BODY = 24
_AHEAD = 16 * 1024  # bytes of the panel
_LINE = 64

_LOOKUP = "llvm.x86.avx512.permvar.sf.512"
NIBBLE = 4  # bits

TILE_POINTERS = ("a", "b", "scales", "zeros", "init", "c")
TILE_NUMBERS = ("lda", "k", "ldi", "ldc", "columns")


@dataclass(frozen=True)
class WeightOnlySpec:
    """``bits``: 8 or 4 per weight; ``rows``: of B that share a unit; ``has_zeros``: whether zero points are read."""

    bits: int
    tiles: PanelTiling
    rows: int
    has_zeros: bool = False

    @property
    def name(self) -> str:
        edges = "".join(f"_edge{e}" for e in self.tiles.edges)
        kind = f"{'_words' * self.has_words}{'_zeros' * self.has_zeros}"
        return f"widen{self.bits}_gemm{self.tiles.lanes}{kind}{edges}"

    @property
    def has_words(self) -> bool:
        """Whether a unit is a word of 32 bits."""
        return self.rows * self.bits == 32

    @property
    def unit(self) -> str:
        """The type of a unit."""
        return f"i{self.rows * self.bits}"

    @property
    def unit_bytes(self) -> int:
        return self.rows * self.bits // 8


def rows_of_unit(bits: int, size: int, target: CpuTarget) -> int:
    """The rows of B in a unit, for groups of ``size`` rows."""
    has_lookup = target.lanes == 16 and "avx512f" in target.isa
    return 8 if bits == 4 and has_lookup and size % 8 == 0 else 8 // bits


def micro_kernel(form: WeightOnlySpec, tile: MicroKernelTile, name: str) -> MlirRoutine:
    """One tile over ``k`` rows of a panel, a multiple of ``form.rows``."""
    return _WeightOnlyMicroKernel(form, tile, name).emit()


class _WeightOnlyMicroKernel:
    def __init__(self, form: WeightOnlySpec, tile: MicroKernelTile, name: str) -> None:
        self.form, self.tile, self.lanes = form, tile, form.tiles.lanes
        numbers = ((n, "i64") for n in TILE_NUMBERS)
        arguments = [*((p, POINTER) for p in TILE_POINTERS), *numbers]
        self.f = MlirRoutine(name, arguments, self.lanes)
        self.cells = [(r, v) for r in range(tile.rows) for v in range(tile.vectors)]

    def emit(self) -> MlirRoutine:
        f, count, per = self.f, len(self.cells), self.form.rows
        chains = 1 << (-(-_CHAINS // count) - 1).bit_length()
        steps = chains * max(1, _BODY // (chains * count * per))
        self.zeros = [
            f.get(f["zeros"], v * self.lanes, "f32", self.lanes)
            for v in range(self.tile.vectors if self.form.has_zeros else 0)
        ]
        self.rows = [f.at(f["a"], f.product(f["lda"], r)) for r in range(self.tile.rows)]
        total = f.over(f["k"], per)
        even = f.floor_to(total, steps)
        start = [f.constant(0.0, "f32", self.lanes)] * (chains * count)
        with f.carrying(f.whole(0), even, steps, start) as loop:
            self._prefetch(loop.index, steps)
            self._steps(loop, steps)
        with f.carrying(even, total, 1, joined(f, loop.results, len(self.cells))) as loop:
            self._steps(loop, 1)
        self._finish(loop.results)
        return f

    def _steps(self, loop: Carry, steps: int) -> None:
        """``steps`` rows of units from the loop's index on; row k of B adds to chain k."""
        f, count, per = self.f, len(self.cells), self.form.rows
        values, chains, width = list(loop.values), len(loop.values) // count, self.form.tiles.width
        panel = f.at(f["b"], f.product(loop.index, width), self.form.unit)
        for u in range(steps):
            here = f.product(f.sum(loop.index, u), per)
            units = [
                f.get(panel, u * width + v * self.lanes, self.form.unit, self.lanes)
                for v in range(self.tile.vectors)
            ]
            for row in range(per):
                a = [f.broadcast(f.get(rows, f.sum(here, row)), self.lanes) for rows in self.rows]
                chain = (u * per + row) % chains
                for v, unit in enumerate(units):
                    b = self._widened(unit, row)
                    if self.form.has_zeros:
                        b = f.sub(b, self.zeros[v])
                    for r in range(self.tile.rows):
                        k = chain * count + r * self.tile.vectors + v
                        values[k] = f.fma(a[r], b, values[k])
        loop.next(values)

    def _widened(self, units: SsaValue, row: int) -> SsaValue:
        """Row ``row`` of a vector of units, as floats."""
        f = self.f
        if self.form.has_words:
            x = f.apply("arith.shrui", units, f.like(NIBBLE * row, units)) if row else units
            table = f.vector([n - 16 if n > 7 else n for n in range(16)], "f32")
            words = f'llvm.call_intrinsic "{_LOOKUP}"({table.name}, {x.name})'
            return f.op(f"{words} : ({table.type}, {x.type}) -> {table.type}", "f32", self.lanes)
        x = f.convert("arith.extsi", units, "i32")
        if self.form.bits == 4:
            if row == 0:
                x = f.apply("arith.shli", x, f.like(28, x))
            x = f.apply("arith.shrsi", x, f.like(4 if row else 28, x))
        return f.convert("arith.sitofp", x, "f32")

    def _prefetch(self, row: SsaValue, steps: int) -> None:
        """Prefetch later lines, at a distance that covers the latency of memory."""
        f, width = self.f, self.form.tiles.width
        panel = f.at(f["b"], f.product(row, width), self.form.unit)
        for offset in range(0, steps * width * self.form.unit_bytes, _LINE):
            f.prefetch(f.at(panel, _AHEAD + offset, "i8"))

    def _finish(self, sums: list[SsaValue]) -> None:
        f, last = self.f, self.tile.vectors - 1
        mask = None
        if self.tile.masked:
            mask = f.first_lanes(f.minus(f["columns"], last * self.lanes))
        for (r, v), acc in zip(self.cells, sums, strict=True):
            at = v * self.lanes
            scales = f.get(f["scales"], at, "f32", self.lanes)
            start, to = (
                f.at(f.at(f[name], f.product(f[distance], r)), at)
                for name, distance in (("init", "ldi"), ("c", "ldc"))
            )
            if mask is not None and v == last:
                f.store_masked(f.fma(acc, scales, f.load_masked(start, mask)), to, mask)
            else:
                f.store(f.fma(acc, scales, f.load(start, self.lanes)), to)
