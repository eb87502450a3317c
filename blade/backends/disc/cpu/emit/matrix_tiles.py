# SPDX-License-Identifier: Apache-2.0
"""Sums of products by the instructions for matrix tiles (Intel AMX): 32 rows by 32 columns, in four tiles of sums.

    to[r, j] = sum_k A[r, k] * B[k, j]      r < rows <= 32, j < 32, over the whole steps of k

A step is up to 16 units of k: a tile of A holds 16 units of 16 rows, one of B 16 columns of 16 units, as a packed panel
has them. Fewer suit a depth that consists of them, such as the 14 of a row of 7 pixels. In a product with weights, the
vector micro-kernels start from ``to``: they add the units after the last whole step and finish the results.

Whoever runs these functions does so inside of ``configured``, which gives all eight tiles 16 rows; fewer rows are
configured and restored by the function that has them. The tiles of a function are named by number:

    0 to 3   sums, ``row tile * columns + column tile``
    4, 5     B's columns
    6, 7     A's rows

The rows of a tile must be equally far apart. Those of a matrix are. A convolution's lie at the pointers of a table: 16
that are equally far apart, such as pixels of a line, are read in place, others are copied to the stack.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

from blade.backends.disc.cpu.emit.mlir_builder import SsaValue
from blade.backends.disc.cpu.emit.mlir_function import POINTER, MlirRoutine
from blade.backends.disc.cpu.emit.unit_dot import UnitDot

ROWS = 32
STEP = 16
"""Units of k in a tile, at most, its rows, and its columns."""
ENOUGH_ROWS = {2: 1, 4: 4}
"""Elements in a unit -> rows from which tiles are faster than vectors: ``vpdpbusd`` is fast, ``vdpbf16ps`` is not."""

_Dot = TypeVar("_Dot", bound=UnitDot)
_FEATURES = "+amx-tile,+amx-bf16,+amx-int8"
_ROW_BYTES = 64
_LEFT, _RIGHT = 6, 4  # the first tile of A's rows, and of B's columns
_ROWS_AT = 48  # its byte that has the first tile's rows
_FEWEST = 8  # units of a step of a longer depth
_COPIED = 4  # steps of k that are copied to the stack at a time


@dataclass(frozen=True)
class TileSums:
    """What a function sums. ``per``: elements of type ``element`` in a unit; ``columns``: tiles side by side.

    ``width``: words from row to row of B and of ``to``, or an argument of this name. ``in_taps``: rows of A consist of
    pieces, as in a convolution. ``adds``: the sums are added to what ``to`` has. ``streams``: beside every step,
    ``lines`` cache lines from ``soon`` on are prefetched.
    """

    dot: UnitDot
    per: int
    element: str
    columns: int
    width: int | None
    in_taps: bool = False
    adds: bool = False
    streams: bool = False

    def function(self, name: str, count: int) -> MlirRoutine:
        """The function for ``count`` tiles of rows, of which the last may have fewer than 16."""
        return _Sums(self, name, count).emit()

    @property
    def arguments(self) -> tuple[tuple[str, str], ...]:
        rows = "table:ptr pitch:i64 taps:i64 start:i64" if self.in_taps else "a:ptr lda:i64"
        wide = "" if self.width else " width:i64"
        ahead = " soon:ptr lines:i64" if self.streams else ""
        words = f"{rows} b:ptr k:i64 rows:i64 to:ptr{wide}{ahead}".split()
        return tuple((n, kind) for n, kind in (w.split(":") for w in words))


@dataclass(frozen=True)
class MatrixTiles:
    """The functions of a product with weights: for up to 16 rows, and for up to 32."""

    form: TileSums
    functions: tuple[MlirRoutine, MlirRoutine]

    def run(
        self,
        f: MlirRoutine,
        given: Mapping[str, SsaValue],
        rows: SsaValue,
        to: SsaValue,
        turn: SsaValue,
        turns: SsaValue,
    ) -> SsaValue:
        """Emit the sums of ``rows`` rows into ``f``, and return the number of units that they contain.

        ``given``: the arguments of the first row's micro-kernel. Each of ``turns`` runs on one panel of B prefetches
        its part of the next one, which follows it.
        """
        form, dot = self.form, self.form.dot
        whole = f.floor_to(f.over(given["k"], form.per), dot.step)
        done = f.pick(f.test("sge", rows, ENOUGH_ROWS[form.per]), whole, 0)
        known = {name: given[name] for name, _ in form.arguments if name in given}
        taps = given["taps"] if form.in_taps else f.whole(1)
        panel = f.product(f.above(given["k"], form.per), taps, dot.width)  # in words
        lines = f.above(f.whole(dot.step * form.columns), turns)
        own = f.product(turn, taps, f.over(whole, dot.step), lines, STEP)
        known |= {"lines": lines, "soon": f.at(given["b"], f.sum(panel, own), "i32")}
        with f.when(f.test("eq", done, 0)):
            nothing = dot.nothing(f)
            with f.range(0, f.product(rows, dot.width), dot.lanes) as at:
                f.put(nothing, to, at)
            f.branch()
            run_rows(f, self.functions, {**known, "to": to}, rows)
        return done


@contextmanager
def configured(f: MlirRoutine, dot: UnitDot) -> Iterator[None]:
    """Emit code that may run functions on tiles. A thread that is done with them releases them."""
    f.features = _FEATURES
    _configure(f, dot, {})
    yield
    f.line('llvm.call_intrinsic "llvm.x86.tilerelease"() : () -> ()')


def _configure(f: MlirRoutine, dot: UnitDot, rows: Mapping[int, SsaValue]) -> None:
    """Configure all tiles; A's and the sums have 16 rows, or by number so many (i8)."""
    wide, narrow = _ROW_BYTES * 0x10001, 4 * dot.step * 0x10001  # bytes of a row, twice
    words = [1, 0, 0, 0, wide, wide, wide, narrow, 0, 0, 0, 0]
    words += [STEP * 0x1010101, dot.step * 0x101 + STEP * 0x1010000, 0, 0]
    at = f.stack(len(words), "i32")
    text = f"arith.constant dense<[{', '.join(map(str, words))}]> : vector<{len(words)}xi32>"
    f.put(f.op(text, "i32", len(words)), at)
    for number, count in rows.items():
        f.put(count, at, _ROWS_AT + number)
    f.line(f'llvm.call_intrinsic "llvm.x86.ldtilecfg"({at.name}) : (!llvm.ptr) -> ()')


