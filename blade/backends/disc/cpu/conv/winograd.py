# SPDX-License-Identifier: Apache-2.0
"""Winograd's minimal filtering F(2x2, 3x3) for the generated convolution: 16 products instead of 36.

A tile is 2 x 2 result pixels, computed from 4 x 4 inputs. Per tile and channel the inputs are transformed
(B' d B), multiplied with transformed weights (G g G'), summed over channels, which is one GEMM per position
of the 4 x 4, and transformed back (A' m A). Only the weights' transform multiplies; the others add. The
rounding error stays within a small factor of the direct sum's, relative to the largest input of a tile. An
infinity or NaN may reach all pixels of the tiles that read it. Source: Lavin and Gray, "Fast Algorithms for
Convolutional Neural Networks", 2015. The GEMMs run on the convolution's micro-kernels.

    winograd_f32(ptrs = x, packed, bias, zeros, residual, result, scratch; ints = SIZES)
    units = blocks of tiles x runs of panels, runs fastest
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from blade.backends.disc.cpu.conv.micro_kernel import clamp
from blade.backends.disc.cpu.emit.mlir_builder import SsaValue
from blade.backends.disc.cpu.emit.mlir_function import POINTER, MlirRoutine
from blade.backends.disc.target.cpu import CpuTarget

NAME = "winograd_f32"
PACK = "winograd_f32_pack"
PLACES = 16
SIZES = (
    "tiles c o in_h in_w out_h out_w tiles_h tiles_w pad_h pad_w block pass_depth residual_row low high"
).split()
"""block: tiles per block, at most; residual_row: o, or 0 without a residual."""
PACK_SIZES = "first offset c step_o step_c step_h step_w".split()

Gemm = Callable[[MlirRoutine, SsaValue, SsaValue, dict[str, SsaValue]], None]
"""Emits the tiles of one pass: rows, panels, arguments of the micro-kernels (implicit_gemm.py)."""


def pack_text(target: CpuTarget) -> str:
    """MLIR of ``winograd_f32_pack(ptrs = w, packed; ints = PACK_SIZES)``, units = output channels.

    ``packed[panel][place][c][j]`` belongs to output channel ``panel * lanes + j``; computed in float64.
    """
    f = MlirRoutine(PACK)
    w, packed = f.unpack(f["ptrs"], ("w", "packed"), POINTER).values()
    size = f.unpack(f["ints"], PACK_SIZES, "i64")
    plane = f.product(size["c"], target.lanes)
    with f.range(f["begin"], f["end"]) as j:
        source = f.at(f.at(w, size["offset"]), f.product(j, size["step_o"]))
        column = f.sum(j, size["first"])
        panel = f.product(f.over(column, target.lanes), plane, PLACES)
        to = f.at(f.at(packed, panel), f.rest(column, target.lanes))
        with f.range(0, size["c"]) as k:
            start = f.product(k, size["step_c"])
            taps = [[_wide(f, source, start, size, y, x) for x in range(3)] for y in range(3)]
            for at, value in enumerate(transform_weights(f, taps)):
                to_place = f.sum(f.product(plane, at), f.product(k, target.lanes))
                f.put(f.convert("arith.truncf", value, "f32"), to, to_place)
    return f.text(internal=False)


def _wide(
    f: MlirRoutine, source: SsaValue, start: SsaValue, size: Mapping[str, SsaValue], y: int, x: int
) -> SsaValue:
    at = f.sum(start, f.product(size["step_h"], y), f.product(size["step_w"], x))
    return f.convert("arith.extf", f.get(source, at), "f64")


def _columns(rows: Sequence[Sequence[SsaValue]]) -> list[list[SsaValue]]:
    return [list(column) for column in zip(*rows, strict=True)]


def transform_weights(f: MlirRoutine, taps: Sequence[Sequence[SsaValue]]) -> list[SsaValue]:
    """G g G' of 3 x 3 numbers or vectors: the 16 positions, row by row."""
    half = f.like(0.5, taps[0][0])
    rows = _columns([_weight(f, half, column) for column in _columns(taps)])
    return [value for row in rows for value in _weight(f, half, row)]


def _weight(f: MlirRoutine, half: SsaValue, g: Sequence[SsaValue]) -> list[SsaValue]:
    """G g."""
    ends = f.mul(half, f.add(g[0], g[2]))
    middle = f.mul(half, g[1])
    return [g[0], f.add(ends, middle), f.sub(ends, middle), g[2]]


