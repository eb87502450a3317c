# SPDX-License-Identifier: Apache-2.0
"""The GEMM's micro-kernels: a small register tile of C in a loop over k.

There is one MLIR function per tile shape. A's rows are read in place (one broadcast per element), B from a
packed panel. ``init`` (a bias row or C itself) is added last, so that a long k is summed in parts.

    micro_kernel(MicroKernelTile(6, 4), f32, ..)   C[6, 64] = init + A[6, depth] * panel[depth, 64], 16 lanes
"""

from dataclasses import dataclass

from blade.backends.disc.target.cpu import CpuTarget

# Independent sums that hide an FMA's latency: 4 cycles, 2 units.
_CHAINS = 8
# FMAs per loop body: enough to hide the loop's overhead, few enough that LLVM does not hoist
# more loads than the registers hold (it would spill more than it computes).
_BODY = 24
# Prefetch distance of B in steps of k: about 200 ns at full speed, the latency of memory.
_AHEAD = 64


@dataclass(frozen=True)
class GemmTiling:
    """A target's tiling for one element type: ``vectors`` of ``lanes`` per panel, ``rows`` per tile."""

    element: str
    lanes: int
    vectors: int
    rows: int

    @property
    def width(self) -> int:
        """Columns per panel of packed B."""
        return self.lanes * self.vectors

    @property
    def bytes(self) -> int:
        return int(self.element[1:]) // 8

    @property
    def line(self) -> int:
        """Elements per cache line."""
        return 64 // self.bytes

    @property
    def vector(self) -> str:
        return f"vector<{self.lanes}x{self.element}>"


@dataclass(frozen=True)
class MicroKernelTile:
    """A micro-kernel's shape. ``masked``: only existing columns of the last vector are stored."""

    rows: int
    vectors: int
    masked: bool = False


