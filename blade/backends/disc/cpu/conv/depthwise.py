# SPDX-License-Identifier: Apache-2.0
"""The generated depthwise convolution over channels-last data: vectors run along the channels.

Pixels are float32 or bfloat16; products and sums are float32.

A tile is some adjacent pixels of one result row times one or two vectors of channels. Each input
vector is loaded once per kernel row and multiplied with every tap that reads it, so code is generated per
extent, stride and dilation along w. Kernel planes and rows outside the image are skipped. Pixels beyond the
left and right border are read from zeros.

    depthwise_f32_k3s1d1(ptrs = x, packed, bias, zeros, residual, result; ints = SIZES)
    units = result rows x runs of channels, runs fastest
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from blade.backends.disc.cpu.conv.micro_kernel import clamp
from blade.backends.disc.cpu.emit.bf16_dot import bf16_dot
from blade.backends.disc.cpu.emit.element_types import MEMORY, decode
from blade.backends.disc.cpu.emit.mlir_builder import SsaValue
from blade.backends.disc.cpu.emit.mlir_function import POINTER, MlirFunction, MlirRoutine
from blade.backends.disc.target.cpu import CpuTarget
from blade.program.dtypes import DTYPES

RUN = 8  # vectors of channels per unit
PIXELS = (8, 7, 4, 1)  # per tile; the last tile of a row overlaps the previous one
SIZES = (
    "c in_d in_h in_w out_d out_h out_w kernel_d kernel_h stride_d stride_h pad_d pad_h gap_d gap_h pad_w "
    "residual_pixel low high"
).split()
"""low, high: bits of the result's bounds as floats; residual_pixel: c, or 0 without a residual."""

_TILE = (
    ("x", POINTER),  # the first kernel row inside the image, at the image's left border
    ("plane", "i64"),  # stride of kernel planes
    ("planes", "i64"),
    ("row", "i64"),  # stride of kernel rows
    ("rows", "i64"),
    ("left", "i64"),  # the tile's first column in the image
    ("in_w", "i64"),
    ("c", "i64"),  # stride of pixels
    ("w", POINTER),  # packed weights of the first kernel row
    ("sheet", "i64"),  # their stride of kernel planes
    ("panel", "i64"),  # stride of vectors of channels
    ("count", "i64"),  # number of channels
    ("bias", POINTER),
    ("zeros", POINTER),
    ("residual", POINTER),
    ("residual_pixel", "i64"),
    ("result", POINTER),
    ("low", "f32"),
    ("high", "f32"),
)


@dataclass(frozen=True)
class DepthwiseTaps:
    """The kernel along w and the dtypes of the image, residual and result, for which code is generated.

    ``deep``: whether the kernel has several planes.
    """

    count: int
    stride: int
    gap: int
    x: torch.dtype = torch.float32
    residual: torch.dtype = torch.float32
    result: torch.dtype = torch.float32
    deep: bool = False

    @property
    def name(self) -> str:
        kinds = [DTYPES[d] for d in (self.x, self.residual, self.result)]
        kind = "_".join(kinds[:1] if len(set(kinds)) == 1 else kinds)
        deep = "_deep" * self.deep
        return f"depthwise_{kind}_k{self.count}s{self.stride}d{self.gap}{deep}"

    def reach(self, pixels: int) -> int:
        """Columns of the image that ``pixels`` adjacent result pixels read."""
        return (pixels - 1) * self.stride + (self.count - 1) * self.gap + 1


def vectors(taps: DepthwiseTaps, target: CpuTarget) -> int:
    """Vectors of channels per tile: two if their weights and sums fit the registers."""
    registers = 32 if target.lanes == 16 or "asimd" in target.isa else 16
    return 2 if 2 * (taps.count + PIXELS[0] + 1) <= registers else 1


