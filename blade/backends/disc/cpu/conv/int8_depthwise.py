# SPDX-License-Identifier: Apache-2.0
"""The generated depthwise convolution of bytes over channels-last data: vectors run along the channels.

Tiles and specializations are those of the fp32 kernel (depthwise.py). Bytes are converted to floats as they
are loaded; weights are packed as floats. All sums are integers below 2 ** 24, which floats hold exactly, so
the results equal those of 32-bit integers, at four times the throughput of integer vector multiplication.

    int8_depthwise_k3s1d1(ptrs = x, w, sums, scales, bias, zeros[, residual], c; ints = SIZES, ..)
    units = result rows x runs of channels, runs fastest; the epilogue's numbers follow SIZES

``zeros`` are bytes of the zero point, which is the value beyond a border. A tile near a border is an edge
tile; a ``cut`` tile also has fewer channels than a vector.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from blade.backends.disc.cpu.conv.depthwise import (
    PIXELS,
    RUN,
    DepthwiseTaps,
    meets,
    tile_pixels,
    vectors,
)
from blade.backends.disc.cpu.emit.mlir_builder import SsaValue
from blade.backends.disc.cpu.emit.mlir_function import POINTER, MlirFunction, MlirRoutine
from blade.backends.disc.cpu.gemm.int8_epilogue import Int8Epilogue, finish_text
from blade.backends.disc.target.cpu import CpuTarget

SIZES = "c in_h in_w out_h out_w kernel_h stride_h pad_h gap_h pad_w".split()
KINDS = ("inner", "edge", "cut")
_PACK = "offset taps_h taps_w dn dh dw first".split()


@dataclass(frozen=True)
class Int8DepthwiseSpec:
    """The parameters for which code is generated."""

    taps: DepthwiseTaps
    epilogue: Int8Epilogue
    target: CpuTarget

    @property
    def lanes(self) -> int:
        return self.target.lanes

    @property
    def vectors(self) -> int:
        """Vectors of channels per tile."""
        return vectors(self.taps, self.target)

    @property
    def name(self) -> str:
        t = self.taps
        return f"int8_depthwise_k{t.count}s{t.stride}d{t.gap}{self.epilogue.name}"

    @property
    def pointers(self) -> tuple[str, ...]:
        """Pointer arguments of a whole convolution."""
        constants = ("w", "sums", "scales", "bias", "zeros")
        return ("x", *constants, *self.epilogue.pointers, "c")

    @property
    def tile_arguments(self) -> list[tuple[str, str]]:
        """Names and types of a tile's arguments.

        ``x``: the first kernel row, which may be outside, at the image's left border; ``above`` to ``below``:
        the kernel rows inside; ``left``: the tile's first column in the image; ``panel``: the stride, in
        floats, of vectors of weights.
        """
        numbers = "row rows above below left in_w pixel panel count".split()
        pointers = ((p, POINTER) for p in self.pointers)
        return [*pointers, *((n, "i64") for n in (*numbers, *self.epilogue.numbers))]

    def tile(self, kind: str, pixels: int) -> MlirRoutine:
        """A tile's function with an empty body."""
        return MlirRoutine(f"{self.name}_{kind}_{pixels}", self.tile_arguments, self.lanes)


def pack_name(lanes: int) -> str:
    return f"int8_depthwise_pack{lanes}"


def pack_text(lanes: int) -> str:
    """MLIR of ``packed[channel / lanes][tap][channel % lanes] = weight`` as floats; units = channels."""
    f = MlirRoutine(pack_name(lanes))
    n = f.unpack(f["ints"], _PACK, "i64")
    source, to = f.get(f["ptrs"], 0, POINTER), f.get(f["ptrs"], 1, POINTER)
    taps = f.product(n["taps_h"], n["taps_w"])
    with f.range(f["begin"], f["end"]) as j:
        channel = f.sum(n["first"], j)
        panel = f.product(f.over(channel, lanes), taps, lanes)
        place = f.sum(panel, f.rest(channel, lanes))
        start = f.sum(n["offset"], f.product(j, n["dn"]))
        with f.range(0, n["taps_h"]) as a, f.range(0, n["taps_w"]) as b:
            at = f.sum(start, f.product(a, n["dh"]), f.product(b, n["dw"]))
            weight = f.convert("arith.sitofp", f.get(source, at, "i8"), "f32")
            tap = f.sum(f.product(a, n["taps_w"]), b)
            f.put(weight, to, f.sum(place, f.product(tap, lanes)))
    return f.text(False) + "\n"