def gemm_tiling(target: CpuTarget, element: str = "f32") -> GemmTiling:
    """The largest tiles that the registers hold: 6 x 4 vectors with 32 registers, 6 x 2 with 16."""
    lanes = target.lanes if element == "f32" else max(1, target.lanes // 2)
    many = target.lanes == 16 or "asimd" in target.isa
    return GemmTiling(element, lanes, 4 if many else 2, 6)


_ARGUMENTS = (
    "%a: !llvm.ptr, %lda: i64, %b: !llvm.ptr, %depth: i64, "
    "%init: !llvm.ptr, %ldi: i64, %c: !llvm.ptr, %ldc: i64, %columns: i64, %soon: !llvm.ptr"
)
TILE_TYPES = (
    "(!llvm.ptr, i64, !llvm.ptr, i64, !llvm.ptr, i64, !llvm.ptr, i64, i64, !llvm.ptr) -> ()"
)


def micro_kernel(tile: MicroKernelTile, form: GemmTiling, name: str) -> str:
    """C tile = init tile + A rows * B panel over ``depth``, as an internal function ``name`` of ``TILE_TYPES``.

    ``columns``: the columns of a masked tile; ``soon``: an address to prefetch from.
    """
    cells = [(r, v) for r in range(tile.rows) for v in range(tile.vectors)]
    chains = 1 << (-(-_CHAINS // len(cells)) - 1).bit_length()
    unroll = chains * max(1, _BODY // (chains * len(cells)))
    lines = [
        f"llvm.func internal @{name}({_ARGUMENTS}) {{",
        "%zero = arith.constant 0 : i64",
        "%one = arith.constant 1 : i64",
        f"%unroll = arith.constant {unroll} : i64",
        f"%width = arith.constant {form.width} : i64",
        f"%nothing = arith.constant dense<0.0> : {form.vector}",
    ]
    for r in range(tile.rows):
        lines += (
            _row(form, "a", "lda", r) + _row(form, "init", "ldi", r) + _row(form, "c", "ldc", r)
        )
    # loop `s` runs over whole bodies, with sums in `chains` independent parts; `t` over the remainder
    start = [["%nothing"] * len(cells) for _ in range(chains)]
    lines += [
        "%whole = arith.divui %depth, %unroll : i64",
        "%even = arith.muli %whole, %unroll : i64",
        *_loop("s", tile, form, ("%zero", "%even", "%unroll"), start, unroll),
    ]
    sums = [f"%s#{i}" for i in range(chains * len(cells))]
    while len(sums) > len(cells):
        half = len(sums) // 2
        for i in range(half):
            lines.append(f"%j{half}_{i} = arith.addf {sums[i]}, {sums[half + i]} : {form.vector}")
        sums = [f"%j{half}_{i}" for i in range(half)]
    lines += _loop("t", tile, form, ("%even", "%depth", "%one"), [sums], 1)
    lines += _mask(tile, form) + [x for i, c in enumerate(cells) for x in _finish(tile, form, c, i)]
    return "\n".join([*lines, "llvm.return", "}"])


def _row(form: GemmTiling, name: str, distance: str, row: int) -> list[str]:
    return [
        f"%{name}n{row} = arith.constant {row} : i64",
        f"%{name}o{row} = arith.muli %{distance}, %{name}n{row} : i64",
        f"%{name}{row} = llvm.getelementptr %{name}[%{name}o{row}] "
        f": (!llvm.ptr, i64) -> !llvm.ptr, {form.element}",
    ]


def _loop(
    name: str,
    tile: MicroKernelTile,
    form: GemmTiling,
    bounds: tuple[str, str, str],
    start: list[list[str]],
    unroll: int,
) -> list[str]:
    """A loop over k that carries the sums of all cells, once per chain: ``start[chain][cell]``."""
    vector, element, chains = form.vector, form.element, len(start)
    cells = [(r, v) for r in range(tile.rows) for v in range(tile.vectors)]
    first = [s for chain in start for s in chain]
    carried = ", ".join(f"%x{i} = {s}" for i, s in enumerate(first))
    types = ", ".join([vector] * len(first))
    sums = [f"%x{i}" for i in range(len(first))]
    lines = [
        f"%{name}:{len(first)} = scf.for %k = {bounds[0]} to {bounds[1]} step {bounds[2]} "
        f"iter_args({carried}) -> ({types}) : i64 {{",
        "%at = arith.muli %k, %width : i64",
        f"%bk = llvm.getelementptr %b[%at] : (!llvm.ptr, i64) -> !llvm.ptr, {element}",
    ]
    for r in range(tile.rows):
        lines.append(
            f"%ak{r} = llvm.getelementptr %a{r}[%k] : (!llvm.ptr, i64) -> !llvm.ptr, {element}"
        )
    if name == "s":
        lines += _fetch_ahead(form, unroll) + _fetch_soon(form, unroll)
    for u in range(unroll):
        for v in range(tile.vectors):
            lines += _at(form, f"bp{u}_{v}", "%bk", u * form.width + v * form.lanes)
            lines.append(
                f"%b{u}_{v} = llvm.load %bp{u}_{v} {_aligned(form)} : !llvm.ptr -> {vector}"
            )
        for r in range(tile.rows):
            lines += _at(form, f"ap{u}_{r}", f"%ak{r}", u)
            lines.append(f"%as{u}_{r} = llvm.load %ap{u}_{r} : !llvm.ptr -> {element}")
            lines.append(f"%a{u}_{r} = vector.broadcast %as{u}_{r} : {element} to {vector}")
            for v in range(tile.vectors):
                at = (u % chains) * len(cells) + r * tile.vectors + v
                new = f"%f{u}_{r}_{v}"
                lines.append(f"{new} = math.fma %a{u}_{r}, %b{u}_{v}, {sums[at]} : {vector}")
                sums[at] = new
    return [*lines, f"scf.yield {', '.join(sums)} : {types}", "}"]


def _fetch_ahead(form: GemmTiling, steps: int) -> list[str]:
    """Prefetch the cache lines of B that ``steps`` later steps read; the next panel follows each panel."""
    step, lines = form.width * form.bytes, []
    for k, offset in enumerate(range(0, steps * step, 64)):
        lines += _at(form, f"next{k}", "%bk", (_AHEAD * step + offset) // form.bytes)
        kind = "<{rw = 0 : i32, hint = 3 : i32, cache = 1 : i32}> : (!llvm.ptr) -> ()"
        lines.append(f'"llvm.intr.prefetch"(%next{k}) {kind}')
    return lines


def _fetch_soon(form: GemmTiling, steps: int) -> list[str]:
    """Prefetch one line of ``soon`` per step into L2: the tiles of a pass share the data of the next pass.

    The first tile of a pass is bound by memory, which reads its panel; the other tiles leave memory idle.
    """
    line = form.line
    lines = [
        f"%line = arith.constant {line} : i64",
        "%soon_at = arith.muli %k, %line : i64",
        f"%soon_k = llvm.getelementptr %soon[%soon_at] : (!llvm.ptr, i64) -> !llvm.ptr, {form.element}",
    ]
    for u in range(steps):
        lines += _at(form, f"soon{u}", "%soon_k", u * line)
        kind = "<{rw = 0 : i32, hint = 2 : i32, cache = 1 : i32}> : (!llvm.ptr) -> ()"
        lines.append(f'"llvm.intr.prefetch"(%soon{u}) {kind}')
    return lines


def _mask(tile: MicroKernelTile, form: GemmTiling) -> list[str]:
    """A mask of the existing columns of the last vector."""
    if not tile.masked:
        return []
    return [
        f"%before = arith.constant {(tile.vectors - 1) * form.lanes} : i64",
        "%last = arith.subi %columns, %before : i64",
        "%count = arith.index_cast %last : i64 to index",
        f"%mask = vector.create_mask %count : vector<{form.lanes}xi1>",
    ]


def _finish(tile: MicroKernelTile, form: GemmTiling, cell: tuple[int, int], at: int) -> list[str]:
    """Store the sum ``%t#at`` plus ``init``."""
    r, v = cell
    lines = _at(form, f"i{r}_{v}", f"%init{r}", v * form.lanes)
    lines += _at(form, f"o{r}_{v}", f"%c{r}", v * form.lanes)
    vector, unaligned = form.vector, f"{{alignment = {form.bytes} : i64}}"
    masked = tile.masked and v == tile.vectors - 1
    if masked:
        types = f"(!llvm.ptr, vector<{form.lanes}xi1>, {vector}) -> {vector}"
        lines.append(
            f"%z{r}_{v} = llvm.intr.masked.load %i{r}_{v}, %mask, %nothing "
            f"{{alignment = {form.bytes} : i32}} : {types}"
        )
    else:
        lines.append(f"%z{r}_{v} = llvm.load %i{r}_{v} {unaligned} : !llvm.ptr -> {vector}")
    lines.append(f"%y{r}_{v} = arith.addf %z{r}_{v}, %t#{at} : {vector}")
    if masked:
        lines.append(
            f"llvm.intr.masked.store %y{r}_{v}, %o{r}_{v}, %mask "
            f"{{alignment = {form.bytes} : i32}} : {vector}, vector<{form.lanes}xi1> into !llvm.ptr"
        )
    else:
        lines.append(f"llvm.store %y{r}_{v}, %o{r}_{v} {unaligned} : {vector}, !llvm.ptr")
    return lines


def _at(form: GemmTiling, name: str, base: str, offset: int) -> list[str]:
    return [
        f"%{name} = llvm.getelementptr {base}[{offset}] : (!llvm.ptr) -> !llvm.ptr, {form.element}"
    ]


def _aligned(form: GemmTiling) -> str:
    """The alignment attribute: packed buffers are aligned to 64 bytes, and panels are whole vectors."""
    return f"{{alignment = {min(64, form.lanes * form.bytes)} : i64}}"
