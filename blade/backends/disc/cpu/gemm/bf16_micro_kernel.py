# SPDX-License-Identifier: Apache-2.0
"""The micro-kernels of bfloat16 products: a register tile of float32 sums.

    C[r, j] = clamp(sum_k A[r, k] * B[k, j] + bias[j] + residual[r, j], low, high)

B is a packed panel with two rows interleaved, ``panel[k / 2][j][k % 2]``, zero beyond k and n. The bias is float32;
C is float32, or bfloat16, rounded once at the end. dot_micro_kernel.py has the loop over k.
"""

import functools
from dataclasses import dataclass

import torch

from blade.backends.disc.cpu.emit.bf16_dot import PAIR, Bf16Dot
from blade.backends.disc.cpu.emit.element_types import decode
from blade.backends.disc.cpu.emit.matrix_tiles import matrix_tiles
from blade.backends.disc.cpu.emit.mlir_builder import SsaValue
from blade.backends.disc.cpu.emit.mlir_function import POINTER, MlirRoutine
from blade.backends.disc.cpu.gemm.dot_micro_kernel import DotMicroKernel, begun
from blade.backends.disc.cpu.gemm.driver import MicroKernels, PanelTiling, micro_kernels
from blade.backends.disc.cpu.gemm.micro_kernel import MicroKernelTile

POINTERS = ("a", "b", "bias", "c")
BOUNDS = ("low", "high")
"""Arguments of a clamped product: bits of floats."""


@dataclass(frozen=True)
class Bf16KernelSpec:
    """The code of a bfloat16 product: instructions, tiles, the element type of C (``f32`` or ``i16``).

    ``kind``: the product that the name begins with. ``in_taps``: rows consist of pieces, as in a convolution.
    ``residual``: the element type of what is added, "" without one. ``clamps``: whether results are clamped.
    """

    dot: Bf16Dot
    tiles: PanelTiling
    result: str
    kind: str = "gemm"
    in_taps: bool = False
    residual: str = ""
    clamps: bool = False

    @property
    def name(self) -> str:
        kind = f"bf16_{self.kind}_{self.dot.name}_{self.result}"
        after = f"_plus_{self.residual}" * bool(self.residual) + "_clamped" * self.clamps
        return kind + after + "".join(f"_edge{e}" for e in self.tiles.edges)

    def kernels(self) -> MicroKernels:
        """The functions that compute rows of a panel."""
        matrix = matrix_tiles(self.name, self.dot, PAIR, "i16", self.in_taps)
        return micro_kernels(self.name, self.tiles, functools.partial(micro_kernel, self), matrix)

    @property
    def pointers(self) -> tuple[str, ...]:
        rows = "table" if self.in_taps else "a"
        return (rows, "b", "bias", *(("residual",) if self.residual else ()), "c")

    @property
    def numbers(self) -> tuple[str, ...]:
        """``pitch``: stride of the table's taps; ``start``: offset in the data."""
        rows = ("pitch", "taps", "start") if self.in_taps else ("lda",)
        return (*rows, "k", "ldc", "columns", *self.bounds)

    @property
    def bounds(self) -> tuple[str, ...]:
        return BOUNDS if self.clamps else ()


def micro_kernel(form: Bf16KernelSpec, tile: MicroKernelTile, name: str) -> MlirRoutine:
    """One tile; ``bias`` starts at its column, ``residual`` and ``c`` at its first element."""
    arguments = [*((p, POINTER) for p in form.pointers), *((n, "i64") for n in form.numbers)]
    arguments += begun(form.dot, tile)
    f = MlirRoutine(name, arguments, form.dot.lanes)
    kernel = DotMicroKernel(f, form.dot, tile, PAIR, "i16", form.in_taps)
    mask = None
    if tile.masked:
        mask = f.first_lanes(f.minus(f["columns"], (tile.vectors - 1) * form.dot.lanes))
    with kernel.finished() as cells:
        for (r, v), sums in cells:
            at, of = v * form.dot.lanes, mask if v == tile.vectors - 1 else None
            total = f.add(sums, f.get(f["bias"], at, "f32", form.dot.lanes))
            total = _finished(f, form, total, (r, at), of)
            to = f.at(f.at(f["c"], f.product(f["ldc"], r), form.result), at, form.result)
            if of is None:
                f.store(total, to)
            else:
                f.store_masked(total, to, of)
    return f


def _finished(
    f: MlirRoutine,
    form: Bf16KernelSpec,
    total: SsaValue,
    place: tuple[SsaValue | int, int],
    mask: SsaValue | None,
) -> SsaValue:
    """``total`` plus the residual, clamped, in the element type of C."""
    (r, at), lanes = place, form.dot.lanes
    if form.residual:
        start = f.at(f["residual"], f.product(f["ldc"], r), form.residual)
        start = f.at(start, at, form.residual)
        if mask is None:
            other = f.load(start, lanes, form.residual)
        else:
            other = f.load_masked(start, mask, form.residual)
        is_wide = form.residual == "f32"
        total = f.add(total, other if is_wide else decode(f, other, torch.bfloat16))
    if form.clamps:
        low, high = (f.broadcast(_float(f, n), lanes) for n in BOUNDS)
        total = f.select(f.compare("olt", total, low), low, total)
        total = f.select(f.compare("ogt", total, high), high, total)
    return total if form.result == "f32" else form.dot.narrowed(f, total)


def _float(f: MlirRoutine, name: str) -> SsaValue:
    return f.from_bits(f.convert("arith.trunci", f[name], "i32"))
