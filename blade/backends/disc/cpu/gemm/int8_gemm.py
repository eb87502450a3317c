# SPDX-License-Identifier: Apache-2.0
"""The generated int8 GEMM: bytes times packed signed bytes, with float results.

    int8_gemm(ptrs = A, B, sums, scales, bias[, scale[, zero]][, residual], C;
              ints = m, n, k, lda, ldc[, numbers of the epilogue])

Units, their order and the blocks of rows are those of the fp32 GEMM (gemm.py). A pass covers the whole depth:
a panel has a quarter of the bytes, and partial sums would have to be stored as integers.

    pack(ptrs = weights, B; ints = offset, k, distance of columns, of rows, first, start, depth)
    sums(ptrs = weights, sums; ints = .. first, factor)   sums[first + j] += factor * sum_k weights[k, j]
    row(ptrs = floats, to; ints = offset, distance, first, bits of a float factor)
"""

import functools

from blade.backends.disc.cpu.emit.int8_dot import QUAD
from blade.backends.disc.cpu.emit.mlir_builder import SsaValue
from blade.backends.disc.cpu.emit.mlir_function import POINTER, MlirRoutine
from blade.backends.disc.cpu.gemm.dot_micro_kernel import pack_units_text
from blade.backends.disc.cpu.gemm.driver import MicroKernels, PanelRows, product_text, tiles_of_rows
from blade.backends.disc.cpu.gemm.int8_micro_kernel import Int8KernelSpec

SUMS, ROW = "int8_gemm_sums", "int8_gemm_row"
_NUMBERS = "n k lda ldc".split()


def pack_name(width: int) -> str:
    return f"int8_gemm_pack{width}"


def gemm_text(form: Int8KernelSpec) -> str:
    """MLIR of the driver and its micro-kernels."""
    text = product_text(
        form.name,
        form.pointers,
        [*_NUMBERS, *form.epilogue.numbers],
        form.tiles,
        form.kernels(),
        functools.partial(_panel, form),
    )
    return form.finish_text() + text


def _panel(form: Int8KernelSpec, f: MlirRoutine, kernels: MicroKernels, place: PanelRows) -> None:
    """The rows of one panel."""
    element = form.epilogue.element
    given = {n: f.at(f[n], place.first, "i32") for n in ("sums", "scales", "bias")}
    given |= {n: f[n] for n in ("lda", "k", "ldc", *form.epilogue.numbers)}
    given["b"] = f.at(f["b"], f.product(place.first, f.above(f["k"], QUAD)), "i32")
    given["columns"] = place.columns

    def tile(row: SsaValue) -> dict[str, SsaValue]:
        at = f.sum(f.product(row, f["ldc"]), place.first)
        return {
            **given,
            **{p: f.at(f[p], row, "i32") for p in form.row_pointers},
            **{p: f.at(f[p], at, form.epilogue.residual) for p in form.epilogue.pointers},
            "a": f.at(f["a"], f.product(row, f["lda"]), "i8"),
            "c": f.at(f["c"], at, element),
        }

    tiles_of_rows(f, form.tiles, kernels, place, tile)


# --- packing, once per loaded engine ---


def pack_text(width: int) -> str:
    """MLIR of ``pack``: columns of signed bytes to rows ``start`` to ``start + k`` of panels of quads."""
    return pack_units_text(pack_name(width), width, QUAD, "i8")


def sums_text() -> str:
    """MLIR of ``sums``, which adds each column's sum times a factor."""
    f = MlirRoutine(SUMS)
    n = f.unpack(f["ints"], "offset k dn dk first factor".split(), "i64")
    source, to = f.get(f["ptrs"], 0, POINTER), f.get(f["ptrs"], 1, POINTER)
    with f.range(f["begin"], f["end"]) as j:
        start = f.sum(n["offset"], f.product(j, n["dn"]))
        with f.carrying(f.whole(0), n["k"], 1, [f.whole(0)]) as loop:
            byte = f.get(source, f.sum(start, f.product(loop.index, n["dk"])), "i8")
            loop.next([f.add(loop.values[0], f.convert("arith.extsi", byte, "i64"))])
        total = f.convert("arith.trunci", f.mul(loop.results[0], n["factor"]), "i32")
        column = f.sum(n["first"], j)
        f.put(f.add(f.get(to, column, "i32"), total), to, column)
    return f.text(False) + "\n"


def row_text() -> str:
    """MLIR of ``row``, which writes floats contiguously, times a factor."""
    f = MlirRoutine(ROW)
    n = f.unpack(f["ints"], "offset distance first bits".split(), "i64")
    source, to = f.get(f["ptrs"], 0, POINTER), f.get(f["ptrs"], 1, POINTER)
    factor = f.from_bits(f.convert("arith.trunci", n["bits"], "i32"))
    with f.range(f["begin"], f["end"]) as j:
        x = f.get(source, f.sum(n["offset"], f.product(j, n["distance"])))
        f.put(f.mul(x, factor), to, f.sum(n["first"], j))
    return f.text(False) + "\n"
