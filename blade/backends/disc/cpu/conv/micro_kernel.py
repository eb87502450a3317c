# SPDX-License-Identifier: Apache-2.0
"""The convolution's micro-kernels: a small register tile of the result, in a loop over taps and depth.

A tile is some result pixels ("rows") times some vectors of output channels. The inputs are located by a
table with one pointer per tap and row, so that borders, strides and dilation are free here (Dukhan, "The
Indirect Convolution Algorithm", 2019). Weights are packed in panels one vector wide.

    C = init + sum over taps t, depth k of table[t][row][start + k] * panel[vector][t][k]
    last: C = clamp(C + residual, low, high)

For partial panels (tiles of two vectors or one), all passes but the last have infinite bounds and a residual
of zeros.

A tile also prefetches later weights (``ahead``): the first two tiles of a pass together bring the weights of
the next pass into L2.
"""

from dataclasses import dataclass

from blade.backends.disc.cpu.emit.mlir_builder import SsaValue
from blade.backends.disc.cpu.emit.mlir_function import POINTER, MlirRoutine
from blade.backends.disc.target.cpu import CpuTarget

MOST_CUT = 2  # vectors of the widest tile that can store a partial panel
UNROLL = 4  # steps of depth per turn of the inner loop
LINE = 16  # floats of a cache line
AHEAD = 24  # prefetch distance in steps of depth: the latency of L3 at a tile of 14 x 2


@dataclass(frozen=True)
class ConvTile:
    """A micro-kernel's shape: rows times vectors of output channels."""

    rows: int
    vectors: int

    @property
    def name(self) -> str:
        return f"conv_f32_{self.rows}x{self.vectors}"


ARGUMENTS = (
    ("table", POINTER),
    ("pitch", "i64"),  # stride of the table's taps, in rows
    ("taps", "i64"),
    ("start", "i64"),
    ("depth", "i64"),
    ("b", POINTER),
    ("panel", "i64"),  # stride of panels
    ("ahead", POINTER),  # the weights to prefetch, half as many as this tile reads
    ("init", POINTER),
    ("ldi", "i64"),
    ("c", POINTER),
    ("ldc", "i64"),
    ("columns", "i64"),  # that exist from `c` on; tiles of up to MOST_CUT vectors may be partial
    ("last", "i64"),
    ("residual", POINTER),
    ("ldr", "i64"),
    ("low", "f32"),
    ("high", "f32"),
)


def heights(target: CpuTarget) -> tuple[int, ...]:
    """Rows per tile, decreasing: with two vectors a row, the tallest tile fills the registers."""
    return (14, 7, 4, 2, 1) if target.lanes == 16 or "asimd" in target.isa else (6, 3, 2, 1)


def widths(rows: int, target: CpuTarget) -> tuple[int, ...]:
    """Vectors per tile, decreasing: more than two if few rows would leave registers idle."""
    return (4, 2, 1) if 4 * rows <= 2 * heights(target)[0] else (2, 1)


def tiles(target: CpuTarget) -> list[ConvTile]:
    """All tile shapes; smaller ones compute the remaining rows and vectors."""
    return [ConvTile(r, v) for r in heights(target) for v in widths(r, target)]


def signature(tile: ConvTile, lanes: int = 1) -> MlirRoutine:
    """A tile's function with an empty body."""
    return MlirRoutine(tile.name, ARGUMENTS, lanes)


def micro_kernel(tile: ConvTile, lanes: int) -> str:
    """MLIR of one tile's function."""
    f = signature(tile, lanes)
    cells = tile.rows * tile.vectors
    even = f.product(f.over(f["depth"], UNROLL), UNROLL)
    distance = f.product(f["depth"], lanes)
    for r in range(tile.rows):
        for v in range(tile.vectors):  # fetch the lines early: all stores come at the end
            f.prefetch(f.at(f.at(f["c"], f.product(f["ldc"], r)), v * lanes), write=True)
    nothing = f.constant(0.0, "f32", lanes)
    with f.carrying(f.whole(0), f["taps"], 1, [nothing] * cells) as taps:
        first = f.at(f["table"], f.product(taps.index, f["pitch"]), POINTER)
        rows = [f.at(f.get(first, r, POINTER), f["start"]) for r in range(tile.rows)]
        b = f.at(f["b"], f.product(taps.index, distance))
        panels = [f.at(b, f.product(f["panel"], v)) for v in range(tile.vectors)]
        soon = f.at(f["ahead"], f.product(taps.index, f.product(f.over(f["depth"], 2), lanes)))
        soons = [f.at(soon, f.product(f["panel"], v)) for v in range(tile.vectors)]
        sums = taps.values
        for low, high, unroll in ((f.whole(0), even, UNROLL), (even, f["depth"], 1)):
            with f.carrying(low, high, unroll, sums) as depth:
                if unroll > 1:
                    _fetch(f, depth.index, soons, lanes)
                depth.next(_steps(f, depth.index, unroll, rows, panels, depth.values, lanes))
            sums = depth.results
        taps.next(sums)
    sums = taps.results
    _finish(f, tile, sums, lanes)
    return f.text()