@functools.cache
def depthwise_text(taps: DepthwiseTaps, target: CpuTarget) -> str:
    """MLIR of the driver and its tiles."""
    parts = [_tile(taps, n, edge, target) for n in PIXELS for edge in (False, True)]
    return "".join([*parts, _driver(taps, target)])


def _tile_name(taps: DepthwiseTaps, pixels: int, edge: bool) -> str:
    return f"{taps.name}_{'edge' if edge else 'inner'}_{pixels}"


def _driver(taps: DepthwiseTaps, target: CpuTarget) -> str:
    """The loops over result rows, runs of channels and tiles."""
    lanes = target.lanes
    block = lanes * vectors(taps, target)
    f = MlirRoutine(taps.name)
    p = f.unpack(f["ptrs"], ("x", "packed", "bias", "zeros", "residual", "result"), POINTER)
    size = f.unpack(f["ints"], SIZES, "i64")
    low, high = (f.get(f["ints"], 2 * SIZES.index(n)) for n in ("low", "high"))
    c, in_w, out_w = size["c"], size["in_w"], size["out_w"]
    runs = f.above(c, RUN * lanes)
    sheet = f.product(size["kernel_h"], taps.count * lanes)
    panel = f.product(size["kernel_d"], sheet)
    pixels = tile_pixels(f, out_w)
    reach = f.sum(f.product(f.minus(pixels, 1), taps.stride), (taps.count - 1) * taps.gap)
    with f.range(f["begin"], f["end"]) as unit:
        row, c0 = f.over(unit, runs), f.product(f.rest(unit, runs), RUN * lanes)
        plane, y = f.over(row, size["out_h"]), f.rest(row, size["out_h"])
        image, z = f.over(plane, size["out_d"]), f.rest(plane, size["out_d"])
        count = f.least(f.minus(c, c0), RUN * lanes)
        front, d0, planes = _inside(f, size, "d", z)
        top, k0, rows = _inside(f, size, "h", y)
        first = f.sum(f.product(image, size["in_d"]), front)
        first = f.sum(f.product(first, size["in_h"]), top)
        above = f.sum(f.product(d0, sheet), f.product(k0, taps.count * lanes))
        start = f.product(row, out_w)
        given = {
            "x": f.at(p["x"], f.sum(f.product(first, in_w, c), c0), MEMORY[taps.x]),
            "plane": f.product(size["gap_d"], size["in_h"], in_w, c),
            "planes": planes,
            "row": f.product(size["gap_h"], in_w, c),
            "rows": rows,
            "in_w": in_w,
            "c": c,
            "w": f.at(p["packed"], f.sum(f.product(f.over(c0, lanes), panel), above)),
            "sheet": sheet,
            "panel": panel,
            "bias": f.at(p["bias"], c0),
            "zeros": p["zeros"],
            "residual_pixel": size["residual_pixel"],
            "low": low,
            "high": high,
        }
        with f.range(0, f.above(out_w, pixels)) as tile:
            x = f.least(f.product(tile, pixels), f.minus(out_w, pixels))
            left = f.minus(f.product(x, taps.stride), size["pad_w"])
            at = f.sum(start, x)
            added = f.sum(f.product(at, size["residual_pixel"]), c0)
            moved = given | {
                "left": left,
                "residual": f.at(p["residual"], added, MEMORY[taps.residual]),
                "result": f.at(p["result"], f.sum(f.product(at, c), c0), MEMORY[taps.result]),
            }
            inside = f.both(
                f.test("sge", left, 0),
                f.test("slt", f.sum(left, reach), in_w),
            )
            whole = f.pick(inside, f.product(f.over(count, block), block), 0)
            _call(f, taps, pixels, False, moved | {"count": whole})
            with f.when(f.test("slt", whole, count)):
                _call(f, taps, pixels, True, _from(f, taps, moved, whole, count, panel, lanes))
    return f.text(internal=False)


