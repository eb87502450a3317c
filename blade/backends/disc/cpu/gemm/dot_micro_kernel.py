# SPDX-License-Identifier: Apache-2.0
"""The loop over k of micro-kernels whose operands are narrower than 32 bits.

The elements of a row that share 32 bits, a *unit*, are multiplied and summed in one lane: four bytes
(int8_micro_kernel.py), or a pair of bfloat16 (bf16_micro_kernel.py). A's rows are read in place, one unit (one
broadcast) at a time. B is a packed panel of units, ``panel[unit][j]``, zero beyond k and n. Where the target has matrix
tiles, these have summed the first units (matrix_tiles.py): of most depths all, and what is left is to finish the rows.

A convolution's rows consist of one piece per tap, each of whole units. A table of pointers, ``table[tap][r]``,
locates them (pixel_pointers.py). The panel holds all taps one after the other.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from blade.backends.disc.cpu.emit.mlir_builder import SsaValue
from blade.backends.disc.cpu.emit.mlir_function import POINTER, Carry, MlirRoutine
from blade.backends.disc.cpu.emit.unit_dot import UnitDot
from blade.backends.disc.cpu.gemm.driver import joined
from blade.backends.disc.cpu.gemm.micro_kernel import MicroKernelTile

Cells = list[tuple[tuple[SsaValue | int, int], SsaValue]]
"""The sums of a tile by row and vector."""

# As in the fp32 micro-kernels: independent sums, instructions per loop body, prefetch distance in steps.
_CHAINS = 8
_BODY = 24
_AHEAD = 64


def begun(dot: UnitDot, tile: MicroKernelTile) -> tuple[tuple[str, str], ...]:
    """The arguments of a tile whose first ``done`` units, or all, matrix tiles have summed into ``before``."""
    if not tile.rows:
        return ("before", POINTER), ("rows", "i64")
    return (("before", POINTER), ("done", "i64")) if dot.tile_product else ()


class DotMicroKernel:
    """Emits one tile into ``f``, which has the arguments ``a`` and ``lda`` or ``table``, ``pitch``, ``taps`` and
    ``start``, ``b`` and ``k``, and those of ``begun``. ``per``: elements of type ``element`` in a unit. A tile without
    rows finishes any number of them, whose sums matrix tiles have made.
    """

    def __init__(
        self,
        f: MlirRoutine,
        dot: UnitDot,
        tile: MicroKernelTile,
        per: int,
        element: str,
        in_taps: bool,
    ) -> None:
        self.f, self.tile, self._dot = f, tile, dot
        self._per, self._element, self._in_taps = per, element, in_taps
        self.cells = [(r, v) for r in range(tile.rows) for v in range(tile.vectors)]

    @contextmanager
    def finished(self) -> Iterator[Cells]:
        """Emit what happens to the sums of some rows."""
        if self.tile.rows:
            yield list(zip(self.cells, self.sums(), strict=True))
            return
        with self.f.range(0, self.f["rows"]) as r:
            yield [((r, v), self._before(r, v)) for v in range(self.tile.vectors)]

    def sums(self) -> list[SsaValue]:
        """The vectors of sums, one per cell."""
        f, count = self.f, len(self.cells)
        chains = 1 << (-(-_CHAINS // count) - 1).bit_length()
        values = [self._dot.nothing(f)] * (chains * count)
        if self._dot.tile_product:
            values[:count] = [self._before(r, v) for r, v in self.cells]
        heights = range(self.tile.rows)
        if self._in_taps:
            piece = f.product(f.over(f["k"], self._per), self._dot.width)
            with f.carrying(f.whole(0), f["taps"], 1, values) as taps:
                row = f.at(f["table"], f.product(taps.index, f["pitch"]), POINTER)
                self.rows = [
                    f.at(f.get(row, r, POINTER), f["start"], self._element) for r in heights
                ]
                panel = f.at(f["b"], f.product(taps.index, piece), "i32")
                taps.next(self._depth(panel, taps.values))
            values = taps.results
        else:
            self.rows = [f.at(f["a"], f.product(f["lda"], r), self._element) for r in heights]
            values = self._depth(f["b"], values)
        return joined(self.f, values, len(self.cells))

    def _before(self, r: SsaValue | int, v: int) -> SsaValue:
        """The sums of the units before ``done``."""
        dot = self._dot
        at = self.f.sum(self.f.product(r, dot.width), v * dot.lanes)
        return self.f.get(self.f["before"], at, dot.nothing(self.f).element, dot.lanes)

    def _depth(self, panel: SsaValue, values: list[SsaValue]) -> list[SsaValue]:
        """``values`` plus the products of one piece that they do not contain."""
        f, count = self.f, len(self.cells)
        chains = len(values) // count
        steps = chains * max(1, _BODY // (chains * count))
        whole, units = f.over(f["k"], self._per), f.above(f["k"], self._per)
        low, even = f.whole(0), f.floor_to(whole, steps)
        if self._dot.tile_product:
            low = f["done"]
            even = f.sum(low, f.floor_to(f.minus(whole, low), steps))
        with f.carrying(low, even, steps, values) as loop:
            self._prefetch(panel, loop.index, steps)
            self._steps(loop, panel, steps)
        with f.carrying(even, whole, 1, loop.results) as loop:
            self._steps(loop, panel, 1)
        if not self._in_taps:
            with f.carrying(whole, units, 1, loop.results) as loop:  # at most one round
                self._steps(loop, panel, 1, at_end=True)
        return loop.results

    def _steps(self, loop: Carry, start: SsaValue, steps: int, at_end: bool = False) -> None:
        """``steps`` units of k from the loop's index on; step u adds to chain u."""
        f, dot, count = self.f, self._dot, len(self.cells)
        values, chains = list(loop.values), len(loop.values) // count
        panel = f.at(start, f.product(loop.index, dot.width), "i32")
        for u in range(steps):
            b = [
                dot.widened(f, f.get(panel, u * dot.width + v * dot.lanes, "i32", dot.lanes))
                for v in range(self.tile.vectors)
            ]
            for r in range(self.tile.rows):
                a = dot.spread(f, self._unit(r, f.sum(loop.index, u), at_end))
                for v in range(self.tile.vectors):
                    k = (u % chains) * count + r * self.tile.vectors + v
                    values[k] = dot.add(f, values[k], a, b[v])
        loop.next(values)

    def _unit(self, r: int, unit: SsaValue, at_end: bool) -> SsaValue:
        """One unit of row ``r`` as an i32; at the end, only existing elements."""
        f, first = self.f, self.f.product(unit, self._per)
        if not at_end:
            at = f.at(self.rows[r], first, self._element)
            return f.op(f"llvm.load {at.name} {{alignment = 1 : i64}} : !llvm.ptr -> i32", "i32", 1)
        total = f.constant(0, "i32")
        for j in range(self._per - 1):  # elements beyond k are multiplied by zeros of the panel
            here = f.least(f.sum(first, j), f.minus(f["k"], 1))
            part = f.convert("arith.extui", f.get(self.rows[r], here, self._element), "i32")
            by = f.constant(32 // self._per * j, "i32")
            total = f.apply("arith.ori", total, f.apply("arith.shli", part, by))
        return total

    def _prefetch(self, start: SsaValue, unit: SsaValue, steps: int) -> None:
        """Prefetch the part of the panel that is read ``_AHEAD`` steps later; the next panel follows it."""
        f, width = self.f, self._dot.width
        panel = f.at(start, f.product(unit, width), "i32")
        for offset in range(0, steps * width, 16):
            f.prefetch(f.at(panel, _AHEAD * width + offset, "i32"))


def pack_units_text(
    name: str,
    width: int,
    per: int,
    element: str,
    narrowed: Callable[[MlirRoutine, SsaValue], SsaValue] = lambda f, x: x,
) -> str:
    """MLIR of ``name``: columns of numbers of type ``element`` to rows ``start`` to ``start + k`` of panels.

    ``ptrs``: numbers, to; ``ints``: offset, k, distance of columns, of rows, first column, start, depth. ``per``:
    elements in a unit; ``narrowed`` makes one of a number.
    """
    f = MlirRoutine(name)
    n = f.unpack(f["ints"], "offset k dn dk first start depth".split(), "i64")
    numbers, to = f.get(f["ptrs"], 0, POINTER), f.get(f["ptrs"], 1, POINTER)
    units = f.above(n["depth"], per)
    with f.range(f["begin"], f["end"]) as j:
        column = f.sum(n["first"], j)
        panel = f.product(f.over(column, width), units, width)
        lane = f.rest(column, width)
        with f.range(0, n["k"]) as k:
            at = f.sum(n["offset"], f.product(j, n["dn"]), f.product(k, n["dk"]))
            row = f.sum(n["start"], k)
            unit = f.sum(panel, f.product(f.over(row, per), width), lane)
            place = f.sum(f.product(unit, per), f.rest(row, per))
            f.put(narrowed(f, f.get(numbers, at, element)), to, place)
    return f.text(False) + "\n"
