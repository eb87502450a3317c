# SPDX-License-Identifier: Apache-2.0
"""The driver of generated products around their micro-kernels: units, rectangles, blocks of rows, tiles.

A unit of work is one panel of columns times one group of rows; gemm.py defines their order. A run of units is split
into rectangles, a rectangle into blocks of rows that stay in L2, and a block into tiles.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from blade.backends.disc.cpu.emit import matrix_tiles
from blade.backends.disc.cpu.emit.matrix_tiles import MatrixTiles
from blade.backends.disc.cpu.emit.mlir_builder import SsaValue
from blade.backends.disc.cpu.emit.mlir_function import POINTER, MlirFunction, MlirRoutine
from blade.backends.disc.cpu.gemm.gemm import (
    BLOCK_ROWS,
    BLOCK_SIZE,
    GROUP_ROWS,
    MANY_ROWS,
)
from blade.backends.disc.cpu.gemm.micro_kernel import MicroKernelTile

RECTANGLE = ("p0", "p1", "r0", "r1")

TILE_GROUP_ROWS = 64  # as GROUP_ROWS, for matrix tiles: no thread has rows of a part of one
TILE_BLOCK_BYTES = 768 * 1024  # of A, per block of rows, beside a panel and the next one in L2


@dataclass(frozen=True)
class PanelTiling:
    """Tiles of ``rows`` by ``vectors`` of ``lanes``; ``edges``: vectors of a last, narrower panel."""

    rows: int
    vectors: int
    lanes: int
    edges: tuple[int, ...] = ()

    @property
    def width(self) -> int:
        return self.lanes * self.vectors

    def tiles(self) -> dict[int, MicroKernelTile]:
        """The tiles by number."""
        shapes = [(self.vectors, False), *((e, True) for e in self.edges)]
        found = [
            MicroKernelTile(r, v, masked) for v, masked in shapes for r in range(1, self.rows + 1)
        ]
        return {t.rows + t.vectors * t.masked * (self.rows + 1): t for t in found}

    def finishing(self) -> dict[int, MicroKernelTile]:
        """Tiles without rows of their own, by the number that the tiles of their panels begin after."""
        whole = {0: MicroKernelTile(0, self.vectors)}
        return whole | {e * (self.rows + 1): MicroKernelTile(0, e, True) for e in self.edges}

    def number(self, f: MlirRoutine, columns: SsaValue) -> SsaValue:
        """The number of a panel's first tile, for ``columns`` columns; the number of rows is added to it."""
        vectors = f.above(columns, self.lanes)
        is_whole = f.test("eq", columns, self.width)
        return f.pick(is_whole, 0, f.product(vectors, self.rows + 1))