def _input(f: MlirRoutine, d: Sequence[SsaValue]) -> list[SsaValue]:
    """B' d."""
    return [f.sub(d[0], d[2]), f.add(d[1], d[2]), f.sub(d[2], d[1]), f.sub(d[1], d[3])]


def _result(f: MlirRoutine, m: Sequence[SsaValue]) -> list[SsaValue]:
    """A' m."""
    return [f.add(f.add(m[0], m[1]), m[2]), f.sub(f.sub(m[1], m[2]), m[3])]


def driver(target: CpuTarget, run: int, gemm: Gemm) -> str:
    """MLIR of ``winograd_f32``; ``run``: panels per unit."""
    lanes = target.lanes
    f = MlirRoutine(NAME)
    p = f.unpack(
        f["ptrs"], ("x", "packed", "bias", "zeros", "residual", "result", "scratch"), POINTER
    )
    size = f.unpack(f["ints"], SIZES, "i64")
    c, o = size["c"], size["o"]
    panels = f.over(o, lanes)
    runs = f.above(panels, run)
    blocks = f.above(size["tiles"], size["block"])
    share = f.above(size["tiles"], blocks)
    line = f.sum(c, lanes)  # stride of tiles of transformed inputs
    table = p["scratch"]
    inputs = f.at(table, f.product(size["block"], PLACES), POINTER)
    sums = f.at(inputs, f.product(size["block"], line, PLACES))
    _table(f, table, inputs, f.product(size["block"], PLACES), line)
    with f.range(f.over(f["begin"], runs), f.above(f["end"], runs)) as block:
        first = f.product(block, share)
        count = f.most(f.minus(f.least(f.sum(first, share), size["tiles"]), first), 0)
        _transform_inputs(f, p, size, inputs, first, count, line, lanes)
        base = f.product(block, runs)
        j0 = f.most(f.minus(f["begin"], base), 0)
        j1 = f.least(f.minus(f["end"], base), runs)
        with f.range(j0, j1) as j:
            panel = f.product(j, run)
            some = f.least(f.minus(panels, panel), run)
            weights = f.at(p["packed"], f.product(panel, c, PLACES * lanes))
            with f.range(0, PLACES) as place, f.range(0, c, size["pass_depth"]) as k0:
                begins = f.test("eq", k0, 0)
                row = f.product(place, size["block"])
                m = f.at(sums, f.product(row, run * lanes))
                b = f.at(weights, f.product(f.sum(f.product(place, c), k0), lanes))
                depth = f.least(size["pass_depth"], f.minus(c, k0))
                ends = f.both(f.test("eq", place, PLACES - 1), f.test("eq", f.sum(k0, depth), c))
                after = f.at(weights, f.product(some, c, PLACES * lanes))
                gemm(
                    f,
                    count,
                    some,
                    {
                        "table": f.at(table, row, POINTER),
                        "pitch": f.whole(0),
                        "taps": f.whole(1),
                        "start": k0,
                        "depth": depth,
                        "b": b,
                        "panel": f.product(c, PLACES * lanes),
                        "ahead": f.either(ends, after, f.at(b, f.product(depth, lanes))),
                        "init": f.either(begins, p["zeros"], m),
                        "ldi": f.pick(begins, 0, run * lanes),
                        "c": m,
                        "ldc": f.whole(run * lanes),
                        "columns": f.product(some, lanes),
                        "last": f.whole(0),
                        "residual": p["zeros"],
                        "ldr": f.whole(0),
                        "low": f.constant(0.0, "f32"),
                        "high": f.constant(0.0, "f32"),
                    },
                )
            column = f.product(panel, lanes)
            _transform_results(f, p, size, sums, first, count, column, some, run, lanes)
    return f.text(internal=False)


def _table(
    f: MlirRoutine, table: SsaValue, inputs: SsaValue, entries: SsaValue, line: SsaValue
) -> None:
    """A pointer to each transformed input row, positions slowest."""
    with f.range(0, entries) as i:
        f.put(f.at(inputs, f.product(i, line)), table, i)