def _inside(
    f: MlirRoutine, size: Mapping[str, SsaValue], axis: str, place: SsaValue
) -> tuple[SsaValue, SsaValue, SsaValue]:
    """The part of the kernel inside the image at ``place`` of the result, along ``axis``: where it begins in the
    image and in the kernel, and its extent in the kernel."""
    gap = size[f"gap_{axis}"]
    start = f.minus(f.product(place, size[f"stride_{axis}"]), size[f"pad_{axis}"])
    low = f.above(f.most(f.minus(0, start), 0), gap)
    high = f.above(f.most(f.minus(size[f"in_{axis}"], start), 0), gap)
    extent = f.most(f.minus(f.least(high, size[f"kernel_{axis}"]), low), 0)
    return f.sum(start, f.product(low, gap)), low, extent


def tile_pixels(f: MlirRoutine, out_w: SsaValue) -> SsaValue:
    """Pixels per tile: the size that fits a row and computes the fewest pixels twice."""
    best, waste = f.whole(1), f.product(out_w, 4)
    for pixels in PIXELS[:-1]:
        extra = f.product(f.above(out_w, pixels), pixels + 1)
        better = f.both(f.test("sge", out_w, pixels), f.test("slt", extra, waste))
        best, waste = f.pick(better, pixels, best), f.pick(better, extra, waste)
    return best


def _from(
    f: MlirRoutine,
    taps: DepthwiseTaps,
    given: dict[str, SsaValue],
    at: SsaValue,
    count: SsaValue,
    panel: SsaValue,
    lanes: int,
) -> dict[str, SsaValue]:
    """The arguments of the channels that start at ``at``."""
    moved = {
        "x": f.at(given["x"], at, MEMORY[taps.x]),
        "bias": f.at(given["bias"], at),
        "result": f.at(given["result"], at, MEMORY[taps.result]),
    }
    added = f.pick(f.test("ne", given["residual_pixel"], 0), at, 0)
    moved["residual"] = f.at(given["residual"], added, MEMORY[taps.residual])
    moved["w"] = f.at(given["w"], f.product(f.over(at, lanes), panel))
    return given | moved | {"count": f.minus(count, at)}


def _call(
    f: MlirRoutine, taps: DepthwiseTaps, pixels: SsaValue, edge: bool, given: dict[str, SsaValue]
) -> None:
    cases: dict[int, MlirFunction] = {
        n: MlirRoutine(_tile_name(taps, n, edge), _TILE) for n in PIXELS
    }
    f.switch(pixels, cases, given)


def _tile(taps: DepthwiseTaps, pixels: int, edge: bool, target: CpuTarget) -> str:
    """One tile along ``count`` channels; ``edge``: columns may be outside, the last vector partial."""
    lanes, width = target.lanes, vectors(taps, target)
    f = MlirRoutine(_tile_name(taps, pixels, edge), _TILE, lanes)
    cells = [(p, v) for p in range(pixels) for v in range(width)]
    with f.range(0, f["count"], width * lanes) as at:
        masks = [
            f.first_lanes(f.minus(f["count"], f.sum(at, v * lanes))) if edge else None
            for v in range(width)
        ]
        bias = [_read(f, f["bias"], f.sum(at, v * lanes), masks[v]) for v in range(width)]
        start = [bias[v] for _, v in cells]
        under = f.product(f.over(at, lanes), f["panel"])
        if taps.deep:
            with f.carrying(f.whole(0), f["planes"], 1, start) as planes:
                plane = f.sum(f.product(planes.index, f["plane"]), at)
                sheet = f.sum(under, f.product(planes.index, f["sheet"]))
                planes.next(_rows(f, taps, pixels, masks, planes.values, (plane, sheet)))
            sums = planes.results
        else:
            sums = _rows(f, taps, pixels, masks, start, (at, under))
        _finish(f, taps, dict(zip(cells, sums, strict=True)), at, masks, target)
    return f.text()


