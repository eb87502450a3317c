# SPDX-License-Identifier: Apache-2.0
"""The generated bfloat16 convolution: an implicit GEMM over channels-last pixels, on the GEMM's micro-kernels.

    bf16_conv(ptrs = x, packed, bias, zeros[, residual], result, scratch; ints = SIZES[, low, high])
    units = row blocks x groups x panels, panels fastest

A table of pointers, built per block of rows (pixel_pointers.py), locates each row's inputs; ``zeros`` are the values
beyond a border. Weights, and the bias, are stored in whole panels, group by group; weights in pairs, tap by tap.
"""

import functools

from blade.backends.disc.cpu.conv import pixel_pointers as conv_rows
from blade.backends.disc.cpu.conv.dot_conv import driver_text, tile_at, units_of_blocks
from blade.backends.disc.cpu.emit.bf16_dot import PAIR
from blade.backends.disc.cpu.emit.mlir_function import POINTER, MlirRoutine
from blade.backends.disc.cpu.gemm.bf16_micro_kernel import Bf16KernelSpec
from blade.backends.disc.cpu.gemm.driver import MicroKernels, PanelRows, tiles_of_rows
from blade.backends.disc.target.cpu import CpuTarget

BLOCK_TILES = 16  # tiles per block of rows, at most
SIZES = (*conv_rows.SIZES, "o", "groups", "block")


@functools.lru_cache(maxsize=64)
def conv_text(form: Bf16KernelSpec, target: CpuTarget) -> str:
    """MLIR of the driver and its micro-kernels."""
    driver = functools.partial(_driver, form)
    return driver_text(form.name, form.kernels(), driver, target, 2)


def _driver(form: Bf16KernelSpec, kernels: MicroKernels, make_table: MlirRoutine) -> MlirRoutine:
    f, width = MlirRoutine(form.name, lanes=form.dot.lanes), form.tiles.width
    some = [p for p in form.pointers if p == "residual"]
    p = f.unpack(f["ptrs"], ["x", "b", "bias", "zeros", *some, "c", "scratch"], POINTER)
    size = f.unpack(f["ints"], [*SIZES, *form.bounds], "i64")
    taps = f.product(*(size[f"taps_{a}"] for a in conv_rows.AXES))
    own = f.over(size["o"], size["groups"])  # columns per group
    panels, pitch = f.above(own, width), size["pitch"]
    pairs = f.product(taps, f.over(size["depth"], PAIR))
    table = f.at(p["scratch"], f.product(pitch, conv_rows.ARRAYS), POINTER)
    elements = {**dict.fromkeys(some, form.residual), "c": form.result}
    units = f.product(panels, size["groups"])
    with units_of_blocks(f, p, size, make_table, units) as (unit, r0, rows):
        group, panel = f.over(unit, panels), f.rest(unit, panels)
        packed, first = f.product(unit, width), f.product(panel, width)
        columns = f.least(f.minus(own, first), width)
        given = {"b": f.at(p["b"], f.product(packed, pairs), "i32"), "k": size["depth"]}
        given |= {"bias": f.at(p["bias"], packed), "start": f.product(group, size["depth"])}
        given |= {"pitch": pitch, "taps": taps, "ldc": size["o"], "columns": columns}
        given |= {n: size[n] for n in form.bounds}
        corner = f.sum(f.product(r0, size["o"]), f.product(group, own), first)
        tile = functools.partial(tile_at, f, p, elements, given, table, corner, size["o"])
        tiles_of_rows(f, form.tiles, kernels, PanelRows(first, columns, f.whole(0), rows), tile)
    return f
