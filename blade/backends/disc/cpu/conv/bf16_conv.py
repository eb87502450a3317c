# SPDX-License-Identifier: Apache-2.0
"""The generated bfloat16 convolution: an implicit GEMM over channels-last pixels, on the GEMM's micro-kernels.

    bf16_conv(ptrs = x, packed, bias, zeros[, residual], result, scratch; ints = SIZES[, low, high])
    units = row blocks x panels, panels fastest

A table of pointers, built per block of rows (pixel_pointers.py), locates each row's inputs; ``zeros`` are the values
beyond a border. Weights are stored in whole panels of pairs, tap by tap. Pixels have an even number of channels.
"""

import functools
from collections.abc import Mapping

from blade.backends.disc.cpu.conv import pixel_pointers as conv_rows
from blade.backends.disc.cpu.emit.bf16_dot import PAIR
from blade.backends.disc.cpu.emit.mlir_builder import SsaValue
from blade.backends.disc.cpu.emit.mlir_function import POINTER, MlirFunction, MlirRoutine
from blade.backends.disc.cpu.gemm.bf16_micro_kernel import Bf16KernelSpec, micro_kernel
from blade.backends.disc.cpu.gemm.driver import PanelRows, tiles_of_rows
from blade.backends.disc.target.cpu import CpuTarget

BLOCK_TILES = 16  # tiles per block of rows, at most
SIZES = (*conv_rows.SIZES, "o", "block")


@functools.lru_cache(maxsize=64)
def conv_text(form: Bf16KernelSpec, target: CpuTarget) -> str:
    """MLIR of the driver and its micro-kernels."""
    kernels = {
        number: micro_kernel(form, tile, f"{form.name}_tile{number}")
        for number, tile in form.tiles.tiles().items()
    }
    rows = f"{form.name}_rows"
    driver = _driver(form, kernels, conv_rows.signature(rows))
    table = conv_rows.narrow_pixel_pointers_text(rows, target, 2)
    return "\n".join([*(k.text() for k in kernels.values()), table, driver.text(False)]) + "\n"


def _driver(
    form: Bf16KernelSpec, kernels: Mapping[int, MlirFunction], make_table: MlirRoutine
) -> MlirRoutine:
    f, width = MlirRoutine(form.name, lanes=form.dot.lanes), form.tiles.width
    some = [p for p in form.pointers if p == "residual"]
    p = f.unpack(f["ptrs"], ["x", "b", "bias", "zeros", *some, "c", "scratch"], POINTER)
    size = f.unpack(f["ints"], [*SIZES, *form.bounds], "i64")
    taps = f.product(*(size[f"taps_{a}"] for a in conv_rows.AXES))
    panels, pitch = f.above(size["o"], width), size["pitch"]
    pairs = f.product(taps, f.over(size["depth"], PAIR))
    table = f.at(p["scratch"], f.product(pitch, conv_rows.ARRAYS), POINTER)
    with f.range(f.over(f["begin"], panels), f.above(f["end"], panels)) as block:
        r0 = f.product(block, size["block"])
        rows = f.minus(f.least(f.sum(r0, size["block"]), size["m"]), r0)
        known = {n: p[n] for n in ("x", "zeros", "scratch")}
        f.run(make_table, **known, ints=f["ints"], first=r0, count=rows)
        base = f.product(block, panels)
        low = f.most(f.minus(f["begin"], base), 0)
        high = f.least(f.minus(f["end"], base), panels)
        with f.range(low, high) as panel:
            first = f.product(panel, width)
            columns = f.least(f.minus(size["o"], first), width)
            given = {"b": f.at(p["b"], f.product(first, pairs), "i32"), "k": size["depth"]}
            given |= {"bias": f.at(p["bias"], first), "start": f.whole(0)}
            given |= {"pitch": pitch, "taps": taps, "ldc": size["o"], "columns": columns}
            given |= {n: size[n] for n in form.bounds}
            corner = f.sum(f.product(r0, size["o"]), first)
            moved = functools.partial(_moved, f, form, p, given, table, corner, size["o"])
            tiles_of_rows(
                f, form.tiles, kernels, PanelRows(first, columns, f.whole(0), rows), moved
            )
    return f


def _moved(
    f: MlirRoutine,
    form: Bf16KernelSpec,
    p: Mapping[str, SsaValue],
    given: Mapping[str, SsaValue],
    table: SsaValue,
    corner: SsaValue,
    distance: SsaValue,
    row: SsaValue,
) -> dict[str, SsaValue]:
    """A tile's arguments. ``corner``: the panel's first element in the result; ``row`` counts from there."""
    at = f.sum(corner, f.product(row, distance))
    results = {"residual": f.at(p["residual"], at, form.residual)} if form.residual else {}
    results["c"] = f.at(p["c"], at, form.result)
    return {**given, **results, "table": f.at(table, row, POINTER)}
