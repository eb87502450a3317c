# SPDX-License-Identifier: Apache-2.0
"""The micro-kernels of int8 products: a register tile of 32-bit sums, converted to floats at the end.

    C[r, j] = (sum_k A[r, k] * B[k, j] - zero[r] * sums[j]) * (scales[j] * scale[r]) + bias[j]

A holds unsigned bytes. B is a packed panel with four rows interleaved, ``panel[k / 4][j][k % 4]``, zero beyond k
and n. The sums are exact. dot_micro_kernel.py has the loop over k.
"""

import functools
from dataclasses import dataclass

from blade.backends.disc.cpu.emit.int8_dot import QUAD, Int8Dot
from blade.backends.disc.cpu.emit.matrix_tiles import matrix_tiles
from blade.backends.disc.cpu.emit.mlir_builder import SsaValue
from blade.backends.disc.cpu.emit.mlir_function import POINTER, MlirRoutine
from blade.backends.disc.cpu.gemm.dot_micro_kernel import DotMicroKernel, begun
from blade.backends.disc.cpu.gemm.driver import MicroKernels, PanelTiling, micro_kernels
from blade.backends.disc.cpu.gemm.int8_epilogue import FLOATS, Int8Epilogue, finish_text
from blade.backends.disc.cpu.gemm.micro_kernel import MicroKernelTile

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

    def kernels(self) -> MicroKernels:
        """The functions that compute rows of a panel."""
        matrix = matrix_tiles(self.name, self.dot, QUAD, "i8", self.in_taps)
        return micro_kernels(self.name, self.tiles, functools.partial(micro_kernel, self), matrix)

    @property
    def row_pointers(self) -> tuple[str, ...]:
        return {"none": (), "scale": ("scale",), "scale_zero": ("scale", "zero")}[self.rows]

    @property
    def name(self) -> str:
        kind = "conv" if self.in_taps else "gemm"
        name = f"int8_{kind}_{self.dot.name}_{self.rows}"
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


class _Int8MicroKernel(DotMicroKernel):
    def __init__(self, form: Int8KernelSpec, tile: MicroKernelTile, name: str) -> None:
        self.form, self.dot = form, form.dot
        numbers = ((n, "i64") for n in form.numbers)
        arguments = [*((p, POINTER) for p in form.pointers), *numbers, *begun(form.dot, tile)]
        f = MlirRoutine(name, arguments, form.dot.lanes)
        super().__init__(f, form.dot, tile, QUAD, "i8", form.in_taps)

    def emit(self) -> MlirRoutine:
        if self.form.epilogue.is_plain:
            self._finish()
        else:
            self._finish_apart()
        return self.f

    def _finish(self) -> None:
        f, lanes, last = self.f, self.dot.lanes, self.tile.vectors - 1
        epilogue = self.form.epilogue
        element = epilogue.element
        mask = None
        if self.tile.masked:
            mask = f.first_lanes(f.minus(f["columns"], last * lanes))
        with self.finished() as cells:
            for (r, v), acc in cells:
                to = f.at(f.at(f["c"], f.product(f["ldc"], r), element), v * lanes, element)
                value = self._dequantized(r, v * lanes, acc)
                value = epilogue.quantized(f, value) if epilogue.to_bytes else value
                if mask is not None and v == last:
                    f.store_masked(value, to, mask)
                else:
                    f.store(value, to)

    def _finish_apart(self) -> None:
        """Call the function that finishes a tile; all tiles share it."""
        f, lanes, epilogue, width = self.f, self.dot.lanes, self.form.epilogue, self.dot.width
        assert self.form.rows == "none", self.form
        rows = f.whole(self.tile.rows) if self.tile.rows else f["rows"]
        exact = f.stack(self.tile.rows * width) if self.tile.rows else f["before"]
        with self.finished() as cells:
            for (r, v), acc in cells:
                off = f.get(f["sums"], v * lanes, "i32", lanes)
                value = f.convert("arith.sitofp", f.sub(acc, off), "f32")
                f.put(value, exact, f.sum(f.product(r, width), v * lanes))
        given = {n: f[n] for n in ("scales", "bias", "c", "ldc", "columns")}
        given |= {n: f[n] for n in (*epilogue.pointers, *epilogue.numbers)}
        given |= {"sums": exact, "pitch": f.whole(width)}
        f.run(epilogue.signature(self.form.finish), **given, rows=rows)

    def _dequantized(self, r: SsaValue | int, column: int, acc: SsaValue) -> SsaValue:
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
