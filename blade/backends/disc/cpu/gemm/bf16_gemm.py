# SPDX-License-Identifier: Apache-2.0
"""The generated bfloat16 GEMM: rows of pairs times packed pairs, summed in float32.

    bf16_gemm(ptrs = A, B, bias, C; ints = m, n, k, lda, ldc)

Units, their order and the blocks of rows are those of the fp32 GEMM (gemm.py). A pass covers the whole depth: a panel
has half of the bytes, and sums between passes would have to be stored as float32.

    pack(ptrs = weights, B; ints = offset, k, distance of columns, of rows, first, start, depth)
    row(ptrs = numbers, to; ints = offset, distance, first)
"""

import functools

import torch

from blade.backends.disc.cpu.emit.bf16_dot import PAIR, Bf16Dot
from blade.backends.disc.cpu.emit.element_types import MEMORY, decode, encode
from blade.backends.disc.cpu.emit.mlir_builder import SsaValue
from blade.backends.disc.cpu.emit.mlir_function import POINTER, MlirRoutine
from blade.backends.disc.cpu.gemm.bf16_micro_kernel import POINTERS, Bf16KernelSpec
from blade.backends.disc.cpu.gemm.dot_micro_kernel import pack_units_text
from blade.backends.disc.cpu.gemm.driver import MicroKernels, PanelRows, product_text, tiles_of_rows
from blade.program.dtypes import DTYPES

NUMBERS = "n k lda ldc".split()


def pack_name(dot: Bf16Dot, source: torch.dtype) -> str:
    return f"bf16_pack{dot.width}_{dot.how}_{DTYPES[source]}"


def row_name(source: torch.dtype) -> str:
    return f"bf16_row_{DTYPES[source]}"


@functools.lru_cache(maxsize=64)
def gemm_text(form: Bf16KernelSpec) -> str:
    """MLIR of the driver and its micro-kernels."""
    panel = functools.partial(panel_of, form)
    return product_text(form.name, POINTERS, NUMBERS, form.tiles, form.kernels(), panel)


def panel_of(form: Bf16KernelSpec, f: MlirRoutine, kernels: MicroKernels, place: PanelRows) -> None:
    """The rows of one panel."""
    given = {n: f[n] for n in ("lda", "k", "ldc")}
    given["b"] = f.at(f["b"], f.product(place.first, f.above(f["k"], PAIR)), "i32")
    given["bias"] = f.at(f["bias"], place.first)
    given["columns"] = place.columns

    def tile(row: SsaValue) -> dict[str, SsaValue]:
        at = f.sum(f.product(row, f["ldc"]), place.first)
        return {
            **given,
            "a": f.at(f["a"], f.product(row, f["lda"]), "i16"),
            "c": f.at(f["c"], at, form.result),
        }

    tiles_of_rows(f, form.tiles, kernels, place, tile)


# --- packing, once per loaded engine ---


def pack_text(dot: Bf16Dot, source: torch.dtype) -> str:
    """MLIR of ``pack``: columns of numbers, rounded to bfloat16, to rows ``start`` to ``start + k`` of panels."""

    def rounded(f: MlirRoutine, x: SsaValue) -> SsaValue:
        return x if source == torch.bfloat16 else encode(f, x, torch.bfloat16)

    return pack_units_text(pack_name(dot, source), dot.width, PAIR, MEMORY[source], rounded)


def row_text(source: torch.dtype) -> str:
    """MLIR of ``row``, which writes numbers as contiguous float32."""
    f, element = MlirRoutine(row_name(source)), MEMORY[source]
    n = f.unpack(f["ints"], "offset distance first".split(), "i64")
    numbers, to = f.get(f["ptrs"], 0, POINTER), f.get(f["ptrs"], 1, POINTER)
    with f.range(f["begin"], f["end"]) as j:
        x = f.get(numbers, f.sum(n["offset"], f.product(j, n["distance"])), element)
        f.put(decode(f, x, source), to, f.sum(n["first"], j))
    return f.text(False) + "\n"
