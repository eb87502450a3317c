# SPDX-License-Identifier: Apache-2.0
"""The generated int8 convolution: an implicit GEMM over channels-last bytes, on the GEMM's micro-kernels.

    int8_conv(ptrs = x, packed, sums, scales, bias, zeros, result, scratch; ints = SIZES[, inverse, point, low, high])
    units = row blocks x panels, panels fastest

Where a row's inputs lie is a table of pointers, made for each block of rows (conv_rows.py); ``zeros`` are bytes
of the zero point, which is what lies beyond a border.
"""

from blade.backends.disc.cpu import conv_rows
from blade.backends.disc.cpu.code import Value
from blade.backends.disc.cpu.dot import QUAD
from blade.backends.disc.cpu.gemm_driver import tiles_of_rows
from blade.backends.disc.cpu.int8_kernel import Int8Form, micro_kernel
from blade.backends.disc.cpu.routine import POINTER, Routine
from blade.backends.disc.cpu.target import Target

BLOCK_TILES = 16  # tiles per block of rows, at most
FILL = "int8_conv_zeros"
SIZES = (*conv_rows.SIZES, "o", "block")
_POINTERS = ("x", "b", "sums", "scales", "bias", "zeros", "c", "scratch")


def conv_text(form: Int8Form, target: Target) -> str:
    """MLIR of the driver and its micro-kernels."""
    kernels = {
        number: micro_kernel(form, tile, f"{form.name}_tile{number}")
        for number, tile in form.tiles.tiles().items()
    }
    rows = f"{form.name}_rows"
    driver = _driver(form, kernels, conv_rows.signature(rows))
    parts = [k.text() for k in kernels.values()]
    return "\n".join([*parts, conv_rows.byte_rows_text(rows, target), driver.text(False)]) + "\n"


def _driver(form: Int8Form, kernels: dict[int, Routine], make_table: Routine) -> Routine:
    f, tiles = Routine(form.name, lanes=form.dot.lanes), form.tiles
    p = f.unpack(f["ptrs"], _POINTERS, POINTER)
    size = f.unpack(f["ints"], [*SIZES, *form.bounds], "i64")
    taps = f.product(*(size[f"taps_{a}"] for a in conv_rows.AXES))
    panels, pitch = f.above(size["o"], tiles.width), size["pitch"]
    quads = f.product(taps, f.over(size["depth"], QUAD))
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
            first = f.product(panel, tiles.width)
            columns = f.least(f.minus(size["o"], first), tiles.width)
            given = {n: f.at(p[n], first, "i32") for n in ("sums", "scales", "bias")}
            given |= {"b": f.at(p["b"], f.product(first, quads), "i32"), "k": size["depth"]}
            given |= {"pitch": pitch, "taps": taps, "ldc": size["o"], "columns": columns}
            given |= {n: size[n] for n in form.bounds}
            c = f.at(f.at(p["c"], f.product(r0, size["o"]), form.element), first, form.element)

            def tile(row: Value, given: dict[str, Value] = given, c: Value = c) -> dict[str, Value]:
                here = f.at(c, f.product(row, size["o"]), form.element)
                return {**given, "table": f.at(table, row, POINTER), "c": here}

            tiles_of_rows(f, tiles, kernels, columns, (f.whole(0), rows), tile)
    return f


def fill_text() -> str:
    """MLIR of ``to[j] = byte`` (ptrs = anything, to; ints = byte)."""
    f = Routine(FILL)
    to = f.get(f["ptrs"], 1, POINTER)
    byte = f.convert("arith.trunci", f.get(f["ints"], 0, "i64"), "i8")
    with f.range(f["begin"], f["end"]) as j:
        f.put(byte, to, j)
    return f.text(False) + "\n"
