# SPDX-License-Identifier: Apache-2.0
"""The micro-kernels of int8 products: a tile of 32-bit sums in registers, floats at the end.

    C[r, j] = (sum_k A[r, k] * B[k, j] - zero[r] * sums[j]) * (scales[j] * scale[r]) + bias[j]

A is unsigned bytes, its rows read in place, four bytes (one broadcast) at a time; B comes from a packed
panel with four rows interleaved, ``panel[k / 4][j][k % 4]``, zero beyond k and n. The sums are exact.
"""

from dataclasses import dataclass

from blade.backends.disc.cpu.code import Value
from blade.backends.disc.cpu.dot import QUAD, Dot
from blade.backends.disc.cpu.function import Carry
from blade.backends.disc.cpu.gemm_driver import Tiling
from blade.backends.disc.cpu.micro_kernel import Tile
from blade.backends.disc.cpu.routine import POINTER, Routine

# As for the fp32 micro-kernels: sums under way at once, instructions in the loop's body, steps ahead.
_CHAINS = 8
_BODY = 24
_AHEAD = 64

ROW_FACTORS = ("none", "scale", "scale_zero")
"""What a row of A has of its own; the rest is in the packed constants."""


@dataclass(frozen=True)
class Int8Form:
    """The code of products: the target's instructions, its tiles, what rows have of their own."""

    dot: Dot
    tiles: Tiling
    rows: str

    @property
    def row_pointers(self) -> tuple[str, ...]:
        return {"none": (), "scale": ("scale",), "scale_zero": ("scale", "zero")}[self.rows]

    @property
    def name(self) -> str:
        name = f"int8_gemm_{self.dot.how}{self.dot.lanes}_{self.rows}"
        return name + "".join(f"_edge{e}" for e in self.tiles.edges)

    @property
    def pointers(self) -> tuple[str, ...]:
        """Of the whole and of a tile."""
        return ("a", "b", "sums", "scales", "bias", *self.row_pointers, "c")


def micro_kernel(form: Int8Form, tile: Tile, name: str) -> Routine:
    """One tile; ``sums``, ``scales`` and ``bias`` start at its first column, ``scale`` and ``zero`` at its row."""
    return _MicroKernel(form, tile, name).emit()


class _MicroKernel:
    def __init__(self, form: Int8Form, tile: Tile, name: str) -> None:
        self.form, self.dot, self.tile = form, form.dot, tile
        numbers = ((n, "i64") for n in ("lda", "k", "ldc", "columns"))
        arguments = [*((p, POINTER) for p in form.pointers), *numbers]
        self.f = Routine(name, arguments, form.dot.lanes)
        self.cells = [(r, v) for r in range(tile.rows) for v in range(tile.vectors)]

    def emit(self) -> Routine:
        f, count = self.f, len(self.cells)
        chains = 1 << (-(-_CHAINS // count) - 1).bit_length()
        steps = chains * max(1, _BODY // (chains * count))
        self.rows = [f.at(f["a"], f.product(f["lda"], r), "i8") for r in range(self.tile.rows)]
        whole, quads = f.over(f["k"], QUAD), f.above(f["k"], QUAD)
        even = f.floor_to(whole, steps)
        start = [f.constant(0, "i32", self.dot.lanes)] * (chains * count)
        with f.carrying(f.whole(0), even, steps, start) as loop:
            self._prefetch(loop.index, steps)
            self._steps(loop, steps)
        sums = self._joined(loop.results)
        with f.carrying(even, whole, 1, sums) as loop:
            self._steps(loop, 1)
        with f.carrying(whole, quads, 1, loop.results) as loop:  # once, where k is no multiple of 4
            self._steps(loop, 1, at_end=True)
        self._finish(loop.results)
        return f

    def _steps(self, loop: Carry, steps: int, at_end: bool = False) -> None:
        """``steps`` quads of k from the loop's index on; sums of step u go to chain u."""
        f, dot, count = self.f, self.dot, len(self.cells)
        values, chains = list(loop.values), len(loop.values) // count
        panel = f.at(f["b"], f.product(loop.index, dot.width), "i32")
        for u in range(steps):
            b = [
                dot.widened(f, f.get(panel, u * dot.width + v * dot.lanes, "i32", dot.lanes))
                for v in range(self.tile.vectors)
            ]
            for r in range(self.tile.rows):
                a = dot.spread(f, self._quad(r, f.sum(loop.index, u), at_end))
                for v in range(self.tile.vectors):
                    k = (u % chains) * count + r * self.tile.vectors + v
                    values[k] = dot.add(f, values[k], a, b[v])
        loop.next(values)

    def _quad(self, r: int, quad: Value, at_end: bool) -> Value:
        """Bytes 4 * quad to 4 * quad + 3 of row ``r`` as one i32; at the end only those that exist."""
        f, first = self.f, self.f.product(quad, QUAD)
        if not at_end:
            at = f.at(self.rows[r], first, "i8")
            return f.op(f"llvm.load {at.name} {{alignment = 1 : i64}} : !llvm.ptr -> i32", "i32", 1)
        total = f.constant(0, "i32")
        for j in range(QUAD - 1):  # what lies beyond k meets zeros in the panel
            here = f.least(f.sum(first, j), f.minus(f["k"], 1))
            byte = f.convert("arith.extui", f.get(self.rows[r], here, "i8"), "i32")
            by = f.constant(8 * j, "i32")
            total = f.apply("arith.ori", total, f.apply("arith.shli", byte, by))
        return total

    def _prefetch(self, quad: Value, steps: int) -> None:
        """The part of the panel that is read ``_AHEAD`` steps later; behind a panel lies the next."""
        f, width = self.f, self.dot.width
        panel = f.at(f["b"], f.product(quad, width), "i32")
        for offset in range(0, steps * width, 16):
            f.prefetch(f.at(panel, _AHEAD * width + offset, "i32"))

    def _joined(self, values: list[Value]) -> list[Value]:
        while len(values) > len(self.cells):
            half = len(values) // 2
            pairs = zip(values[:half], values[half:], strict=True)
            values = [self.f.add(a, b) for a, b in pairs]
        return values

    def _finish(self, sums: list[Value]) -> None:
        f, lanes, last = self.f, self.dot.lanes, self.tile.vectors - 1
        mask = None
        if self.tile.masked:
            mask = f.first_lanes(f.minus(f["columns"], last * lanes))
        for (r, v), acc in zip(self.cells, sums, strict=True):
            to = f.at(f.at(f["c"], f.product(f["ldc"], r)), v * lanes)
            value = self._dequantized(r, v * lanes, acc)
            if mask is not None and v == last:
                f.store_masked(value, to, mask)
            else:
                f.store(value, to)

    def _dequantized(self, r: int, column: int, acc: Value) -> Value:
        f, lanes = self.f, self.dot.lanes
        off = f.get(f["sums"], column, "i32", lanes)
        scales = f.get(f["scales"], column, "f32", lanes)
        if "zero" in self.form.row_pointers:
            zero = f.get(f["zero"], r, "i32")
            if self.dot.offset:
                zero = f.sub(zero, f.constant(self.dot.offset, "i32"))
            off = f.mul(off, f.broadcast(zero, lanes))
        if "scale" in self.form.row_pointers:
            scales = f.mul(scales, f.broadcast(f.get(f["scale"], r), lanes))
        exact = f.convert("arith.sitofp", f.sub(acc, off), "f32")
        return f.fma(exact, scales, f.get(f["bias"], column, "f32", lanes))
