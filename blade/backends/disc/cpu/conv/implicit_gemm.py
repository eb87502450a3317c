# SPDX-License-Identifier: Apache-2.0
"""The generated convolution: an implicit GEMM over channels-last data and packed weights, in f32.

Result pixels are the rows, output channels the columns, and taps times channels the depth. One driver and
its micro-kernels (micro_kernel.py) handle all shapes; sizes are arguments. Inputs are not gathered: a table
of pointers (pixel_pointers.py) locates each row's inputs. A pass over the depth keeps a few panels of
weights in cache for all rows of a block.

    conv_f32(ptrs = x, packed, bias, zeros, residual, result, scratch; ints = SIZES)
    units = row blocks x groups x runs of panels, runs fastest
"""

import functools
import math
from collections.abc import Sequence

import torch

from blade.backends.disc.cpu.conv import pixel_pointers as conv_rows
from blade.backends.disc.cpu.conv import winograd
from blade.backends.disc.cpu.conv.micro_kernel import (
    heights,
    micro_kernel,
    signature,
    tiles,
    widths,
)
from blade.backends.disc.cpu.conv.pack import taps_of
from blade.backends.disc.cpu.emit.element_types import MEMORY, decode
from blade.backends.disc.cpu.emit.mlir_builder import SsaValue
from blade.backends.disc.cpu.emit.mlir_function import POINTER, MlirFunction, MlirRoutine
from blade.backends.disc.target.cpu import CpuTarget
from blade.program.dtypes import DTYPES

NAME = "conv_f32"
PACK = "conv_f32_pack"
RUN = 4  # panels per unit, at most
BLOCK_TILES = 16  # tiles per row block, at most
BLOCK_DEPTH = 256  # approximate depth of a pass: a run of panels fits L2, two panels fit L1
SIZES = (
    *conv_rows.SIZES,
    *"o groups runs pass_taps pass_depth block residual_row low high".split(),
)
"""runs: per group; residual_row: o, or 0 without a residual; low, high: bits of the result's bounds."""
PACK_SIZES = (
    "o first offset depth taps_d taps_h taps_w step_o step_c step_d step_h step_w groups".split()
)


def block_rows(target: CpuTarget) -> int:
    """Rows of a full block."""
    return BLOCK_TILES * heights(target)[0]


@functools.cache
def conv_text(target: CpuTarget) -> str:
    """MLIR of the drivers ``conv_f32`` and ``winograd_f32`` and their micro-kernels."""
    parts = [micro_kernel(tile, target.lanes) for tile in tiles(target)]
    drivers = [_driver(target), winograd.driver(target, RUN, functools.partial(_tiles_of, target))]
    return "".join([*parts, conv_rows.pixel_pointers_text(target), *drivers])


def _tiles_of(
    target: CpuTarget, f: MlirRoutine, rows: SsaValue, panels: SsaValue, given: dict[str, SsaValue]
) -> None:
    """A GEMM by the micro-kernels, from the first row and panel."""
    _block(f, target, f.whole(0), rows, f.whole(0), panels, given)


def pack_name(source: torch.dtype) -> str:
    return PACK if source == torch.float32 else f"{PACK}_{DTYPES[source]}"


