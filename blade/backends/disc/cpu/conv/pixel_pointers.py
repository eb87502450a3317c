# SPDX-License-Identifier: Apache-2.0
"""The pointer table that locates the inputs of each result pixel; built per block of rows at run time.

Row r is result pixel r, counted over [N, D, H, W]. Scratch holds, in order, with ``pitch`` entries per array:

    origin, z, y, x      first input of each row: its address and its position, which may be outside
    table[tap][row]      pointer to the inputs of one tap: into x, to zeros where outside, or to a
                         copy in `slots`
    slots                copies of inputs: borders that are partly outside, rows that would collide
                         in cache
"""

from collections.abc import Mapping

from blade.backends.disc.cpu.emit.mlir_builder import SsaValue
from blade.backends.disc.cpu.emit.mlir_function import POINTER, MlirRoutine
from blade.backends.disc.target.cpu import CpuTarget

NAME = "conv_f32_rows"
ARRAYS = 4  # origin, z, y, x
ARGUMENTS = (
    ("x", POINTER),
    ("zeros", POINTER),
    ("scratch", POINTER),
    ("ints", POINTER),
    ("first", "i64"),
    ("count", "i64"),
)
AXES = ("d", "h", "w")
SIZES = (
    "m pitch c depth width copied partial "
    "in_d in_h in_w out_d out_h out_w taps_d taps_h taps_w "
    "stride_d stride_h stride_w pad_d pad_h pad_w gap_d gap_h gap_w"
).split()
"""The leading ``ints`` of a convolution.

width: pixels along w that one tap covers; copied: stride, in floats, of copied rows, 0: no copies;
partial: 1 if a tap may cover pixels both inside and outside.
"""


def signature(name: str = NAME) -> MlirRoutine:
    """The function that fills the table, with an empty body."""
    return MlirRoutine(name, ARGUMENTS)