def run_rows(
    f: MlirRoutine,
    functions: Sequence[MlirRoutine],
    given: Mapping[str, SsaValue],
    rows: SsaValue,
) -> None:
    """Run that of ``functions``, for one and for two tiles of rows, which ``rows`` rows need."""
    one, two = functions
    with f.when(f.test("sgt", rows, STEP)):
        f.run(two, **given, rows=rows)
        f.branch()
        f.run(one, **given, rows=rows)


def in_steps(dot: _Dot, units: int) -> _Dot:
    """``dot`` in steps of which a depth of ``units`` consists, if the target has tiles."""
    return replace(dot, step=step_of(units)) if dot.tile_product else dot


def step_of(units: int) -> int:
    """The units of a step for a depth of ``units``: the most that it consists of, unless these are few."""
    if 0 < units < STEP:
        return units
    most = max(step for step in range(1, STEP + 1) if units % step == 0)
    return most if most >= _FEWEST else STEP


def matrix_tiles(
    name: str, dot: UnitDot, per: int, element: str, in_taps: bool
) -> MatrixTiles | None:
    """The functions for the product ``name`` with weights; ``None`` for a target without matrix tiles."""
    if not dot.tile_product:
        return None
    form = TileSums(dot, per, element, dot.width // STEP, dot.width, in_taps, streams=True)
    one, two = (form.function(f"{name}_tiles{count}", count) for count in (1, 2))
    return MatrixTiles(form, (one, two))


class _Sums:
    """One function of ``form``."""

    def __init__(self, form: TileSums, name: str, count: int) -> None:
        self.form, self.count = form, count
        self.f = f = MlirRoutine(name, form.arguments, STEP)
        f.features = _FEATURES
        f.flags = ("optsize",)  # unrolled loops are not faster
        self.width = f.whole(form.width) if form.width else f["width"]
        self.pitch = f.product(self.width, 4)  # in bytes
        self.last = f.minus(f["rows"], STEP * (count - 1))  # rows of the last tile
        self.cells = [(i, v) for i in range(count) for v in range(form.columns)]

    def emit(self) -> MlirRoutine:
        f, form = self.f, self.form
        is_ragged = f.test("ne", self.last, STEP)
        with f.when(is_ragged):
            ragged = [self._number(self.count - 1, v) for v in range(form.columns)]
            height = f.convert("arith.trunci", self.last, "i8")
            fewer = dict.fromkeys([*ragged, _LEFT + self.count - 1], height)
            _configure(f, form.dot, fewer)
        places = {
            (i, v): f.at(f["to"], f.sum(f.product(self.width, i * STEP), v * STEP))
            for i, v in self.cells
        }
        for cell, at in places.items():
            if form.adds:
                self._load(self._number(*cell), at, self.pitch)
            else:
                self._tile("tilezero", self._number(*cell))
        whole = f.floor_to(f.over(f["k"], form.per), form.dot.step)
        if form.in_taps:
            self._taps(f.over(f["k"], form.per), whole)
        else:
            apart = f.product(f["lda"], int(form.element[1:]) // 8)
            starts = [f.at(f["a"], f.product(apart, i * STEP), "i8") for i in range(self.count)]
            self._steps([(a, apart) for a in starts], f["b"], whole, f.whole(0))
        for cell, at in places.items():
            self._tile("tilestored64", self._number(*cell), at, self.pitch)
        with f.when(is_ragged):
            _configure(f, form.dot, {})
        return f

    def _number(self, i: int, v: int) -> int:
        return i * self.form.columns + v

    def _taps(self, units: SsaValue, whole: SsaValue) -> None:
        """Add the whole steps of every tap."""
        f, wide = self.f, _COPIED * self.form.dot.step
        copies = [f.stack(STEP * wide, "i32") for _ in range(self.count)]
        with f.range(0, f["taps"]) as tap:
            row = f.at(f["table"], f.product(tap, f["pitch"]), POINTER)
            panel = f.at(f["b"], f.product(tap, units, self.width), "i32")
            pixels = [f.at(row, i * STEP, POINTER) for i in range(self.count)]
            heights = [f.whole(STEP)] * (self.count - 1) + [self.last]
            found = [self._distance(p, n) for p, n in zip(pixels, heights, strict=True)]
            with f.range(0, whole, wide) as part:
                size = f.least(f.minus(whole, part), wide)
                starts = []
                for i, (apart, is_equal) in enumerate(found):
                    with f.when(is_equal):
                        f.branch()
                        self._copy(pixels[i], heights[i], part, size, copies[i])
                    here = f.at(self._pixel(pixels[i], 0), part, "i32")
                    starts.append(
                        (f.either(is_equal, here, copies[i]), f.pick(is_equal, apart, wide * 4))
                    )
                here = f.at(panel, f.product(part, self.width), "i32")
                self._steps(starts, here, size, f.sum(f.product(tap, whole), part))

    def _pixel(self, pixels: SsaValue, row: SsaValue | int) -> SsaValue:
        return self.f.at(self.f.get(pixels, row, POINTER), self.f["start"], self.form.element)

    def _distance(self, pixels: SsaValue, count: SsaValue) -> tuple[SsaValue, SsaValue]:
        """Bytes from the first to the second of ``count`` pixels, and whether all are as far apart."""
        f, lanes = self.f, 8
        first = f.get(pixels, 0, "i64")
        apart = f.sub(f.get(pixels, 1, "i64"), first)
        are_equal = []
        for at in range(0, STEP, lanes):
            row = f.add(f.iota("i64", lanes), f.constant(at, "i64", lanes))
            wanted = f.add(f.broadcast(first, lanes), f.mul(row, f.broadcast(apart, lanes)))
            is_right = f.compare("eq", f.get(pixels, at, "i64", lanes), wanted)
            is_absent = f.compare("sge", row, f.broadcast(count, lanes))
            is_right = f.apply("arith.ori", is_right, is_absent)
            text = f"vector.reduction <and>, {is_right.name} : {is_right.type} into i1"
            are_equal.append(f.op(text, "i1", 1))
        return apart, f.both(*are_equal)

    def _copy(
        self, pixels: SsaValue, rows: SsaValue, first: SsaValue, size: SsaValue, to: SsaValue
    ) -> None:
        """Copy ``size`` units of each of ``rows`` pixels, from unit ``first`` on."""
        f, step = self.f, self.form.dot.step
        with f.range(0, rows) as r:
            source = f.at(self._pixel(pixels, r), first, "i32")
            target = f.at(to, f.product(r, _COPIED * step), "i32")
            with f.range(0, size, step) as unit:
                f.put(f.get(source, unit, "i32", step), target, unit)

    def _steps(
        self,
        starts: list[tuple[SsaValue, SsaValue]],
        panel: SsaValue,
        size: SsaValue,
        before: SsaValue,
    ) -> None:
        """Add the first ``size`` units, which ``before`` units precede.

        ``starts``: each tile's first row, and the bytes between rows.
        """
        f, form = self.f, self.form
        step = form.dot.step
        with f.range(0, size, step) as unit:
            right = f.at(panel, f.product(unit, self.width), "i32")
            for v in range(form.columns):
                self._load(_RIGHT + v, f.at(right, v * STEP, "i32"), self.pitch)
            if form.streams:
                steps = f.over(f.sum(before, unit), step)
                soon = f.at(f["soon"], f.product(steps, f["lines"], STEP), "i32")
                with f.range(0, f["lines"]) as line:
                    f.prefetch(f.at(soon, f.product(line, STEP), "i32"), level=2)
            for i, (start, apart) in enumerate(starts):
                self._load(_LEFT + i, f.at(start, unit, "i32"), apart)
                for v in range(form.columns):
                    tiles = self._number(i, v), _LEFT + i, _RIGHT + v
                    self._tile(form.dot.tile_product, *tiles)

    # --- instructions ---

    def _load(self, number: int, address: SsaValue, bytes_apart: SsaValue) -> None:
        self._tile("tileloadd64", number, address, bytes_apart)

    def _tile(self, name: str, *operands: SsaValue | int) -> None:
        """An instruction on tiles, which are given by number."""
        f = self.f
        given = [f.constant(o, "i8") if isinstance(o, int) else o for o in operands]
        names = ", ".join(o.name for o in given)
        types = ", ".join("!llvm.ptr" if o.element == POINTER else o.type for o in given)
        f.line(f'llvm.call_intrinsic "llvm.x86.{name}"({names}) : ({types}) -> ()')