@functools.cache
def pack_text(target: CpuTarget, source: torch.dtype = torch.float32) -> str:
    """MLIR of ``conv_f32_pack(ptrs = w, packed; ints = PACK_SIZES)``, units = output channels.

    ``packed[group][panel][tap][c][j]`` is the weight of output channel ``panel * lanes + j`` of the
    group, and zero beyond the group's last channel. ``source``: the dtype of ``w``.
    """
    f, element = MlirRoutine(pack_name(source)), MEMORY[source]
    w, packed = f.unpack(f["ptrs"], ("w", "packed"), POINTER).values()
    size = f.unpack(f["ints"], PACK_SIZES, "i64")
    columns = f.over(size["o"], size["groups"])
    panels = f.above(columns, target.lanes)
    taps = f.product(size["taps_d"], size["taps_h"], size["taps_w"])
    length = f.product(taps, size["depth"], target.lanes)
    with f.range(f["begin"], f["end"]) as j:
        start = f.at(f.at(w, size["offset"], element), f.product(j, size["step_o"]), element)
        column = f.sum(j, size["first"])
        group, within = f.over(column, columns), f.rest(column, columns)
        panel = f.sum(f.product(group, panels), f.over(within, target.lanes))
        to = f.at(f.at(packed, f.product(panel, length)), f.rest(within, target.lanes))
        with taps_of(f, size) as (tap, place):
            row = f.product(tap, size["depth"])
            with f.range(0, size["depth"]) as k:
                x = f.get(start, f.sum(place, f.product(k, size["step_c"])), element)
                f.put(decode(f, x, source), to, f.product(f.sum(row, k), target.lanes))
    return f.text(internal=False)


def _driver(target: CpuTarget) -> str:
    """The loops over row blocks, runs of panels, passes over the depth, and tiles of rows."""
    full, lanes = heights(target)[0], target.lanes
    f = MlirRoutine(NAME)
    names = ("x", "packed", "bias", "zeros", "residual", "result", "scratch")
    p = f.unpack(f["ptrs"], names, POINTER)
    size = f.unpack(f["ints"], SIZES, "i64")
    bounds = [f.get(f["ints"], 2 * SIZES.index(n)) for n in ("low", "high")]
    taps = f.product(size["taps_d"], size["taps_h"], size["taps_w"])
    columns, depth = f.over(size["o"], size["groups"]), size["depth"]
    panels = f.above(columns, lanes)
    panel = f.product(taps, depth, lanes)
    runs = size["runs"]
    per_block = f.product(runs, size["groups"])
    blocks = f.above(size["m"], size["block"])
    step = f.product(f.above(f.above(size["m"], blocks), full), full)
    table = f.at(p["scratch"], f.product(size["pitch"], conv_rows.ARRAYS), POINTER)
    with f.range(f.over(f["begin"], per_block), f.above(f["end"], per_block)) as block:
        r0 = f.product(block, step)
        rows = f.most(f.minus(f.least(f.sum(r0, step), size["m"]), r0), 0)
        known = {n: p[n] for n in ("x", "zeros", "scratch")}
        f.run(conv_rows.signature(), **known, ints=f["ints"], first=r0, count=rows)
        base = f.product(block, per_block)
        j0 = f.most(f.minus(f["begin"], base), 0)
        j1 = f.least(f.minus(f["end"], base), per_block)
        with f.range(j0, j1) as j:
            group, number = f.over(j, runs), f.rest(j, runs)
            run = f.over(f.product(number, panels), runs)
            count = f.minus(f.over(f.product(f.sum(number, 1), panels), runs), run)
            weights = f.at(p["packed"], f.product(f.sum(f.product(group, panels), run), panel))
            column = f.sum(f.product(group, columns), f.product(run, lanes))
            left = f.minus(columns, f.product(run, lanes))
            with (
                f.range(0, taps, size["pass_taps"]) as t0,
                f.range(0, depth, size["pass_depth"]) as k0,
            ):
                t1 = f.least(f.sum(t0, size["pass_taps"]), taps)
                k1 = f.least(f.sum(k0, size["pass_depth"]), depth)
                first = f.test("eq", f.sum(t0, k0), 0)
                last = f.both(f.test("eq", t1, taps), f.test("eq", k1, depth))
                nothing = [f.constant(x, "f32") for x in (-math.inf, math.inf)]
                low, high = (f.select(last, b, n) for b, n in zip(bounds, nothing, strict=True))
                b = f.at(weights, f.product(f.sum(f.product(t0, depth), k0), lanes))
                read = f.product(f.minus(t1, t0), f.minus(k1, k0), lanes)
                following = f.at(weights, f.product(count, panel))  # those of the next run
                given = {
                    "table": f.at(table, f.product(t0, size["pitch"]), POINTER),
                    "pitch": size["pitch"],
                    "taps": f.minus(t1, t0),
                    "start": f.sum(f.product(group, depth), k0),
                    "depth": f.minus(k1, k0),
                    "b": b,
                    "panel": panel,
                    "ahead": f.either(last, following, f.at(b, read)),
                    "init": f.either(first, p["bias"], p["result"]),
                    "ldi": f.pick(first, 0, size["o"]),
                    "c": p["result"],
                    "ldc": size["o"],
                    "columns": left,
                    "last": f.pick(last, 1, 0),
                    "residual": f.either(last, p["residual"], p["zeros"]),
                    "ldr": f.pick(last, size["residual_row"], 0),
                    "low": low,
                    "high": high,
                }
                _block(f, target, r0, rows, column, count, given)
    return f.text(internal=False)


