# SPDX-License-Identifier: Apache-2.0
"""Sums of products by the instructions for matrix tiles (Intel AMX): 32 rows by 32 columns, in four tiles of sums.

    to[r, j] = sum_k A[r, k] * B[k, j]      r < rows <= 32, j < 32, over the whole steps of k

A step is 16 units of k: a tile of A holds 16 units of 16 rows, one of B 16 columns of 16 units, as a packed panel has
them. In a product with weights, the vector micro-kernels start from ``to``: they add the units after the last whole
step and finish the results.

The rows of a tile must be equally far apart. Those of a matrix are. A convolution's lie at the pointers of a table: 16
that are equally far apart, such as pixels of a line, are read in place, others are copied to the stack.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from blade.backends.disc.cpu.emit.mlir_builder import SsaValue
from blade.backends.disc.cpu.emit.mlir_function import POINTER, MlirRoutine
from blade.backends.disc.cpu.emit.unit_dot import UnitDot

ROWS = 32
STEP = 16
"""Units of k in a tile, its rows, and its columns."""
ENOUGH_ROWS = {2: 1, 4: 4}
"""Elements in a unit -> rows from which tiles are faster than vectors: ``vpdpbusd`` is fast, ``vdpbf16ps`` is not."""

_FEATURES = "+amx-tile,+amx-bf16,+amx-int8"
_TILE = "!llvm.x86_amx"
_ROW_BYTES = 64
_COPIED = 4  # steps of k that are copied to the stack at a time


@dataclass(frozen=True)
class TileSums:
    """What a function sums. ``per``: elements of type ``element`` in a unit; ``columns``: tiles side by side.

    ``width``: words from row to row of B and of ``to``, or an argument of this name. ``in_taps``: rows of A consist of
    pieces, as in a convolution. ``adds``: the sums are added to what ``to`` has. ``streams``: B is a panel of weights,
    and the next one, which follows it, is prefetched meanwhile.
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
        words = f"{rows} b:ptr k:i64 rows:i64 to:ptr{wide}".split()
        return tuple((n, kind) for n, kind in (w.split(":") for w in words))