def narrow_pixel_pointers_text(name: str, target: CpuTarget, bytes: int) -> str:
    """``pixel_pointers_text`` for elements of ``bytes``: no tap is partly outside, and no row is copied."""
    f = signature(name)
    size = f.unpack(f["ints"], SIZES, "i64")
    arrays = [f.at(f["scratch"], f.product(size["pitch"], k), "i64") for k in range(ARRAYS)]
    table = f.at(f["scratch"], f.product(size["pitch"], ARRAYS), "i64")
    _origins(f, size, arrays, bytes)
    _pointers(f, size, arrays, table, max(2, target.lanes // 2), bytes)
    return f.text()


def pixel_pointers_text(target: CpuTarget) -> str:
    """MLIR of the function that fills the table for rows ``first`` to ``first + count``."""
    f = signature()
    size = f.unpack(f["ints"], SIZES, "i64")
    pitch = size["pitch"]
    arrays = [f.at(f["scratch"], f.product(pitch, k), "i64") for k in range(ARRAYS)]
    table = f.at(f["scratch"], f.product(pitch, ARRAYS), "i64")
    taps = f.product(*(size[f"taps_{a}"] for a in AXES))
    slots = f.at(table, f.product(pitch, taps), "i64")
    lanes = max(2, target.lanes // 2)
    with f.when(_is_identity(f, size, taps)):
        _follow(f, size, table, lanes)
        f.branch()
        _origins(f, size, arrays, 4)
        _pointers(f, size, arrays, table, lanes, 4)
    with f.when(f.test("ne", size["partial"], 0)):
        _copy_partial(f, size, arrays, table, slots)
    with f.when(f.test("ne", size["copied"], 0)):
        _copy_rows(f, size, table, slots, target.lanes)
    return f.text()


def _is_identity(f: MlirRoutine, size: Mapping[str, SsaValue], taps: SsaValue) -> SsaValue:
    """Does result pixel r read input pixel r and nothing else?"""
    found = f.both(f.test("eq", taps, 1), f.test("eq", size["width"], 1))
    for axis in AXES:
        found = f.both(found, f.test("eq", size[f"in_{axis}"], size[f"out_{axis}"]))
        found = f.both(found, f.test("eq", size[f"stride_{axis}"], 1))
        found = f.both(found, f.test("eq", size[f"pad_{axis}"], 0))
    return found


def _follow(f: MlirRoutine, size: Mapping[str, SsaValue], table: SsaValue, lanes: int) -> None:
    """Fill the table for adjacent input pixels."""
    pixel = f.product(size["c"], 4)
    start = f.sum(f.address(f["x"]), f.product(f["first"], pixel))
    steps = f.mul(f.iota("i64", lanes), f.broadcast(pixel, lanes))
    with f.range(0, f["count"], lanes) as i:
        here = f.broadcast(f.sum(start, f.product(i, pixel)), lanes)
        f.put(f.add(here, steps), table, i)


def _origins(
    f: MlirRoutine, size: Mapping[str, SsaValue], arrays: list[SsaValue], bytes: int
) -> None:
    """Address and position of every row's first input, counted up from row to row."""
    base = f.address(f["x"])
    pixel = f.product(size["c"], bytes)
    index: list[SsaValue] = []
    rest = f["first"]
    for axis in reversed(AXES):
        bound = size[f"out_{axis}"]
        index.insert(0, f.rest(rest, bound))
        rest = f.over(rest, bound)
    with f.carrying(f.whole(0), f["count"], 1, [rest, *index]) as rows:
        n, *at = rows.values
        place = [
            f.minus(f.product(o, size[f"stride_{a}"]), size[f"pad_{a}"])
            for o, a in zip(at, AXES, strict=True)
        ]
        offset = n
        for p, axis in zip(place, AXES, strict=True):
            offset = f.sum(f.product(offset, size[f"in_{axis}"]), p)
        origin = f.sum(base, f.product(offset, pixel))
        for array, value in zip(arrays, (origin, *place), strict=True):
            f.put(value, array, rows.index)
        following: list[SsaValue] = []
        carry = f.whole(1)
        for o, axis in zip(reversed(at), reversed(AXES), strict=True):
            stepped = f.sum(o, carry)
            wraps = f.test("eq", stepped, size[f"out_{axis}"])
            following.insert(0, f.pick(wraps, 0, stepped))
            carry = f.pick(wraps, 1, 0)
        rows.next([f.sum(n, carry), *following])


def _pointers(
    f: MlirRoutine,
    size: Mapping[str, SsaValue],
    arrays: list[SsaValue],
    table: SsaValue,
    lanes: int,
    bytes: int,
) -> None:
    """Per tap and row: the input's address, or that of the zeros."""
    nowhere = f.broadcast(f.address(f["zeros"]), lanes)
    pixel = f.product(size["c"], bytes)
    bounds = [f.broadcast(size[f"in_{a}"], lanes) for a in AXES]
    # taps that lie partly outside along w are copied afterwards
    wide = f.broadcast(f.test("ne", size["width"], 1), lanes)
    with (
        f.range(0, size["taps_d"]) as a,
        f.range(0, size["taps_h"]) as b,
        f.range(0, size["taps_w"]) as c,
    ):
        gone = [f.product(t, size[f"gap_{x}"]) for t, x in zip((a, b, c), AXES, strict=True)]
        delta, tap = f.whole(0), f.whole(0)
        for t, g, axis in zip((a, b, c), gone, AXES, strict=True):
            delta = f.sum(f.product(delta, size[f"in_{axis}"]), g)
            tap = f.sum(f.product(tap, size[f"taps_{axis}"]), t)
        step = f.broadcast(f.product(delta, pixel), lanes)
        steps = [f.broadcast(g, lanes) for g in gone]
        row = f.at(table, f.product(tap, size["pitch"]), "i64")
        with f.range(0, f["count"], lanes) as i:
            fits = [
                f.compare("ult", f.add(f.get(array, i, "i64", lanes), by), bound)
                for array, bound, by in zip(arrays[1:], bounds, steps, strict=True)
            ]
            fits[2] = f.apply("arith.ori", fits[2], wide)
            inside = f.both(f.both(fits[0], fits[1]), fits[2])
            address = f.add(f.get(arrays[0], i, "i64", lanes), step)
            f.put(f.select(inside, address, nowhere), row, i)


def _copy_partial(
    f: MlirRoutine,
    size: Mapping[str, SsaValue],
    arrays: list[SsaValue],
    table: SsaValue,
    slots: SsaValue,
) -> None:
    """Copy each tap whose pixels lie partly outside along w, with zeros outside."""
    floats = f.product(size["width"], size["c"])
    with f.range(0, f["count"]) as i:
        x = f.get(arrays[3], i, "i64")
        left, right = f.most(f.minus(0, x), 0), f.minus(size["in_w"], x)
        cut = f.apply("arith.ori", f.test("sgt", left, 0), f.test("slt", right, size["width"]))
        with f.when(cut), f.range(0, f.product(size["taps_d"], size["taps_h"])) as tap:
            at = f.sum(f.product(tap, size["pitch"]), i)
            source = f.get(table, at, POINTER)
            slot = f.at(slots, f.product(at, floats))
            outside = f.compare("eq", f.address(source), f.address(f["zeros"]))
            none = f.pick(outside, 0, size["c"])
            low = f.product(f.least(left, size["width"]), none)
            high = f.product(f.most(f.least(right, size["width"]), 0), none)
            zero = f.constant(0.0, "f32")
            with f.range(0, floats) as e:
                f.put(zero, slot, e)
            with f.range(low, high) as e:
                f.put(f.get(source, e), slot, e)
            f.put(slot, table, at)


def _copy_rows(
    f: MlirRoutine, size: Mapping[str, SsaValue], table: SsaValue, slots: SsaValue, lanes: int
) -> None:
    """Copy all rows to a stride that is no power of two: rows at a power of two share few sets of L1."""
    even = f.product(f.over(size["depth"], lanes), lanes)
    with f.range(0, f["count"]) as i:
        source, slot = f.get(table, i, POINTER), f.at(slots, f.product(i, size["copied"]))
        with f.range(0, even, lanes) as e:
            f.put(f.get(source, e, lanes=lanes), slot, e)
        with f.range(even, size["depth"]) as e:
            f.put(f.get(source, e), slot, e)
        f.put(slot, table, i)
