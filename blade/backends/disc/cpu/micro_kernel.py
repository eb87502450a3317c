# SPDX-License-Identifier: Apache-2.0
"""The GEMM's micro-kernels: a small tile of C in registers while k runs.

One MLIR function per tile shape. A's rows are read in place (one broadcast per element), B from packed
panels; ``init`` (a bias row or C itself) is added last, so that a long k is summed in parts.
"""

from dataclasses import dataclass

from blade.backends.disc.cpu.target import Target

GROUP = 4  # panels that one pass over A's rows meets


@dataclass(frozen=True)
class Tile:
    """A micro-kernel's shape: rows times panels, in registers all at once."""

    rows: int
    panels: int


def rows_per_tile(target: Target) -> int:
    """Rows of the main micro-kernel: with two vectors a row, as many as the registers hold."""
    return 12 if target.lanes == 16 or "asimd" in target.isa else 6


def panel_width(target: Target) -> int:
    """Columns of a panel of packed B."""
    return 2 * target.lanes


def tiles(target: Target) -> list[Tile]:
    """One tile per number of rows, and wider ones where few rows would leave registers idle."""
    full = rows_per_tile(target)
    single = [Tile(rows, 1) for rows in range(1, full + 1)]
    return single + [Tile(rows, min(GROUP, full // rows)) for rows in range(1, full // 2 + 1)]


def tile_name(tile: Tile) -> str:
    return f"gemm_f32_{tile.rows}x{tile.panels}"


_TILE_ARGUMENTS = (
    "%a: !llvm.ptr, %lda: i64, %b: !llvm.ptr, %panel: i64, %depth: i64, "
    "%init: !llvm.ptr, %ldi: i64, %c: !llvm.ptr, %ldc: i64"
)
TILE_TYPES = "(!llvm.ptr, i64, !llvm.ptr, i64, i64, !llvm.ptr, i64, !llvm.ptr, i64) -> ()"


def micro_kernel(tile: Tile, lanes: int) -> str:
    """C tile = init tile + A rows * B panels over ``depth``. ``panel``: distance between panels."""
    vector = f"vector<{lanes}xf32>"
    count = 2 * tile.panels
    cells = [(r, v) for r in range(tile.rows) for v in range(count)]
    lines = [f"llvm.func internal @{tile_name(tile)}({_TILE_ARGUMENTS}) {{", *_INDICES]
    for r in range(tile.rows):
        lines += _row_pointer("init", "ldi", r) + _row_pointer("c", "ldc", r)
        lines += _row_pointer("a", "lda", r)
    for p in range(tile.panels):
        lines += [
            f"%pn{p} = arith.constant {p} : i64",
            f"%po{p} = arith.muli %panel, %pn{p} : i64",
            f"%b{p} = llvm.getelementptr %b[%po{p}] : (!llvm.ptr, i64) -> !llvm.ptr, f32",
        ]
    lines.append(f"%nothing = arith.constant dense<0.0> : {vector}")
    # loop `s` runs over whole fours of k, `t` over what is left; `init` is added last, so that a
    # long k is summed in independent parts
    fours, ones = _depth_loop(tile, lanes, 4), _depth_loop(tile, lanes, 1)
    lines += [
        "%quads = arith.divui %depth, %four : i64",
        "%even = arith.muli %quads, %four : i64",
        *_loop("s", cells, None, "%zero", "%even", "%four", fours, vector),
        *_loop("t", cells, "s", "%even", "%depth", "%one", ones, vector),
    ]
    for at, (r, v) in enumerate(cells):
        lines += _vector_at(f"i{r}_{v}", f"%init{r}", v * lanes)
        lines += _vector_at(f"o{r}_{v}", f"%c{r}", v * lanes)
        lines += [
            f"%z{r}_{v} = llvm.load %i{r}_{v} {_ALIGNED} : !llvm.ptr -> {vector}",
            f"%y{r}_{v} = arith.addf %z{r}_{v}, %t#{at} : {vector}",
            f"llvm.store %y{r}_{v}, %o{r}_{v} {_ALIGNED} : {vector}, !llvm.ptr",
        ]
    return "\n".join([*lines, "llvm.return", "}"])


_ALIGNED = "{alignment = 4 : i64}"
_INDICES = [
    "%zero = arith.constant 0 : i64",
    "%one = arith.constant 1 : i64",
    "%four = arith.constant 4 : i64",
]


def _row_pointer(name: str, distance: str, row: int) -> list[str]:
    return [
        f"%{name}n{row} = arith.constant {row} : i64",
        f"%{name}o{row} = arith.muli %{distance}, %{name}n{row} : i64",
        f"%{name}{row} = llvm.getelementptr %{name}[%{name}o{row}] "
        ": (!llvm.ptr, i64) -> !llvm.ptr, f32",
    ]


def _vector_at(name: str, base: str, offset: int) -> list[str]:
    return [f"%{name} = llvm.getelementptr {base}[{offset}] : (!llvm.ptr) -> !llvm.ptr, f32"]


def _loop(
    name: str,
    cells: list[tuple[int, int]],
    start: str | None,
    low: str,
    high: str,
    step: str,
    body: list[str],
    vector: str,
) -> list[str]:
    """A loop over k that carries the sums of all cells."""
    begins = [f"%{start}#{i}" if start else "%nothing" for i in range(len(cells))]
    carried = ", ".join(f"%x{r}_{v} = {b}" for (r, v), b in zip(cells, begins, strict=True))
    types = ", ".join([vector] * len(cells))
    return [
        f"%{name}:{len(cells)} = scf.for %k = {low} to {high} step {step} "
        f"iter_args({carried}) -> ({types}) : i64 {{",
        *body,
        "}",
    ]


def _depth_loop(tile: Tile, lanes: int, unroll: int) -> list[str]:
    vector, width = f"vector<{lanes}xf32>", 2 * lanes
    sums = {(r, v): f"%x{r}_{v}" for r in range(tile.rows) for v in range(2 * tile.panels)}
    lines = [f"%width = arith.constant {width} : i64", "%at = arith.muli %k, %width : i64"]
    for p in range(tile.panels):
        lines.append(f"%bk{p} = llvm.getelementptr %b{p}[%at] : (!llvm.ptr, i64) -> !llvm.ptr, f32")
    for r in range(tile.rows):
        lines.append(f"%ak{r} = llvm.getelementptr %a{r}[%k] : (!llvm.ptr, i64) -> !llvm.ptr, f32")
    for u in range(unroll):
        for v in range(2 * tile.panels):
            offset = u * width + (v % 2) * lanes
            lines += _vector_at(f"bp{u}_{v}", f"%bk{v // 2}", offset)
            lines.append(f"%bv{u}_{v} = llvm.load %bp{u}_{v} {_ALIGNED} : !llvm.ptr -> {vector}")
        for r in range(tile.rows):
            lines += _vector_at(f"ap{u}_{r}", f"%ak{r}", u)
            lines.append(f"%as{u}_{r} = llvm.load %ap{u}_{r} {_ALIGNED} : !llvm.ptr -> f32")
            lines.append(f"%av{u}_{r} = vector.broadcast %as{u}_{r} : f32 to {vector}")
            for v in range(2 * tile.panels):
                new = f"%f{u}_{r}_{v}"
                lines.append(f"{new} = math.fma %av{u}_{r}, %bv{u}_{v}, {sums[r, v]} : {vector}")
                sums[r, v] = new
    types = ", ".join([vector] * len(sums))
    return [*lines, f"scf.yield {', '.join(sums.values())} : {types}"]
