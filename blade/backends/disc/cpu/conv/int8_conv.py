# SPDX-License-Identifier: Apache-2.0
"""The generated int8 convolution: an implicit GEMM over channels-last bytes, on the GEMM's micro-kernels.

    int8_conv(ptrs = x, packed, sums, scales, bias, zeros[, residual], result, scratch; ints = SIZES, ..)
    units = row blocks x groups x panels, panels fastest; the epilogue's numbers follow SIZES

A table of pointers, built per block of rows (pixel_pointers.py), locates each row's inputs. ``zeros`` are
bytes of the zero point, which is the value beyond a border. Weights, and the data of their columns, are
stored in whole panels, group by group.
"""

import functools
from collections.abc import Mapping

from blade.backends.disc.cpu.conv import pixel_pointers as conv_rows
from blade.backends.disc.cpu.emit.int8_dot import QUAD
from blade.backends.disc.cpu.emit.mlir_builder import SsaValue
from blade.backends.disc.cpu.emit.mlir_function import POINTER, MlirFunction, MlirRoutine
from blade.backends.disc.cpu.gemm.driver import PanelRows, tiles_of_rows
from blade.backends.disc.cpu.gemm.int8_micro_kernel import Int8KernelSpec, micro_kernel
from blade.backends.disc.target.cpu import CpuTarget

BLOCK_TILES = 16  # tiles per block of rows, at most
FILL = "int8_conv_zeros"
SIZES = (*conv_rows.SIZES, "o", "groups", "block")


def conv_text(form: Int8KernelSpec, target: CpuTarget) -> str:
    """MLIR of the driver and its micro-kernels."""
    kernels = {
        number: micro_kernel(form, tile, f"{form.name}_tile{number}")
        for number, tile in form.tiles.tiles().items()
    }
    rows = f"{form.name}_rows"
    driver = _driver(form, kernels, conv_rows.signature(rows))
    parts = [k.text() for k in kernels.values()]
    made = [*parts, conv_rows.narrow_pixel_pointers_text(rows, target, 1), driver.text(False)]
    return form.finish_text() + "\n".join(made) + "\n"


def _driver(
    form: Int8KernelSpec, kernels: Mapping[int, MlirFunction], make_table: MlirRoutine
) -> MlirRoutine:
    f, tiles, epilogue = MlirRoutine(form.name, lanes=form.dot.lanes), form.tiles, form.epilogue
    constants = ("b", "sums", "scales", "bias")
    p = f.unpack(f["ptrs"], ["x", *constants, "zeros", *epilogue.pointers, "c", "scratch"], POINTER)
    size = f.unpack(f["ints"], [*SIZES, *epilogue.numbers], "i64")
    taps = f.product(*(size[f"taps_{a}"] for a in conv_rows.AXES))
    own = f.over(size["o"], size["groups"])  # columns per group
    panels, pitch = f.above(own, tiles.width), size["pitch"]
    quads = f.product(taps, f.over(size["depth"], QUAD))
    table = f.at(p["scratch"], f.product(pitch, conv_rows.ARRAYS), POINTER)
    units = f.product(panels, size["groups"])
    with f.range(f.over(f["begin"], units), f.above(f["end"], units)) as block:
        r0 = f.product(block, size["block"])
        rows = f.minus(f.least(f.sum(r0, size["block"]), size["m"]), r0)
        known = {n: p[n] for n in ("x", "zeros", "scratch")}
        f.run(make_table, **known, ints=f["ints"], first=r0, count=rows)
        base = f.product(block, units)
        low = f.most(f.minus(f["begin"], base), 0)
        high = f.least(f.minus(f["end"], base), units)
        with f.range(low, high) as unit:
            group, panel = f.over(unit, panels), f.rest(unit, panels)
            packed, first = f.product(unit, tiles.width), f.product(panel, tiles.width)
            columns = f.least(f.minus(own, first), tiles.width)
            given = {n: f.at(p[n], packed, "i32") for n in ("sums", "scales", "bias")}
            given |= {"b": f.at(p["b"], f.product(packed, quads), "i32"), "k": size["depth"]}
            given |= {"pitch": pitch, "taps": taps, "ldc": size["o"], "columns": columns}
            given |= {"start": f.product(group, size["depth"])}
            given |= {n: size[n] for n in epilogue.numbers}
            corner = f.sum(f.product(r0, size["o"]), f.product(group, own), first)
            moved = functools.partial(_moved, f, form, p, given, table, corner, size["o"])
            tiles_of_rows(f, tiles, kernels, PanelRows(first, columns, f.whole(0), rows), moved)
    return f


def _moved(
    f: MlirRoutine,
    form: Int8KernelSpec,
    p: Mapping[str, SsaValue],
    given: Mapping[str, SsaValue],
    table: SsaValue,
    corner: SsaValue,
    distance: SsaValue,
    row: SsaValue,
) -> dict[str, SsaValue]:
    """A tile's arguments. ``corner``: the panel's first element in the result; ``row`` counts from there."""
    at = f.sum(corner, f.product(row, distance))
    results = {n: f.at(p[n], at, form.epilogue.residual) for n in form.epilogue.pointers}
    results["c"] = f.at(p["c"], at, form.epilogue.element)
    return {**given, **results, "table": f.at(table, row, POINTER)}


def fill_text() -> str:
    """MLIR of ``to[j] = byte`` (ptrs = unused, to; ints = byte)."""
    f = MlirRoutine(FILL)
    to = f.get(f["ptrs"], 1, POINTER)
    byte = f.convert("arith.trunci", f.get(f["ints"], 0, "i64"), "i8")
    with f.range(f["begin"], f["end"]) as j:
        f.put(byte, to, j)
    return f.text(False) + "\n"
