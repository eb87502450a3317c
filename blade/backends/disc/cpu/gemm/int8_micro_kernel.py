# SPDX-License-Identifier: Apache-2.0
"""The micro-kernels of int8 products: a register tile of 32-bit sums, converted to floats at the end.

    C[r, j] = (sum_k A[r, k] * B[k, j] - zero[r] * sums[j]) * (scales[j] * scale[r]) + bias[j]

A holds unsigned bytes; its rows are read in place, four bytes (one broadcast) at a time. B is a packed panel
with four rows interleaved, ``panel[k / 4][j][k % 4]``, zero beyond k and n. The sums are exact.

A convolution's rows consist of one piece per tap, each of k bytes, a multiple of four. A table of pointers,
``table[tap][r]``, locates them (pixel_pointers.py). The panel holds all taps one after the other.
"""

from dataclasses import dataclass

from blade.backends.disc.cpu.emit.int8_dot import QUAD, Int8Dot
from blade.backends.disc.cpu.emit.mlir_builder import SsaValue
from blade.backends.disc.cpu.emit.mlir_function import POINTER, Carry, MlirRoutine
from blade.backends.disc.cpu.gemm.driver import PanelTiling, joined
from blade.backends.disc.cpu.gemm.int8_epilogue import FLOATS, Int8Epilogue, finish_text
from blade.backends.disc.cpu.gemm.micro_kernel import MicroKernelTile

# As in the fp32 micro-kernels: independent sums, instructions per loop body, prefetch distance in steps.
_CHAINS = 8
_BODY = 24
_AHEAD = 64

ROW_FACTORS = ("none", "scale", "scale_zero")
"""Factors that each row of A has; all other factors are in the packed constants."""


@dataclass(frozen=True)
class Int8KernelSpec:
    """The code of an int8 product: the target's instructions, its tiles, the factors of rows.

    ``in_taps``: rows consist of pieces, as in a convolution.
    """

    dot: Int8Dot
    tiles: PanelTiling
    rows: str
    in_taps: bool = False
    epilogue: Int8Epilogue = FLOATS

    @property
    def row_pointers(self) -> tuple[str, ...]:
        return {"none": (), "scale": ("scale",), "scale_zero": ("scale", "zero")}[self.rows]

    @property
    def name(self) -> str:
        kind = "conv" if self.in_taps else "gemm"
        name = f"int8_{kind}_{self.dot.how}{self.dot.lanes}_{self.rows}"
        return name + self.epilogue.name + "".join(f"_edge{e}" for e in self.tiles.edges)

    @property
    def pointers(self) -> tuple[str, ...]:
        """Pointer arguments of a tile and of a whole product."""
        rows = "table" if self.in_taps else "a"
        return (
            rows,
            "b",
            "sums",
            "scales",
            "bias",
            *self.row_pointers,
            *self.epilogue.pointers,
            "c",
        )

    @property
    def numbers(self) -> tuple[str, ...]:
        """Numbers of a tile. ``pitch``: stride of the table's taps; ``start``: offset in the data."""
        rows = ("pitch", "taps", "start") if self.in_taps else ("lda",)
        return (*rows, "k", "ldc", "columns", *self.epilogue.numbers)

    @property
    def finish(self) -> str:
        """The name of the function that finishes a tile, unless the epilogue is plain."""
        return f"{self.name}_finish"

    def finish_text(self) -> str:
        """MLIR of that function."""
        plain = self.epilogue.is_plain
        return "" if plain else finish_text(self.epilogue, self.finish, self.dot.lanes) + "\n"


def micro_kernel(form: Int8KernelSpec, tile: MicroKernelTile, name: str) -> MlirRoutine:
    """One tile; ``sums``, ``scales`` and ``bias`` start at its column, ``scale`` and ``zero`` at its row."""
    return _Int8MicroKernel(form, tile, name).emit()