def _rows(
    f: MlirRoutine,
    taps: DepthwiseTaps,
    pixels: int,
    masks: Sequence[SsaValue | None],
    sums: Sequence[SsaValue],
    starts: tuple[SsaValue, SsaValue],
) -> list[SsaValue]:
    """``sums``, pixel by pixel, plus the products of the rows of a kernel plane; ``starts``: offsets of the plane's
    pixels and of its weights. ``masks``: one per vector, of the channels that exist, in tiles at an edge."""
    lanes, width, edge = f.lanes, len(masks), masks[0] is not None
    cells = [(p, v) for p in range(pixels) for v in range(width)]
    columns = {p * taps.stride + j * taps.gap for p in range(pixels) for j in range(taps.count)}
    plane, sheet = starts
    with f.carrying(f.whole(0), f["rows"], 1, sums) as kernel:
        of = dict(zip(cells, kernel.values, strict=True))
        top = f.sum(sheet, f.product(kernel.index, taps.count * lanes))
        tops = [f.at(f["w"], f.sum(top, f.product(f["panel"], v))) for v in range(width)]
        weights = {
            (j, v): f.get(tops[v], j * lanes, lanes=lanes)
            for j in range(taps.count)
            for v in range(width)
        }
        row = f.sum(f.product(kernel.index, f["row"]), plane)
        image = f.at(f["x"], row, MEMORY[taps.x])
        for column in sorted(columns):
            source = _pixel(f, image, column, edge, MEMORY[taps.x])
            for v in range(width):
                x = _read(f, source, v * lanes, masks[v], taps.x)
                for p, j in meets(taps, pixels, column):
                    of[p, v] = f.fma(x, weights[j, v], of[p, v])
        kernel.next(list(of.values()))
    return kernel.results


def meets(taps: DepthwiseTaps, pixels: int, column: int) -> list[tuple[int, int]]:
    """(pixel, tap) pairs that read ``column``."""
    every = ((p, j) for p in range(pixels) for j in range(taps.count))
    return [(p, j) for p, j in every if p * taps.stride + j * taps.gap == column]


def _pixel(f: MlirRoutine, row: SsaValue, column: int, edge: bool, element: str) -> SsaValue:
    x = f.sum(f["left"], column)
    address = f.at(row, f.product(x, f["c"]), element)
    return f.either(f.compare("ult", x, f["in_w"]), address, f["zeros"]) if edge else address


def _read(
    f: MlirRoutine,
    pointer: SsaValue,
    at: SsaValue | int,
    mask: SsaValue | None,
    dtype: torch.dtype = torch.float32,
) -> SsaValue:
    """A vector, or its lanes of the mask, as float32."""
    start = f.at(pointer, at, MEMORY[dtype])
    if mask is None:
        return decode(f, f.load(start, f.lanes, MEMORY[dtype]), dtype)
    return decode(f, f.load_masked(start, mask, MEMORY[dtype]), dtype)


def _finish(
    f: MlirRoutine,
    taps: DepthwiseTaps,
    sums: dict[tuple[int, int], SsaValue],
    at: SsaValue,
    masks: list[SsaValue | None],
    target: CpuTarget,
) -> None:
    """Residual, clamp, store. Without a residual, zeros are added, with a pixel stride of 0."""
    lanes, element = target.lanes, MEMORY[taps.result]
    low, high = (f.broadcast(f[name], lanes) for name in ("low", "high"))
    some = f.test("ne", f["residual_pixel"], 0)
    for (p, v), total in sums.items():
        offset = f.sum(at, v * lanes)
        more = f.at(f["residual"], f.product(f["residual_pixel"], p), MEMORY[taps.residual])
        y = f.add(total, _read(f, more, f.pick(some, offset, 0), masks[v], taps.residual))
        y = clamp(f, y, low, high)
        if taps.result == torch.bfloat16:
            y = bf16_dot(target).narrowed(f, y)
        to = f.at(f.at(f["result"], f.product(f["c"], p), element), offset, element)
        mask = masks[v]
        if mask is None:
            f.store(y, to)
        else:
            f.store_masked(y, to, mask)
