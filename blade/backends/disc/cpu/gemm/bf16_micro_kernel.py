# SPDX-License-Identifier: Apache-2.0
"""The micro-kernels of bfloat16 products: a register tile of float32 sums.

    C[r, j] = sum_k A[r, k] * B[k, j] + bias[j]

B is a packed panel with two rows interleaved, ``panel[k / 2][j][k % 2]``, zero beyond k and n. The bias is float32;
C is float32, or bfloat16, rounded once at the end. dot_micro_kernel.py has the loop over k.
"""

from dataclasses import dataclass

from blade.backends.disc.cpu.emit.bf16_dot import PAIR, Bf16Dot
from blade.backends.disc.cpu.emit.mlir_builder import SsaValue
from blade.backends.disc.cpu.emit.mlir_function import POINTER, MlirRoutine
from blade.backends.disc.cpu.gemm.dot_micro_kernel import DotMicroKernel
from blade.backends.disc.cpu.gemm.driver import PanelTiling
from blade.backends.disc.cpu.gemm.micro_kernel import MicroKernelTile

POINTERS = ("a", "b", "bias", "c")
NUMBERS = ("lda", "k", "ldc", "columns")


@dataclass(frozen=True)
class Bf16KernelSpec:
    """The code of a bfloat16 product: instructions, tiles, the element type of C (``f32`` or ``i16``).

    ``kind``: the product that the name begins with.
    """

    dot: Bf16Dot
    tiles: PanelTiling
    result: str
    kind: str = "gemm"

    @property
    def name(self) -> str:
        kind = f"bf16_{self.kind}_{self.dot.how}{self.dot.lanes}_{self.result}"
        return kind + "".join(f"_edge{e}" for e in self.tiles.edges)


def micro_kernel(form: Bf16KernelSpec, tile: MicroKernelTile, name: str) -> MlirRoutine:
    """One tile; ``bias`` starts at its column."""
    arguments = [*((p, POINTER) for p in POINTERS), *((n, "i64") for n in NUMBERS)]
    f = MlirRoutine(name, arguments, form.dot.lanes)
    kernel = DotMicroKernel(f, form.dot, tile, PAIR, "i16", in_taps=False)
    for (r, v), total in zip(kernel.cells, kernel.sums(), strict=True):
        _finish(f, form, tile, (r, v), total)
    return f


def _finish(
    f: MlirRoutine,
    form: Bf16KernelSpec,
    tile: MicroKernelTile,
    cell: tuple[int, int],
    total: SsaValue,
) -> None:
    """Store ``total``, the sums of ``cell``, plus the bias."""
    (r, v), lanes = cell, form.dot.lanes
    total = f.add(total, f.get(f["bias"], v * lanes, "f32", lanes))
    if form.result != "f32":
        total = form.dot.narrowed(f, total)
    row = f.at(f["c"], f.product(f["ldc"], r), form.result)
    to = f.at(row, v * lanes, form.result)
    if tile.masked and v == tile.vectors - 1:
        f.store_masked(total, to, f.first_lanes(f.minus(f["columns"], v * lanes)))
    else:
        f.store(total, to)