class _Int8MicroKernel:
    def __init__(self, form: Int8KernelSpec, tile: MicroKernelTile, name: str) -> None:
        self.form, self.dot, self.tile = form, form.dot, tile
        numbers = ((n, "i64") for n in form.numbers)
        arguments = [*((p, POINTER) for p in form.pointers), *numbers]
        self.f = MlirRoutine(name, arguments, form.dot.lanes)
        self.cells = [(r, v) for r in range(tile.rows) for v in range(tile.vectors)]

    def emit(self) -> MlirRoutine:
        f, count = self.f, len(self.cells)
        if not self.form.epilogue.is_plain:
            self.stack = f.stack(self.tile.rows * self.dot.width)
        chains = 1 << (-(-_CHAINS // count) - 1).bit_length()
        values = [f.constant(0, "i32", self.dot.lanes)] * (chains * count)
        heights = range(self.tile.rows)
        if self.form.in_taps:
            piece = f.product(f.over(f["k"], QUAD), self.dot.width)
            with f.carrying(f.whole(0), f["taps"], 1, values) as taps:
                row = f.at(f["table"], f.product(taps.index, f["pitch"]), POINTER)
                self.rows = [f.at(f.get(row, r, POINTER), f["start"], "i8") for r in heights]
                panel = f.at(f["b"], f.product(taps.index, piece), "i32")
                taps.next(self._depth(panel, taps.values))
            values = taps.results
        else:
            self.rows = [f.at(f["a"], f.product(f["lda"], r), "i8") for r in heights]
            values = self._depth(f["b"], values)
        self._finish(joined(self.f, values, len(self.cells)))
        return f

    def _depth(self, panel: SsaValue, values: list[SsaValue]) -> list[SsaValue]:
        """``values`` plus all products of one piece."""
        f, count = self.f, len(self.cells)
        chains = len(values) // count
        steps = chains * max(1, _BODY // (chains * count))
        whole, quads = f.over(f["k"], QUAD), f.above(f["k"], QUAD)
        even = f.floor_to(whole, steps)
        with f.carrying(f.whole(0), even, steps, values) as loop:
            self._prefetch(panel, loop.index, steps)
            self._steps(loop, panel, steps)
        with f.carrying(even, whole, 1, loop.results) as loop:
            self._steps(loop, panel, 1)
        if not self.form.in_taps:
            with f.carrying(whole, quads, 1, loop.results) as loop:  # at most one round
                self._steps(loop, panel, 1, at_end=True)
        return loop.results

    def _steps(self, loop: Carry, start: SsaValue, steps: int, at_end: bool = False) -> None:
        """``steps`` quads of k from the loop's index on; step u adds to chain u."""
        f, dot, count = self.f, self.dot, len(self.cells)
        values, chains = list(loop.values), len(loop.values) // count
        panel = f.at(start, f.product(loop.index, dot.width), "i32")
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

    def _quad(self, r: int, quad: SsaValue, at_end: bool) -> SsaValue:
        """Bytes 4 * quad to 4 * quad + 3 of row ``r`` as one i32; at the end, only existing bytes."""
        f, first = self.f, self.f.product(quad, QUAD)
        if not at_end:
            at = f.at(self.rows[r], first, "i8")
            return f.op(f"llvm.load {at.name} {{alignment = 1 : i64}} : !llvm.ptr -> i32", "i32", 1)
        total = f.constant(0, "i32")
        for j in range(QUAD - 1):  # bytes beyond k are multiplied by zeros of the panel
            here = f.least(f.sum(first, j), f.minus(f["k"], 1))
            byte = f.convert("arith.extui", f.get(self.rows[r], here, "i8"), "i32")
            by = f.constant(8 * j, "i32")
            total = f.apply("arith.ori", total, f.apply("arith.shli", byte, by))
        return total

    def _prefetch(self, start: SsaValue, quad: SsaValue, steps: int) -> None:
        """Prefetch the part of the panel that is read ``_AHEAD`` steps later; the next panel follows it."""
        f, width = self.f, self.dot.width
        panel = f.at(start, f.product(quad, width), "i32")
        for offset in range(0, steps * width, 16):
            f.prefetch(f.at(panel, _AHEAD * width + offset, "i32"))

    def _finish(self, sums: list[SsaValue]) -> None:
        if not self.form.epilogue.is_plain:
            self._finish_apart(sums)
            return
        f, lanes, last = self.f, self.dot.lanes, self.tile.vectors - 1
        epilogue = self.form.epilogue
        element = epilogue.element
        mask = None
        if self.tile.masked:
            mask = f.first_lanes(f.minus(f["columns"], last * lanes))
        for (r, v), acc in zip(self.cells, sums, strict=True):
            to = f.at(f.at(f["c"], f.product(f["ldc"], r), element), v * lanes, element)
            value = self._dequantized(r, v * lanes, acc)
            value = epilogue.quantized(f, value) if epilogue.to_bytes else value
            if mask is not None and v == last:
                f.store_masked(value, to, mask)
            else:
                f.store(value, to)

    def _finish_apart(self, sums: list[SsaValue]) -> None:
        """Call the function that finishes a tile; all tiles share it."""
        f, lanes, epilogue = self.f, self.dot.lanes, self.form.epilogue
        assert self.form.rows == "none", self.form
        for (r, v), acc in zip(self.cells, sums, strict=True):
            off = f.get(f["sums"], v * lanes, "i32", lanes)
            exact = f.convert("arith.sitofp", f.sub(acc, off), "f32")
            f.put(exact, self.stack, r * self.dot.width + v * lanes)
        given = {n: f[n] for n in ("scales", "bias", "c", "ldc", "columns")}
        given |= {n: f[n] for n in (*epilogue.pointers, *epilogue.numbers)}
        given |= {"sums": self.stack, "pitch": f.whole(self.dot.width)}
        f.run(epilogue.signature(self.form.finish), **given, rows=f.whole(self.tile.rows))

    def _dequantized(self, r: int, column: int, acc: SsaValue) -> SsaValue:
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
