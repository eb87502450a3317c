# SPDX-License-Identifier: Apache-2.0
"""The generated int8 convolution: an implicit GEMM over channels-last bytes, on the GEMM's micro-kernels.

    int8_conv(ptrs = x, packed, sums, scales, bias, zeros[, residual], result, scratch; ints = SIZES, ..)
    units = row blocks x groups x panels, panels fastest; after SIZES come the numbers of the epilogue

Where a row's inputs lie is a table of pointers, made for each block of rows (conv_rows.py); ``zeros`` are bytes
of the zero point, which is what lies beyond a border. Panels of weights, and what belongs to their columns, lie
group after group, whole panels each.
"""

import functools
from collections.abc import Mapping

from blade.backends.disc.cpu import conv_rows
from blade.backends.disc.cpu.code import Value
from blade.backends.disc.cpu.dot import QUAD
from blade.backends.disc.cpu.function import Function
from blade.backends.disc.cpu.gemm_driver import Place, tiles_of_rows
from blade.backends.disc.cpu.int8_kernel import Int8Form, micro_kernel
from blade.backends.disc.cpu.routine import POINTER, Routine
from blade.backends.disc.cpu.target import Target

BLOCK_TILES = 16  # tiles per block of rows, at most
FILL = "int8_conv_zeros"
SIZES = (*conv_rows.SIZES, "o", "groups", "block")


def conv_text(form: Int8Form, target: Target) -> str:
    """MLIR of the driver and its micro-kernels."""
    kernels = {
        number: micro_kernel(form, tile, f"{form.name}_tile{number}")
        for number, tile in form.tiles.tiles().items()
    }
    rows = f"{form.name}_rows"
    driver = _driver(form, kernels, conv_rows.signature(rows))
    parts = [k.text() for k in kernels.values()]
    made = [*parts, conv_rows.byte_rows_text(rows, target), driver.text(False)]
    return form.finish_text() + "\n".join(made) + "\n"


def _driver(form: Int8Form, kernels: Mapping[int, Function], make_table: Routine) -> Routine:
    f, tiles, epilogue = Routine(form.name, lanes=form.dot.lanes), form.tiles, form.epilogue
    constants = ("b", "sums", "scales", "bias")
    p = f.unpack(f["ptrs"], ["x", *constants, "zeros", *epilogue.pointers, "c", "scratch"], POINTER)
    size = f.unpack(f["ints"], [*SIZES, *epilogue.numbers], "i64")
    taps = f.product(*(size[f"taps_{a}"] for a in conv_rows.AXES))
    own = f.over(size["o"], size["groups"])  # columns of a group
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
            tiles_of_rows(f, tiles, kernels, Place(first, columns, f.whole(0), rows), moved)
    return f


def _moved(
    f: Routine,
    form: Int8Form,
    p: Mapping[str, Value],
    given: Mapping[str, Value],
    table: Value,
    corner: Value,
    distance: Value,
    row: Value,
) -> dict[str, Value]:
    """A tile's arguments; ``corner``: of the panel in the result, ``row`` counts from there."""
    at = f.sum(corner, f.product(row, distance))
    results = {n: f.at(p[n], at, form.epilogue.residual) for n in form.epilogue.pointers}
    results["c"] = f.at(p["c"], at, form.epilogue.element)
    return {**given, **results, "table": f.at(table, row, POINTER)}


def fill_text() -> str:
    """MLIR of ``to[j] = byte`` (ptrs = anything, to; ints = byte)."""
    f = Routine(FILL)
    to = f.get(f["ptrs"], 1, POINTER)
    byte = f.convert("arith.trunci", f.get(f["ints"], 0, "i64"), "i8")
    with f.range(f["begin"], f["end"]) as j:
        f.put(byte, to, j)
    return f.text(False) + "\n"