@dataclass(frozen=True)
class MatrixTiles:
    """The functions of a product with weights: for up to 16 rows, and for up to 32."""

    form: TileSums
    functions: tuple[MlirRoutine, MlirRoutine]

    def run(
        self, f: MlirRoutine, given: Mapping[str, SsaValue], rows: SsaValue, to: SsaValue
    ) -> SsaValue:
        """Emit the sums of ``rows`` rows into ``f``, and return the number of units that they contain.

        ``given``: the arguments of the first row's micro-kernel.
        """
        dot = self.form.dot
        whole = f.floor_to(f.over(given["k"], self.form.per), STEP)
        done = f.pick(f.test("sge", rows, ENOUGH_ROWS[self.form.per]), whole, 0)
        known = {name: given[name] for name, _ in self.form.arguments if name in given}
        with f.when(f.test("eq", done, 0)):
            nothing = dot.nothing(f)
            with f.range(0, f.product(rows, dot.width), dot.lanes) as at:
                f.put(nothing, to, at)
            f.branch()
            run_rows(f, self.functions, {**known, "to": to}, rows)
        return done


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
        f.flags = ("optsize",)  # an unrolled loop needs more than the eight tile registers
        last = f.convert("arith.trunci", f.minus(f["rows"], STEP * (count - 1)), "i16")
        self.heights = [*[f.constant(STEP, "i16")] * (count - 1), last]
        self.width = f.whole(form.width) if form.width else f["width"]
        self.pitch = f.product(self.width, 4)  # in bytes

    def emit(self) -> MlirRoutine:
        f = self.f
        self.step, self.row_bytes = f.constant(STEP, "i16"), f.constant(_ROW_BYTES, "i16")
        cells = [(i, v) for i in range(self.count) for v in range(self.form.columns)]
        places = [f.at(f["to"], f.sum(f.product(self.width, i * STEP), v * STEP)) for i, v in cells]
        if self.form.adds:
            sums = [
                self._tile(self.heights[i], at, self.pitch)
                for (i, _), at in zip(cells, places, strict=True)
            ]
        else:
            sums = [self._empty(self.heights[i]) for i, _ in cells]
        units = f.over(f["k"], self.form.per)
        whole = f.floor_to(units, STEP)
        if self.form.streams:
            taps = f["taps"] if self.form.in_taps else 1
            self.panel = f.product(f.above(f["k"], self.form.per), taps, self.width)  # in words
        if self.form.in_taps:
            sums = self._taps(units, whole, sums)
        else:
            apart = f.product(f["lda"], int(self.form.element[1:]) // 8)
            starts = [f.at(f["a"], f.product(apart, i * STEP), "i8") for i in range(self.count)]
            sums = self._steps([(a, apart) for a in starts], f["b"], whole, sums)
        for (i, _), to, total in zip(cells, places, sums, strict=True):
            shape = f"{self.heights[i].name}, {self.row_bytes.name}"
            f.line(
                f'llvm.call_intrinsic "llvm.x86.tilestored64.internal"({shape}, {to.name}, {self.pitch.name}, '
                f"{total.name}) : (i16, i16, !llvm.ptr, i64, {_TILE}) -> ()"
            )
        return f

    def _taps(self, units: SsaValue, whole: SsaValue, sums: list[SsaValue]) -> list[SsaValue]:
        """``sums`` plus the whole steps of every tap."""
        f, wide = self.f, _COPIED * STEP
        copies = [f.stack(STEP * wide, "i32") for _ in range(self.count)]
        with f.carrying(f.whole(0), f["taps"], 1, sums) as tap:
            row = f.at(f["table"], f.product(tap.index, f["pitch"]), POINTER)
            panel = f.at(f["b"], f.product(tap.index, units, self.width), "i32")
            pixels = [f.at(row, i * STEP, POINTER) for i in range(self.count)]
            found = [self._distance(p, n) for p, n in zip(pixels, self.heights, strict=True)]
            with f.carrying(f.whole(0), whole, wide, tap.values) as part:
                size = f.least(f.minus(whole, part.index), wide)
                starts = []
                for i, (apart, is_equal) in enumerate(found):
                    with f.when(is_equal):
                        f.branch()
                        rows = f.least(f.minus(f["rows"], i * STEP), STEP)
                        self._copy(pixels[i], rows, part.index, size, copies[i])
                    here = f.at(self._pixel(pixels[i], 0), part.index, "i32")
                    starts.append(
                        (f.either(is_equal, here, copies[i]), f.pick(is_equal, apart, wide * 4))
                    )
                here = f.at(panel, f.product(part.index, self.width), "i32")
                part.next(self._steps(starts, here, size, part.values))
            tap.next(part.results)
        return tap.results

    def _pixel(self, pixels: SsaValue, row: SsaValue | int) -> SsaValue:
        return self.f.at(self.f.get(pixels, row, POINTER), self.f["start"], self.form.element)

    def _distance(self, pixels: SsaValue, height: SsaValue) -> tuple[SsaValue, SsaValue]:
        """Bytes from the first to the second of ``height`` pixels, and whether all are as far apart."""
        f, lanes = self.f, 8
        first = f.get(pixels, 0, "i64")
        apart = f.sub(f.get(pixels, 1, "i64"), first)
        count = f.convert("arith.extui", height, "i64")
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
        f = self.f
        with f.range(0, rows) as r:
            source = f.at(self._pixel(pixels, r), first, "i32")
            target = f.at(to, f.product(r, _COPIED * STEP), "i32")
            with f.range(0, size, STEP) as unit:
                f.put(f.get(source, unit, "i32", STEP), target, unit)

    def _steps(
        self,
        starts: list[tuple[SsaValue, SsaValue]],
        panel: SsaValue,
        size: SsaValue,
        sums: list[SsaValue],
    ) -> list[SsaValue]:
        """``sums`` plus the first ``size`` units; ``starts``: each tile's first row, and the bytes between rows."""
        f = self.f
        with f.carrying(f.whole(0), size, STEP, sums) as loop:
            right = f.at(panel, f.product(loop.index, self.width), "i32")
            b = [
                self._tile(self.step, f.at(right, v * STEP, "i32"), self.pitch)
                for v in range(self.form.columns)
            ]
            if self.form.streams:
                soon = f.at(right, self.panel, "i32")
                for line in range(STEP * self.form.columns):
                    f.prefetch(f.at(soon, line * STEP, "i32"), level=2)
            values = []
            for i, height in enumerate(self.heights):
                start, apart = starts[i]
                left = self._tile(height, f.at(start, loop.index, "i32"), apart)
                values += [
                    self._add(height, loop.values[i * self.form.columns + v], left, b[v])
                    for v in range(self.form.columns)
                ]
            loop.next(values)
        return loop.results

    # --- instructions ---

    def _empty(self, height: SsaValue) -> SsaValue:
        text = f'"llvm.x86.tilezero.internal"({height.name}, {self.row_bytes.name}) : (i16, i16) -> {_TILE}'
        return self.f.op(f"llvm.call_intrinsic {text}", _TILE, 1)

    def _tile(self, height: SsaValue, address: SsaValue, bytes_apart: SsaValue) -> SsaValue:
        names = f"{height.name}, {self.row_bytes.name}, {address.name}, {bytes_apart.name}"
        text = f'"llvm.x86.tileloadd64.internal"({names}) : (i16, i16, !llvm.ptr, i64) -> {_TILE}'
        return self.f.op(f"llvm.call_intrinsic {text}", _TILE, 1)

    def _add(self, height: SsaValue, total: SsaValue, a: SsaValue, b: SsaValue) -> SsaValue:
        wide = self.row_bytes.name
        names = f"{height.name}, {wide}, {wide}, {total.name}, {a.name}, {b.name}"
        types = f"(i16, i16, i16, {_TILE}, {_TILE}, {_TILE}) -> {_TILE}"
        return self.f.op(
            f'llvm.call_intrinsic "{self.form.dot.tile_product}"({names}) : {types}', _TILE, 1
        )