def tiling(columns: int, rows: int, vectors: int, lanes: int) -> PanelTiling:
    """The tiling for ``columns`` columns in all."""
    rest = columns % (lanes * vectors)
    return PanelTiling(rows, vectors, lanes, (-(-rest // lanes),) if rest else ())


@dataclass(frozen=True)
class PanelRows:
    """Rows of one panel: first column, number of columns, first row, number of rows."""

    first: SsaValue
    columns: SsaValue
    row: SsaValue
    rows: SsaValue


@dataclass(frozen=True)
class MicroKernels:
    """The functions of a product: of its tiles, by number, and of its matrix tiles, where the target has them.

    ``finishing``: by the number of a panel's first tile, what finishes any number of rows that matrix tiles summed.
    """

    tiles: Mapping[int, MlirFunction]
    matrix: MatrixTiles | None = None
    finishing: Mapping[int, MlirFunction] = field(default_factory=dict)

    @property
    def functions(self) -> list[MlirFunction]:
        more = self.matrix.functions if self.matrix else ()
        return [*self.tiles.values(), *self.finishing.values(), *more]


Panel = Callable[[MlirRoutine, MicroKernels, PanelRows], None]
"""Emits the tiles of some rows of a panel."""


def micro_kernels(
    name: str,
    tiles: PanelTiling,
    kernel: Callable[[MicroKernelTile, str], MlirRoutine],
    matrix: MatrixTiles | None,
) -> MicroKernels:
    """The functions of the product ``name``; ``kernel`` makes that of a tile under a name."""
    made = {n: kernel(tile, f"{name}_tile{n}") for n, tile in tiles.tiles().items()}
    if matrix is None:
        return MicroKernels(made)
    finishing = {n: kernel(tile, f"{name}_finish{n}") for n, tile in tiles.finishing().items()}
    return MicroKernels(made, matrix, finishing)


def product_text(
    name: str,
    pointers: Sequence[str],
    numbers: Sequence[str],
    tiles: PanelTiling,
    kernels: MicroKernels,
    panel: Panel,
) -> str:
    """MLIR of the driver ``name`` and its micro-kernels. ``numbers`` include ``n`` and ``k``, not ``m``."""
    integers = [(n, "i64") for n in (*numbers, *RECTANGLE)]
    arguments = [*((p, POINTER) for p in pointers), *integers]
    block = MlirRoutine(f"{name}_block", arguments, tiles.lanes)

    def rows(at: SsaValue, start: SsaValue, height: SsaValue) -> None:
        first = block.product(at, tiles.width)
        columns = block.least(block.minus(block["n"], first), tiles.width)
        panel(block, kernels, PanelRows(first, columns, start, height))

    blocks(block, rows, kernels.matrix)
    drive = driver(name, pointers, numbers, tiles, block, kernels.matrix)
    functions = [*kernels.functions, block]
    return "\n".join([*(f.text() for f in functions), drive.text(False)]) + "\n"


def driver(
    name: str,
    pointers: Sequence[str],
    numbers: Sequence[str],
    tiles: PanelTiling,
    block: MlirFunction,
    matrix: MatrixTiles | None = None,
) -> MlirRoutine:
    """``name(ptrs, ints = m, *numbers; units)``: a run of units as at most three rectangles.

    The rectangles are the end of a row of units, whole rows, and the start of a row. ``block`` takes the
    pointers, the numbers (which include ``n``) and ``RECTANGLE``.
    """
    f = MlirRoutine(name, lanes=tiles.lanes)
    given = f.unpack(f["ptrs"], pointers, POINTER) | f.unpack(f["ints"], ["m", *numbers], "i64")
    m = given.pop("m")
    most = group_rows(matrix is not None)
    groups, panels = f.above(m, most), f.above(given["n"], tiles.width)
    by_rows = f.test("sge", m, MANY_ROWS)

    def first_row(group: SsaValue) -> SsaValue:
        if matrix is not None:
            return f.least(f.product(group, most), m)
        return f.over(f.product(group, m), groups)

    fast = f.pick(by_rows, panels, groups)
    with f.carrying(f.whole(0), f.whole(3), 1, [f["begin"]]) as piece:
        (at,) = piece.values
        left = f.minus(f["end"], at)
        s0, f0 = f.over(at, fast), f.rest(at, fast)
        is_whole = f.both(f.test("eq", f0, 0), f.test("sge", left, fast))
        ns = f.pick(is_whole, f.over(left, fast), 1)
        nf = f.pick(is_whole, fast, f.least(f.minus(fast, f0), left))
        s1, f1 = f.sum(s0, ns), f.sum(f0, nf)
        g0, g1 = f.pick(by_rows, s0, f0), f.pick(by_rows, s1, f1)
        with f.when(f.test("sgt", left, 0)):
            f.run(
                block,
                **given,
                p0=f.pick(by_rows, f0, s0),
                p1=f.pick(by_rows, f1, s1),
                r0=first_row(g0),
                r1=first_row(g1),
            )
        piece.next([f.sum(at, f.product(ns, nf))])
    return f


def group_rows(in_tiles: bool) -> int:
    """The rows of a unit, at most; ``in_tiles``: of a product on matrix tiles."""
    return TILE_GROUP_ROWS if in_tiles else GROUP_ROWS


def blocks(
    f: MlirRoutine,
    panel: Callable[[SsaValue, SsaValue, SsaValue], None],
    matrix: MatrixTiles | None = None,
) -> None:
    """Call ``panel(panel, first row, rows)`` for each panel of each block in the rectangle of ``f``."""
    depth = f.most(f["k"], 1)
    rows = f.minus(f["r1"], f["r0"])
    if matrix is None:
        fit = f.most(f.least(f.over(BLOCK_SIZE, depth), BLOCK_ROWS), GROUP_ROWS)
    else:
        size = TILE_BLOCK_BYTES * matrix.form.per // 4  # elements
        fit = f.most(f.over(size, depth), matrix_tiles.ROWS)
    share = f.above(rows, f.above(rows, fit))
    if matrix is not None:
        share = f.product(f.above(share, matrix_tiles.ROWS), matrix_tiles.ROWS)
    with f.loop(f["r0"], f["r1"], share) as start:
        height = f.minus(f.least(f.sum(start, share), f["r1"]), start)
        with f.loop(f["p0"], f["p1"], 1) as at:
            panel(at, start, height)


def tiles_of_rows(
    f: MlirRoutine,
    tiles: PanelTiling,
    kernels: MicroKernels,
    place: PanelRows,
    arguments: Callable[[SsaValue], dict[str, SsaValue]],
) -> None:
    """Run the tiles of one panel; ``arguments(row)`` are those of the tile that starts at ``row``.

    Matrix tiles first sum what they can of 32 rows, on the stack.
    """
    if kernels.matrix is None:
        _tiles(f, tiles, kernels.tiles, place, arguments)
        return
    matrix, size = kernels.matrix, matrix_tiles.ROWS
    sums = f.stack(size * tiles.width)
    turns = f.above(place.rows, size)
    with matrix_tiles.configured(f, matrix.form.dot), f.range(0, turns) as turn:
        first = f.sum(place.row, f.product(turn, size))
        rows = f.least(f.minus(place.rows, f.product(turn, size)), size)
        given = arguments(first)
        done = matrix.run(f, given, rows, sums, turn, turns)

        def begun(row: SsaValue) -> dict[str, SsaValue]:
            before = f.at(sums, f.product(f.minus(row, first), tiles.width))
            return {**arguments(row), "before": before, "done": done}

        with f.when(f.test("eq", f.product(done, matrix.form.per), given["k"])):
            number = tiles.number(f, place.columns)
            f.switch(number, kernels.finishing, {**given, "before": sums, "rows": rows})
            f.branch()
            here = PanelRows(place.first, place.columns, first, rows)
            _tiles(f, tiles, kernels.tiles, here, begun)


def _tiles(
    f: MlirRoutine,
    tiles: PanelTiling,
    kernels: Mapping[int, MlirFunction],
    place: PanelRows,
    arguments: Callable[[SsaValue], dict[str, SsaValue]],
) -> None:
    """Tiles differ by at most one row: 16 rows = 6 + 5 + 5."""
    base = tiles.number(f, place.columns)
    count = f.above(place.rows, tiles.rows)
    least, larger = f.over(place.rows, count), f.rest(place.rows, count)
    with f.carrying(f.whole(0), count, 1, [place.row]) as tile:
        (r,) = tile.values
        here = f.sum(least, f.pick(f.test("slt", tile.index, larger), 1, 0))
        f.switch(f.sum(base, here), dict(kernels), arguments(r))
        tile.next([f.sum(r, here)])


def joined(f: MlirRoutine, values: list[SsaValue], count: int) -> list[SsaValue]:
    """Reduce ``values`` (``count`` times a power of two) to ``count`` sums; pairs are half the list apart."""
    while len(values) > count:
        half = len(values) // 2
        values = [f.add(a, b) for a, b in zip(values[:half], values[half:], strict=True)]
    return values