def _fetch(f: MlirRoutine, k: SsaValue, soons: list[SsaValue], lanes: int) -> None:
    """Prefetch half as many steps of weights as one turn of the loop computes."""
    at = f.product(f.over(k, 2), lanes)
    for soon in soons:
        for u in range(0, UNROLL // 2 * lanes, LINE):
            f.prefetch(f.at(f.at(soon, at), u), level=2)


def _steps(
    f: MlirRoutine,
    k: SsaValue,
    unroll: int,
    rows: list[SsaValue],
    panels: list[SsaValue],
    sums: list[SsaValue],
    lanes: int,
) -> list[SsaValue]:
    """``unroll`` steps of depth: one broadcast per row, one vector per panel, all products."""
    sums, count = list(sums), len(panels)
    at = f.product(k, lanes)
    tops, lefts = [f.at(p, at) for p in panels], [f.at(r, k) for r in rows]
    for u in range(unroll):  # before all loads: LLVM does not move loads across prefetches
        for top in tops:
            f.prefetch(f.at(top, (u + AHEAD) * lanes))
    for u in range(unroll):
        weights = [f.get(top, u * lanes, lanes=lanes) for top in tops]
        for r, left in enumerate(lefts):
            x = f.broadcast(f.get(left, u), lanes)
            for v, weight in enumerate(weights):
                sums[r * count + v] = f.fma(x, weight, sums[r * count + v])
    return sums


def _finish(f: MlirRoutine, tile: ConvTile, sums: list[SsaValue], lanes: int) -> None:
    """Add the initial values and store: plainly, with the epilogue, or only the columns that exist."""
    if tile.vectors > MOST_CUT:
        _either(f, tile, sums, lanes)
        return
    with f.when(f.test("sge", f["columns"], tile.vectors * lanes)):
        _either(f, tile, sums, lanes)
        f.branch()
        left = [f.minus(f["columns"], v * lanes) for v in range(tile.vectors)]
        _store(f, tile, sums, lanes, [f.first_lanes(n) for n in left], True)


def _either(f: MlirRoutine, tile: ConvTile, sums: list[SsaValue], lanes: int) -> None:
    with f.when(f.test("ne", f["last"], 0)):
        _store(f, tile, sums, lanes, None, True)
        f.branch()
        _store(f, tile, sums, lanes, None, False)


def _store(
    f: MlirRoutine,
    tile: ConvTile,
    sums: list[SsaValue],
    lanes: int,
    masks: list[SsaValue] | None,
    last: bool,
) -> None:
    def read(pointer: SsaValue, vector: int) -> SsaValue:
        if masks is None:
            return f.get(pointer, vector * lanes, lanes=lanes)
        return f.load_masked(f.at(pointer, vector * lanes), masks[vector])

    low, high = (f.broadcast(f[name], lanes) for name in ("low", "high"))
    for r in range(tile.rows):
        init, c, residual = (
            f.at(f[base], f.product(f[distance], r))
            for base, distance in (("init", "ldi"), ("c", "ldc"), ("residual", "ldr"))
        )
        for v in range(tile.vectors):
            y = f.add(sums[r * tile.vectors + v], read(init, v))
            if last:
                y = clamp(f, f.add(y, read(residual, v)), low, high)
            if masks is None:
                f.put(y, c, v * lanes)
            else:
                f.store_masked(y, f.at(c, v * lanes), masks[v])


def clamp(f: MlirRoutine, y: SsaValue, low: SsaValue, high: SsaValue) -> SsaValue:
    """Clamp ``y`` to [``low``, ``high``]; NaN stays NaN, as the second operand, which x86's max returns."""
    y = f.select(f.compare("ogt", low, y), low, y)
    return f.select(f.compare("olt", high, y), high, y)
