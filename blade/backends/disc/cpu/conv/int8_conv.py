# SPDX-License-Identifier: Apache-2.0
"""The generated int8 convolution: an implicit GEMM over channels-last bytes, on the GEMM's micro-kernels.

    int8_conv(ptrs = x, packed, sums, scales, bias, zeros[, residual], result, scratch; ints = SIZES, ..)
    units = row blocks x groups x panels, panels fastest; the epilogue's numbers follow SIZES

A table of pointers, built per block of rows (pixel_pointers.py), locates each row's inputs. ``zeros`` are
bytes of the zero point, which is the value beyond a border. Weights, and the data of their columns, are
stored in whole panels, group by group.
"""

import functools

from blade.backends.disc.cpu.conv import pixel_pointers as conv_rows
from blade.backends.disc.cpu.conv.dot_conv import driver_text, tile_at, units_of_blocks
from blade.backends.disc.cpu.emit.int8_dot import QUAD
from blade.backends.disc.cpu.emit.mlir_function import POINTER, MlirRoutine
from blade.backends.disc.cpu.gemm.driver import MicroKernels, PanelRows, tiles_of_rows
from blade.backends.disc.cpu.gemm.int8_micro_kernel import Int8KernelSpec
from blade.backends.disc.target.cpu import CpuTarget

BLOCK_TILES = 16  # tiles per block of rows, at most
FILL = "int8_conv_zeros"
SIZES = (*conv_rows.SIZES, "o", "groups", "block")


def conv_text(form: Int8KernelSpec, target: CpuTarget) -> str:
    """MLIR of the driver and its micro-kernels."""
    driver = functools.partial(_driver, form)
    return form.finish_text() + driver_text(form.name, form.kernels(), driver, target, 1)


def _driver(form: Int8KernelSpec, kernels: MicroKernels, make_table: MlirRoutine) -> MlirRoutine:
    f, tiles, epilogue = MlirRoutine(form.name, lanes=form.dot.lanes), form.tiles, form.epilogue
    constants = ("b", "sums", "scales", "bias")
    p = f.unpack(f["ptrs"], ["x", *constants, "zeros", *epilogue.pointers, "c", "scratch"], POINTER)
    size = f.unpack(f["ints"], [*SIZES, *epilogue.numbers], "i64")
    taps = f.product(*(size[f"taps_{a}"] for a in conv_rows.AXES))
    own = f.over(size["o"], size["groups"])  # columns per group
    panels, pitch = f.above(own, tiles.width), size["pitch"]
    quads = f.product(taps, f.over(size["depth"], QUAD))
    table = f.at(p["scratch"], f.product(pitch, conv_rows.ARRAYS), POINTER)
    elements = {**dict.fromkeys(epilogue.pointers, epilogue.residual), "c": epilogue.element}
    units = f.product(panels, size["groups"])
    with units_of_blocks(f, p, size, make_table, units) as (unit, r0, rows):
        group, panel = f.over(unit, panels), f.rest(unit, panels)
        packed, first = f.product(unit, tiles.width), f.product(panel, tiles.width)
        columns = f.least(f.minus(own, first), tiles.width)
        given = {n: f.at(p[n], packed, "i32") for n in ("sums", "scales", "bias")}
        given |= {"b": f.at(p["b"], f.product(packed, quads), "i32"), "k": size["depth"]}
        given |= {"pitch": pitch, "taps": taps, "ldc": size["o"], "columns": columns}
        given |= {"start": f.product(group, size["depth"])}
        given |= {n: size[n] for n in epilogue.numbers}
        corner = f.sum(f.product(r0, size["o"]), f.product(group, own), first)
        tile = functools.partial(tile_at, f, p, elements, given, table, corner, size["o"])
        tiles_of_rows(f, tiles, kernels, PanelRows(first, columns, f.whole(0), rows), tile)
    return f


def fill_text() -> str:
    """MLIR of ``to[j] = byte`` (ptrs = unused, to; ints = byte)."""
    f = MlirRoutine(FILL)
    to = f.get(f["ptrs"], 1, POINTER)
    byte = f.convert("arith.trunci", f.get(f["ints"], 0, "i64"), "i8")
    with f.range(f["begin"], f["end"]) as j:
        f.put(byte, to, j)
    return f.text(False) + "\n"
