# SPDX-License-Identifier: Apache-2.0
"""The generated product of floats with 8-bit or 4-bit weights, with scales per column or group of rows.

    widen_gemm(ptrs = A, B, scales, bias, C; ints = m, n, k, lda, ldc, size, next)

``size`` rows of B share their scales; the scales of the next group are ``next`` floats further, and behind those of
the last group are the zero points, if there are any. Each group is a pass over C, which adds its sums times their
scales.

    pack(ptrs = weights, B; ints = offset, k, distance of columns, of rows, first)
    scales(ptrs = floats, to; ints = offset, groups, distance of columns, of groups, first, next)
"""

import functools

from blade.backends.disc.cpu.emit.mlir_builder import SsaValue
from blade.backends.disc.cpu.emit.mlir_function import POINTER, MlirRoutine
from blade.backends.disc.cpu.gemm.driver import (
    MicroKernels,
    PanelRows,
    micro_kernels,
    product_text,
    tiles_of_rows,
)
from blade.backends.disc.cpu.gemm.weight_only_micro_kernel import (
    NIBBLE,
    WeightOnlySpec,
    micro_kernel,
)

SCALES = "widen_scales"
_POINTERS = ("a", "b", "scales", "bias", "c")
_NUMBERS = "n k lda ldc size next".split()


def pack_name(form: WeightOnlySpec) -> str:
    return f"widen{form.bits}_pack{form.tiles.width}{'_words' * form.has_words}"


def gemm_text(form: WeightOnlySpec) -> str:
    """MLIR of the driver and its micro-kernels."""
    kernel, panel = functools.partial(micro_kernel, form), functools.partial(_panel, form)
    kernels = micro_kernels(form.name, form.tiles, kernel, None)
    return product_text(form.name, _POINTERS, _NUMBERS, form.tiles, kernels, panel)


def _panel(form: WeightOnlySpec, f: MlirRoutine, kernels: MicroKernels, place: PanelRows) -> None:
    """The rows of one panel, group by group."""
    first = place.first
    b = f.at(f["b"], f.product(first, f.over(f["k"], form.rows)), form.unit)
    passes = f.most(f.above(f["k"], f["size"]), 1)
    with f.range(0, passes) as number:
        k0 = f.product(number, f["size"])
        is_first = f.test("eq", number, 0)
        skipped = f.product(f.over(k0, form.rows), form.tiles.width)
        scales = f.at(f["scales"], f.sum(first, f.product(number, f["next"])))
        given = {
            "b": f.at(b, skipped, form.unit),
            "scales": scales,
            "zeros": f.at(scales, f.product(passes, f["next"])),
            "k": f.least(f["size"], f.minus(f["k"], k0)),
            "ldi": f.pick(is_first, 0, f["ldc"]),
            "columns": place.columns,
            **{n: f[n] for n in ("lda", "ldc")},
        }

        def tile(row: SsaValue) -> dict[str, SsaValue]:
            c = f.at(f.at(f["c"], f.product(row, f["ldc"])), first)
            return {
                **given,
                "a": f.at(f.at(f["a"], f.product(row, f["lda"])), k0),
                "init": f.either(is_first, f.at(f["bias"], first), c),
                "c": c,
            }

        tiles_of_rows(f, form.tiles, kernels, place, tile)


# --- packing, once per loaded engine ---


def pack_text(form: WeightOnlySpec) -> str:
    """MLIR of ``pack``: columns of signed bytes into panels of units."""
    f, width, per = MlirRoutine(pack_name(form)), form.tiles.width, form.rows
    n = f.unpack(f["ints"], "offset k dn dk first".split(), "i64")
    source, to = f.get(f["ptrs"], 0, POINTER), f.get(f["ptrs"], 1, POINTER)
    rows = f.over(n["k"], per)
    with f.range(f["begin"], f["end"]) as j:
        column = f.sum(n["first"], j)
        start = f.sum(f.product(f.over(column, width), rows, width), f.rest(column, width))
        with f.range(0, rows) as row:
            unit = f.constant(0, form.unit)
            for place in range(per):
                k = f.sum(f.product(row, per), place)
                at = f.sum(n["offset"], f.product(j, n["dn"]), f.product(k, n["dk"]))
                x = f.get(source, at, "i8")
                if per > 1:
                    x = f.apply("arith.andi", x, f.constant(15, "i8"))
                    x = f.convert("arith.extui", x, form.unit) if form.has_words else x
                    x = f.apply("arith.shli", x, f.constant(NIBBLE * place, form.unit))
                unit = f.apply("arith.ori", unit, x)
            f.put(unit, to, f.sum(start, f.product(row, width)))
    return f.text(False) + "\n"


def scales_text() -> str:
    """MLIR of ``scales``: the columns' scales, group after group."""
    f = MlirRoutine(SCALES)
    n = f.unpack(f["ints"], "offset groups dn dg first next".split(), "i64")
    source, to = f.get(f["ptrs"], 0, POINTER), f.get(f["ptrs"], 1, POINTER)
    with f.range(f["begin"], f["end"]) as j, f.range(0, n["groups"]) as g:
        at = f.sum(n["offset"], f.product(j, n["dn"]), f.product(g, n["dg"]))
        f.put(f.get(source, at), to, f.sum(n["first"], j, f.product(g, n["next"])))
    return f.text(False) + "\n"