def depthwise_text(form: Int8DepthwiseSpec) -> str:
    """MLIR of the driver and its tiles."""
    finish = f"{form.name}_finish"
    parts = [finish_text(form.epilogue, finish, form.lanes)]
    parts += [_tile(form, kind, n, finish).text() for n in PIXELS for kind in KINDS]
    return "\n".join([*parts, _driver(form).text(False)]) + "\n"


def _driver(form: Int8DepthwiseSpec) -> MlirRoutine:
    """The loops over result rows, runs of channels and tiles."""
    taps, lanes, epilogue = form.taps, form.lanes, form.epilogue
    f = MlirRoutine(form.name)
    p = f.unpack(f["ptrs"], form.pointers, POINTER)
    size = f.unpack(f["ints"], [*SIZES, *epilogue.numbers], "i64")
    c, in_w, out_w = size["c"], size["in_w"], size["out_w"]
    runs = f.above(c, RUN * lanes)
    pixels = tile_pixels(f, out_w)
    reach = f.sum(f.product(f.minus(pixels, 1), taps.stride), (taps.count - 1) * taps.gap)
    with f.range(f["begin"], f["end"]) as unit:
        row, c0 = f.over(unit, runs), f.product(f.rest(unit, runs), RUN * lanes)
        image, y = f.over(row, size["out_h"]), f.rest(row, size["out_h"])
        count = f.least(f.minus(c, c0), RUN * lanes)
        top = f.minus(f.product(y, size["stride_h"]), size["pad_h"])
        above = f.above(f.most(f.minus(0, top), 0), size["gap_h"])
        below = f.above(f.most(f.minus(size["in_h"], top), 0), size["gap_h"])
        below = f.least(below, size["kernel_h"])
        whole_height = f.both(f.test("eq", above, 0), f.test("eq", below, size["kernel_h"]))
        first = f.product(f.sum(f.product(image, size["in_h"]), top), in_w, c)
        panel = f.product(size["kernel_h"], taps.count * lanes)
        given = {
            "x": f.at(p["x"], f.sum(first, c0), "i8"),
            "w": f.at(p["w"], f.product(f.over(c0, lanes), panel)),
            "row": f.product(size["gap_h"], in_w, c),
            "rows": size["kernel_h"],
            "above": above,
            "below": below,
            "in_w": in_w,
            "pixel": c,
            "panel": panel,
            **{n: f.at(p[n], c0, "i32") for n in ("sums", "scales", "bias")},
            "zeros": p["zeros"],
            **{n: size[n] for n in epilogue.numbers},
        }
        with f.range(0, f.above(out_w, pixels)) as tile:
            x = f.least(f.product(tile, pixels), f.minus(out_w, pixels))
            left = f.minus(f.product(x, taps.stride), size["pad_w"])
            at = f.sum(f.product(f.sum(f.product(row, out_w), x), c), c0)
            results = {n: f.at(p[n], at, epilogue.residual) for n in epilogue.pointers}
            results["c"] = f.at(p["c"], at, epilogue.element)
            inside = f.both(f.test("sge", left, 0), f.test("slt", f.sum(left, reach), in_w))
            inside = f.both(inside, whole_height)
            _run(f, form, pixels, inside, given | results | {"left": left}, count)
    return f


def _run(
    f: MlirRoutine,
    form: Int8DepthwiseSpec,
    pixels: SsaValue,
    inside: SsaValue,
    given: dict[str, SsaValue],
    count: SsaValue,
) -> None:
    """The tile of some pixels: first all channels in whole vectors, then the remaining ones."""

    def call(kind: str, moved: dict[str, SsaValue]) -> None:
        cases: dict[int, MlirFunction] = {n: form.tile(kind, n) for n in PIXELS}
        f.switch(pixels, cases, moved)

    whole = f.floor_to(count, form.lanes * form.vectors)
    with f.when(inside):
        call("inner", given | {"count": whole})
        f.branch()
        call("edge", given | {"count": whole})
    with f.when(f.test("slt", whole, count)):
        taps = f.over(given["panel"], form.lanes)
        rest = _from(f, form, given, whole) | {"w": f.at(given["w"], f.product(whole, taps))}
        call("cut", given | rest | {"count": f.minus(count, whole)})