def _block(
    f: MlirRoutine,
    target: CpuTarget,
    first: SsaValue,
    rows: SsaValue,
    column: SsaValue,
    count: SsaValue,
    given: dict[str, SsaValue],
) -> None:
    """The tiles of one pass, in order of decreasing height."""
    tops = heights(target)
    steps, rest = f.whole(0), rows
    for top in tops:
        steps, rest = f.sum(steps, f.over(rest, top)), f.rest(rest, top)
    with f.carrying(f.whole(0), steps, 1, [f.whole(0)]) as tiles_:
        (at,) = tiles_.values
        height = _largest(f, f.minus(rows, at), tops)
        row, moved = f.sum(first, at), dict(given)
        moved["table"] = f.at(given["table"], at, POINTER)
        half = f.product(given["taps"], f.over(given["depth"], 2), target.lanes)
        moved["ahead"] = f.at(given["ahead"], f.product(f.rest(tiles_.index, 2), half))
        for name, distance in (("init", "ldi"), ("c", "ldc"), ("residual", "ldr")):
            moved[name] = f.at(given[name], f.sum(f.product(row, given[distance]), column))
        _strip(f, target, height, count, moved)
        tiles_.next([f.sum(at, height)])


def _strip(
    f: MlirRoutine, target: CpuTarget, height: SsaValue, count: SsaValue, given: dict[str, SsaValue]
) -> None:
    """One tile of rows along ``count`` panels, widest tiles first; only narrow tiles take a partial panel."""
    lanes, tallest = target.lanes, max(h for h in heights(target) if 4 in widths(h, target))
    whole = f.least(count, f.over(given["columns"], lanes))
    low = f.test("sle", height, tallest)
    wide = f.pick(low, 4, 2)
    fits = f.pick(low, f.over(whole, 4), f.over(whole, 2))  # shifts: dividing by `wide` is slow
    rest = f.minus(count, f.product(fits, wide))
    steps = f.sum(fits, f.over(rest, 2), f.rest(rest, 2))
    cases: dict[int, MlirFunction] = {16 * t.vectors + t.rows: signature(t) for t in tiles(target)}
    with f.carrying(f.whole(0), steps, 1, [f.whole(0)]) as strip:
        (at,) = strip.values
        narrow = f.pick(f.test("sge", f.minus(count, at), 2), 2, 1)
        vectors = f.pick(f.test("sge", f.minus(whole, at), wide), wide, narrow)
        column, moved = f.product(at, lanes), dict(given)
        for name in ("b", "ahead"):
            moved[name] = f.at(given[name], f.product(at, given["panel"]))
        for name in ("init", "c", "residual"):
            moved[name] = f.at(given[name], column)
        moved["columns"] = f.minus(given["columns"], column)
        f.switch(f.sum(f.product(vectors, 16), height), cases, moved)
        strip.next([f.sum(at, vectors)])


def _largest(f: MlirRoutine, left: SsaValue, choices: Sequence[int]) -> SsaValue:
    """The first of the decreasing ``choices`` that is at most ``left``."""
    found = f.whole(choices[-1])
    for choice in reversed(choices[:-1]):
        found = f.pick(f.test("sge", left, choice), choice, found)
    return found
