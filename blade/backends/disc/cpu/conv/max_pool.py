# SPDX-License-Identifier: Apache-2.0
"""The generated maximum pooling over channels-last images of float32 or bfloat16: vectors run along the channels.

A tile is some adjacent pixels of one result row; code is generated per extent and stride of the window along
w, as in depthwise.py. Rows outside the image are skipped. A column outside is replaced by the border column,
which every window that reaches outside contains. NaN is larger than any number, as in torch.

    max_pool_f32_k3s2(ptrs = x, result; ints = SIZES), units = result rows x runs of channels, runs fastest
"""

import functools

import torch

from blade.backends.disc.cpu.conv.depthwise import (
    PIXELS,
    RUN,
    DepthwiseTaps,
    meets,
    tile_pixels,
)
from blade.backends.disc.cpu.emit.element_types import MEMORY, decode, encode
from blade.backends.disc.cpu.emit.mlir_builder import SsaValue
from blade.backends.disc.cpu.emit.mlir_function import POINTER, MlirFunction, MlirRoutine
from blade.backends.disc.target.cpu import CpuTarget
from blade.program.dtypes import DTYPES

SIZES = "c in_h in_w out_h out_w kernel_h stride_h pad_h pad_w".split()
_TILE = (
    ("x", POINTER),  # the first row of the window inside the image, at the image's left border
    ("row", "i64"),  # stride of rows
    ("rows", "i64"),
    ("left", "i64"),  # the tile's first column in the image
    ("in_w", "i64"),
    ("c", "i64"),  # stride of pixels
    ("count", "i64"),  # number of channels
    ("result", POINTER),
)


def name(taps: DepthwiseTaps, dtype: torch.dtype) -> str:
    return f"max_pool_{DTYPES[dtype]}_k{taps.count}s{taps.stride}"


def _tile_name(taps: DepthwiseTaps, dtype: torch.dtype, pixels: int, cut: bool) -> str:
    return f"{name(taps, dtype)}_{'cut' if cut else 'whole'}_{pixels}"


@functools.cache
def pool_text(taps: DepthwiseTaps, dtype: torch.dtype, target: CpuTarget) -> str:
    """MLIR of the driver and its tiles."""
    parts = [_tile(taps, dtype, n, cut, target.lanes) for n in PIXELS for cut in (False, True)]
    return "".join([*parts, _driver(taps, dtype, target.lanes)])


def _driver(taps: DepthwiseTaps, dtype: torch.dtype, lanes: int) -> str:
    """The loops over result rows, runs of channels and tiles."""
    f, element = MlirRoutine(name(taps, dtype)), MEMORY[dtype]
    p = f.unpack(f["ptrs"], ("x", "result"), POINTER)
    size = f.unpack(f["ints"], SIZES, "i64")
    c, in_w, out_w = size["c"], size["in_w"], size["out_w"]
    runs = f.above(c, RUN * lanes)
    pixels = tile_pixels(f, out_w)
    with f.range(f["begin"], f["end"]) as unit:
        row, c0 = f.over(unit, runs), f.product(f.rest(unit, runs), RUN * lanes)
        image, y = f.over(row, size["out_h"]), f.rest(row, size["out_h"])
        count = f.least(f.minus(c, c0), RUN * lanes)
        top = f.minus(f.product(y, size["stride_h"]), size["pad_h"])
        low = f.most(top, 0)
        high = f.least(f.sum(top, size["kernel_h"]), size["in_h"])
        first = f.sum(f.product(image, size["in_h"]), low)
        whole = f.product(f.over(count, lanes), lanes)
        with f.range(0, f.above(out_w, pixels)) as tile:
            x = f.least(f.product(tile, pixels), f.minus(out_w, pixels))
            at = f.sum(f.product(row, out_w), x)
            given = {
                "x": f.at(p["x"], f.sum(f.product(first, in_w, c), c0), element),
                "row": f.product(in_w, c),
                "rows": f.minus(high, low),
                "left": f.minus(f.product(x, taps.stride), size["pad_w"]),
                "in_w": in_w,
                "c": c,
                "count": whole,
                "result": f.at(p["result"], f.sum(f.product(at, c), c0), element),
            }
            _call(f, taps, dtype, pixels, False, given)
            with f.when(f.test("slt", whole, count)):
                moved = {n: f.at(given[n], whole, element) for n in ("x", "result")}
                rest = {"count": f.minus(count, whole)}
                _call(f, taps, dtype, pixels, True, given | moved | rest)
    return f.text(internal=False)


def _call(
    f: MlirRoutine,
    taps: DepthwiseTaps,
    dtype: torch.dtype,
    pixels: SsaValue,
    cut: bool,
    given: dict[str, SsaValue],
) -> None:
    cases: dict[int, MlirFunction] = {
        n: MlirRoutine(_tile_name(taps, dtype, n, cut), _TILE) for n in PIXELS
    }
    f.switch(pixels, cases, given)


def _tile(taps: DepthwiseTaps, dtype: torch.dtype, pixels: int, cut: bool, lanes: int) -> str:
    """One tile along ``count`` channels; ``cut``: fewer channels than a vector."""
    f, element = MlirRoutine(_tile_name(taps, dtype, pixels, cut), _TILE, lanes), MEMORY[dtype]
    columns = sorted({p * taps.stride + j for p in range(pixels) for j in range(taps.count)})
    last = f.minus(f["in_w"], 1)
    places = {
        column: f.product(f.most(f.least(f.sum(f["left"], column), last), 0), f["c"])
        for column in columns
    }
    lowest = f.constant(float("-inf"), "f32", lanes)
    mask = f.first_lanes(f["count"]) if cut else None
    with f.range(0, f["count"], lanes) as at:
        with f.carrying(f.whole(0), f["rows"], 1, [lowest] * pixels) as window:
            best = list(window.values)
            row = f.at(f["x"], f.sum(f.product(window.index, f["row"]), at), element)
            for column in columns:
                if mask is None:
                    x = f.get(row, places[column], element, lanes)
                else:
                    x = f.load_masked(f.at(row, places[column], element), mask, element)
                x = decode(f, x, dtype)
                for pixel, _ in meets(taps, pixels, column):
                    best[pixel] = f.apply("arith.maximumf", best[pixel], x)
            window.next(best)
        for pixel, value in enumerate(window.results):
            to = f.sum(f.product(f["c"], pixel), at)
            stored = encode(f, value, dtype)
            if mask is None:
                f.put(stored, f["result"], to)
            else:
                f.store_masked(stored, f.at(f["result"], to, element), mask)
    return f.text()