def _from(
    f: MlirRoutine, form: Int8DepthwiseSpec, given: Mapping[str, SsaValue], at: SsaValue
) -> dict[str, SsaValue]:
    """The pointers moved to channel ``at``, except those of weights and zeros."""
    moved = {n: f.at(given[n], at, "i32") for n in ("sums", "scales", "bias")}
    moved |= {n: f.at(given[n], at, form.epilogue.residual) for n in form.epilogue.pointers}
    moved["x"] = f.at(given["x"], at, "i8")
    moved["c"] = f.at(given["c"], at, form.epilogue.element)
    return moved


def _tile(form: Int8DepthwiseSpec, kind: str, pixels: int, finish: str) -> MlirRoutine:
    """One tile along ``count`` channels."""
    f, taps, lanes, width = form.tile(kind, pixels), form.taps, form.lanes, form.vectors
    stack = f.stack(pixels * width * lanes)
    cells = [(p, v) for p in range(pixels) for v in range(width)]
    columns = sorted({p * taps.stride + j * taps.gap for p, j in _places(taps, pixels)})
    with f.range(0, f["count"], width * lanes) as at:
        left = f.minus(f["count"], at)
        masks = [
            f.first_lanes(f.minus(left, v * lanes)) if kind == "cut" else None for v in range(width)
        ]
        moved = _from(f, form, f.arguments, at)
        sums = [f.get(moved["sums"], v * lanes, "i32", lanes) for v in range(width)]
        init = [f.convert("arith.sitofp", f.sub(f.like(0, s), s), "f32") for s in sums]
        with f.carrying(f.whole(0), f["rows"], 1, [init[v] for _, v in cells]) as kernel:
            of = dict(zip(cells, kernel.values, strict=True))
            weights = _weights(f, form, kernel.index, at)
            row = f.at(moved["x"], f.product(kernel.index, f["row"]), "i8")
            in_w = f["in_w"] if kind == "inner" else _seen_width(f, kernel.index)
            for column in columns:
                x = f.sum(f["left"], column)
                source = f.at(row, f.product(x, f["pixel"]), "i8")
                if kind != "inner":
                    source = f.either(f.compare("ult", x, in_w), source, f["zeros"])
                for v in range(width):
                    value = _floats(f, source, v * lanes, masks[v])
                    for p, j in meets(taps, pixels, column):
                        of[p, v] = f.fma(value, weights[j, v], of[p, v])
            kernel.next(list(of.values()))
        for (p, v), total in zip(cells, kernel.results, strict=True):
            f.put(total, stack, (p * width + v) * lanes)
        f.run(
            form.epilogue.signature(finish),
            **{n: moved[n] for n in ("scales", "bias", "c", *form.epilogue.pointers)},
            **{n: f[n] for n in form.epilogue.numbers},
            sums=stack,
            pitch=f.whole(width * lanes),
            ldc=f["pixel"],
            rows=f.whole(pixels),
            columns=f.least(left, width * lanes),
        )
    return f


def _places(taps: DepthwiseTaps, pixels: int) -> list[tuple[int, int]]:
    return [(p, j) for p in range(pixels) for j in range(taps.count)]


def _weights(
    f: MlirRoutine, form: Int8DepthwiseSpec, row: SsaValue, at: SsaValue
) -> dict[tuple[int, int], SsaValue]:
    """The weights of one kernel row, for each vector of channels that starts at ``at``."""
    lanes, count = form.lanes, form.taps.count
    first = f.sum(f.product(f.over(at, lanes), f["panel"]), f.product(row, count * lanes))
    tops = [f.at(f["w"], f.sum(first, f.product(f["panel"], v))) for v in range(form.vectors)]
    return {
        (j, v): f.get(top, j * lanes, lanes=lanes)
        for j in range(count)
        for v, top in enumerate(tops)
    }


def _seen_width(f: MlirRoutine, row: SsaValue) -> SsaValue:
    """The image's width, or 0 if this kernel row is outside."""
    seen = f.both(f.test("sge", row, f["above"]), f.test("slt", row, f["below"]))
    return f.pick(seen, f["in_w"], 0)


def _floats(f: MlirRoutine, source: SsaValue, at: int, mask: SsaValue | None) -> SsaValue:
    """A vector of bytes as floats."""
    if mask is None:
        x = f.get(source, at, "i8", f.lanes)
    else:
        x = f.load_masked(f.at(source, at, "i8"), mask, "i8")
    return f.convert("arith.uitofp", x, "f32")
