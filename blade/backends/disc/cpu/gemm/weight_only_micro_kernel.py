# SPDX-License-Identifier: Apache-2.0
"""The micro-kernels of weight-only products: narrow weights are widened to floats in registers.

    C[r, j] = init[r, j] + scales[j] * sum_k A[r, k] * B[k, j]

B is stored in panels of bytes: ``panel[k][j]`` with 8 bits; with 4 bits, one byte holds two rows of a column,
the even row in the lower half. Products with few rows are bound by memory, and read a quarter or an eighth of
the bytes of floats.
"""

from dataclasses import dataclass

from blade.backends.disc.cpu.emit.mlir_builder import SsaValue
from blade.backends.disc.cpu.emit.mlir_function import POINTER, Carry, MlirRoutine
from blade.backends.disc.cpu.gemm.driver import PanelTiling, joined
from blade.backends.disc.cpu.gemm.micro_kernel import MicroKernelTile

_CHAINS = 8
_BODY = 24
_AHEAD = 16 * 1024  # bytes of the panel
_LINE = 64

TILE_POINTERS = ("a", "b", "scales", "init", "c")
TILE_NUMBERS = ("lda", "k", "ldi", "ldc", "columns")


@dataclass(frozen=True)
class WeightOnlySpec:
    """``bits``: 8 or 4 per weight."""

    bits: int
    tiles: PanelTiling

    @property
    def name(self) -> str:
        return f"widen{self.bits}_gemm{self.tiles.lanes}" + "".join(
            f"_edge{e}" for e in self.tiles.edges
        )

    @property
    def rows_of_byte(self) -> int:
        """Rows of B that share a byte."""
        return 8 // self.bits


def micro_kernel(form: WeightOnlySpec, tile: MicroKernelTile, name: str) -> MlirRoutine:
    """One tile over ``k`` rows of a panel, a multiple of ``rows_of_byte``."""
    return _WeightOnlyMicroKernel(form, tile, name).emit()


class _WeightOnlyMicroKernel:
    def __init__(self, form: WeightOnlySpec, tile: MicroKernelTile, name: str) -> None:
        self.form, self.tile, self.lanes = form, tile, form.tiles.lanes
        numbers = ((n, "i64") for n in TILE_NUMBERS)
        arguments = [*((p, POINTER) for p in TILE_POINTERS), *numbers]
        self.f = MlirRoutine(name, arguments, self.lanes)
        self.cells = [(r, v) for r in range(tile.rows) for v in range(tile.vectors)]

    def emit(self) -> MlirRoutine:
        f, count, per = self.f, len(self.cells), self.form.rows_of_byte
        chains = 1 << (-(-_CHAINS // count) - 1).bit_length()
        steps = chains * max(1, _BODY // (chains * count * per))
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
        """``steps`` rows of bytes from the loop's index on; step u adds to chain u."""
        f, count, per = self.f, len(self.cells), self.form.rows_of_byte
        values, chains, width = list(loop.values), len(loop.values) // count, self.form.tiles.width
        panel = f.at(f["b"], f.product(loop.index, width), "i8")
        for u in range(steps):
            here = f.product(f.sum(loop.index, u), per)
            b = [
                self._widened(f.get(panel, u * width + v * self.lanes, "i8", self.lanes))
                for v in range(self.tile.vectors)
            ]
            for half in range(per):
                for r in range(self.tile.rows):
                    a = f.broadcast(f.get(self.rows[r], f.sum(here, half)), self.lanes)
                    for v in range(self.tile.vectors):
                        k = (u % chains) * count + r * self.tile.vectors + v
                        values[k] = f.fma(a, b[v][half], values[k])
        loop.next(values)

    def _widened(self, raw: SsaValue) -> list[SsaValue]:
        """A vector of bytes as floats, one vector per row that it holds."""
        f, x = self.f, self.f.convert("arith.extsi", raw, "i32")
        if self.form.bits == 8:
            return [f.convert("arith.sitofp", x, "f32")]
        top = f.apply("arith.shli", x, f.like(28, x))
        halves = (
            f.apply("arith.shrsi", top, f.like(28, x)),
            f.apply("arith.shrsi", x, f.like(4, x)),
        )
        return [f.convert("arith.sitofp", half, "f32") for half in halves]

    def _prefetch(self, row: SsaValue, steps: int) -> None:
        """Prefetch later lines, at a distance that covers the latency of memory."""
        f, width = self.f, self.form.tiles.width
        panel = f.at(f["b"], f.product(row, width), "i8")
        for offset in range(0, steps * width, _LINE):
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