@contextmanager
def _tiles(
    f: MlirRoutine, size: Mapping[str, SsaValue], first: SsaValue, count: SsaValue
) -> Iterator[tuple[SsaValue, SsaValue, SsaValue, SsaValue]]:
    """A loop over a block's tiles: the index, and the tile's image and position."""
    x, rest = f.rest(first, size["tiles_w"]), f.over(first, size["tiles_w"])
    y, n = f.rest(rest, size["tiles_h"]), f.over(rest, size["tiles_h"])
    with f.carrying(f.whole(0), count, 1, [n, y, x]) as tiles:
        n, y, x = tiles.values
        yield tiles.index, n, y, x
        across = f.sum(x, 1)
        wraps = f.test("eq", across, size["tiles_w"])
        y = f.pick(wraps, f.sum(y, 1), y)
        ends = f.test("eq", y, size["tiles_h"])
        tiles.next([f.pick(ends, f.sum(n, 1), n), f.pick(ends, 0, y), f.pick(wraps, 0, across)])


def _transform_inputs(
    f: MlirRoutine,
    p: Mapping[str, SsaValue],
    size: Mapping[str, SsaValue],
    inputs: SsaValue,
    first: SsaValue,
    count: SsaValue,
    line: SsaValue,
    lanes: int,
) -> None:
    """B' d B of every tile, in position-major order; pixels outside the image are zero."""
    with _tiles(f, size, first, count) as (i, n, y, x):
        top = f.minus(f.product(y, 2), size["pad_h"])
        left = f.minus(f.product(x, 2), size["pad_w"])
        pixels: list[list[SsaValue]] = []
        for a in range(4):
            row = f.sum(top, a)
            in_rows = f.test("ult", row, size["in_h"])
            start = f.product(f.sum(f.product(n, size["in_h"]), row), size["in_w"])
            pixels.append([])
            for b in range(4):
                column = f.sum(left, b)
                inside = f.both(in_rows, f.test("ult", column, size["in_w"]))
                pixel = f.at(p["x"], f.product(f.sum(start, column), size["c"]))
                pixels[a].append(f.either(inside, pixel, p["zeros"]))
        to = f.at(inputs, f.product(i, line))
        plane = f.product(size["block"], line)
        with f.range(0, size["c"], lanes) as k:
            d = [[f.get(pointer, k, lanes=lanes) for pointer in row] for row in pixels]
            rows = _columns([_input(f, column) for column in _columns(d)])
            places = [v for row in rows for v in _input(f, row)]
            for at, value in enumerate(places):
                f.put(value, f.at(to, f.product(plane, at)), k)


def _transform_results(
    f: MlirRoutine,
    p: Mapping[str, SsaValue],
    size: Mapping[str, SsaValue],
    sums: SsaValue,
    first: SsaValue,
    count: SsaValue,
    column: SsaValue,
    some: SsaValue,
    run: int,
    lanes: int,
) -> None:
    """A' m A of every tile, then bias, residual and clamp; pixels outside the image are skipped."""
    low, high = (f.broadcast(f.get(f["ints"], 2 * SIZES.index(n)), lanes) for n in ("low", "high"))
    plane = f.product(size["block"], run * lanes)
    with _tiles(f, size, first, count) as (i, n, y, x):
        top, left = f.product(y, 2), f.product(x, 2)
        source = f.at(sums, f.product(i, run * lanes))
        start = f.sum(f.product(f.sum(f.product(n, size["out_h"]), top), size["out_w"]), left)
        with f.range(0, f.product(some, lanes), lanes) as k:
            m = [
                [f.get(f.at(source, f.product(plane, 4 * a + b)), k, lanes=lanes) for b in range(4)]
                for a in range(4)
            ]
            halves = _columns([_result(f, column_) for column_ in _columns(m)])
            pixels = [_result(f, row) for row in halves]
            to = f.sum(column, k)
            bias = f.get(p["bias"], to, lanes=lanes)
            for a in range(2):
                for b in range(2):
                    inside = f.both(
                        f.test("slt", f.sum(top, a), size["out_h"]),
                        f.test("slt", f.sum(left, b), size["out_w"]),
                    )
                    with f.when(inside):
                        pixel = f.sum(start, f.product(size["out_w"], a), b)
                        more = f.sum(f.product(pixel, size["residual_row"]), to)
                        total = f.add(pixels[a][b], bias)
                        total = f.add(total, f.get(p["residual"], more, lanes=lanes))
                        f.put(
                            clamp(f, total, low, high),
                            p["result"],
                            f.sum(f.product(pixel, size["o"]), to),
                        )
