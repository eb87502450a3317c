# SPDX-License-Identifier: Apache-2.0
"""The generated GEMM: ``C[m, n] = bias[n] + sum_k A[m, k] * B[k, n]`` over a packed B, in f32.

One driver and a few micro-kernels serve every shape; sizes are arguments. B is packed once per loaded
engine in panels of ``width`` columns, ``panel[p][k][j] = B[k, p * width + j]``, zero beyond n. The
structure is Goto and van de Geijn's ("Anatomy of High-Performance Matrix Multiplication", 2008), without
packing A: its rows are read in place, one broadcast per element, while a block of B stays in L2.

    gemm(ptrs = A, B, bias, C; ints = m, n, k, lda, ldc), units = row blocks x panels, panels fastest

Units are handed to threads in runs: with few rows every thread has its own part of B, with many its
own rows.
"""

from collections.abc import Sequence

from blade.backends.disc.cpu.micro_kernel import (
    GROUP,
    TILE_TYPES,
    Tile,
    micro_kernel,
    panel_width,
    rows_per_tile,
    tile_name,
    tiles,
)
from blade.backends.disc.cpu.target import Target

BLOCK_ROWS = 256  # rows per unit, at most: A's block is read once per group of panels
BLOCK_DEPTH = 256  # k per pass over C: a group of panels is then 4 * width * 384 floats of L2
NAME = "gemm_f32"
PACK = "gemm_f32_pack"


def panels(columns: int, target: Target) -> int:
    """How many panels hold ``columns`` columns of B."""
    return -(-columns // panel_width(target))


def gemm_text(target: Target) -> str:
    """MLIR of the driver ``gemm_f32`` and its micro-kernels."""
    parts = [_zeros(target)] + [micro_kernel(t, target.lanes) for t in tiles(target)]
    return "\n".join([*parts, _edge(target), _driver(target)]) + "\n"


def pack_text(target: Target) -> str:
    """MLIR of ``gemm_f32_pack``: ``n`` columns of a matrix become columns ``first...`` of packed panels.

    ``(ptrs = B, packed; ints = offset, k, distance of columns, of rows, first), units = columns``.
    With k = 1 it lays out a bias: the columns one after the other.
    """
    return f"""llvm.func @{PACK}(%ptrs: !llvm.ptr, %ints: !llvm.ptr, %begin: i64, %end: i64) {{
%zero = arith.constant 0 : i64
%one = arith.constant 1 : i64
%width = arith.constant {panel_width(target)} : i64
{_arguments(("source", "to"), ("offset", "k", "dn", "dk", "first"))}
%b = llvm.getelementptr %source[%offset] : (!llvm.ptr, i64) -> !llvm.ptr, f32
%panel = arith.muli %k, %width : i64
scf.for %j = %begin to %end step %one : i64 {{
  %fo = arith.muli %j, %dn : i64
  %column = arith.addi %first, %j : i64
  %p = arith.divui %column, %width : i64
  %lane = arith.remui %column, %width : i64
  %po = arith.muli %p, %panel : i64
  %start = arith.addi %po, %lane : i64
  scf.for %i = %zero to %k step %one : i64 {{
    %fk = arith.muli %i, %dk : i64
    %f = arith.addi %fo, %fk : i64
    %tk = arith.muli %i, %width : i64
    %t = arith.addi %start, %tk : i64
    %fp = llvm.getelementptr %b[%f] : (!llvm.ptr, i64) -> !llvm.ptr, f32
    %tp = llvm.getelementptr %to[%t] : (!llvm.ptr, i64) -> !llvm.ptr, f32
    %x = llvm.load %fp : !llvm.ptr -> f32
    llvm.store %x, %tp : f32, !llvm.ptr
  }}
}}
llvm.return
}}
"""


def _zeros(target: Target) -> str:
    count = panel_width(target)
    return (
        f"llvm.mlir.global internal constant @gemm_zeros(dense<0.0> : vector<{count}xf32>) "
        f": !llvm.array<{count} x f32>"
    )


def _edge(target: Target) -> str:
    """The last panel where n is no multiple of the width: a tile aside, then its columns copied."""
    full, width = rows_per_tile(target), panel_width(target)
    picks = []
    for rows in range(1, full + 1):
        picks.append(
            f"case {rows} {{\nllvm.call @{tile_name(Tile(rows, 1))}(%a, %lda, %b, %zero, %depth, %zeros, "
            f"%zero, %tile, %width) : {TILE_TYPES}\nscf.yield\n}}"
        )
    arguments = (
        "%rows: i64, %columns: i64, %a: !llvm.ptr, %lda: i64, %b: !llvm.ptr, %depth: i64, "
        "%init: !llvm.ptr, %ldi: i64, %c: !llvm.ptr, %ldc: i64"
    )
    return f"""llvm.func internal @gemm_f32_edge({arguments}) {{
%zero = arith.constant 0 : i64
%one = arith.constant 1 : i64
%width = arith.constant {width} : i64
%size = arith.constant {full * width} : i64
%zeros = llvm.mlir.addressof @gemm_zeros : !llvm.ptr
%tile = llvm.alloca %size x f32 {{alignment = 64 : i64}} : (i64) -> !llvm.ptr
%which = arith.index_cast %rows : i64 to index
scf.index_switch %which
{chr(10).join(picks)}
default {{
}}
scf.for %r = %zero to %rows step %one : i64 {{
  %from = arith.muli %r, %width : i64
  %to = arith.muli %r, %ldc : i64
  %ir = arith.muli %r, %ldi : i64
  scf.for %j = %zero to %columns step %one : i64 {{
    %fj = arith.addi %from, %j : i64
    %tj = arith.addi %to, %j : i64
    %fp = llvm.getelementptr %tile[%fj] : (!llvm.ptr, i64) -> !llvm.ptr, f32
    %ij = arith.addi %ir, %j : i64
    %bp = llvm.getelementptr %init[%ij] : (!llvm.ptr, i64) -> !llvm.ptr, f32
    %tp = llvm.getelementptr %c[%tj] : (!llvm.ptr, i64) -> !llvm.ptr, f32
    %x = llvm.load %fp : !llvm.ptr -> f32
    %y = llvm.load %bp : !llvm.ptr -> f32
    %s = arith.addf %x, %y : f32
    llvm.store %s, %tp : f32, !llvm.ptr
  }}
}}
llvm.return
}}"""


def _driver(target: Target) -> str:
    """Loops over row blocks, groups of panels, passes over k and tiles."""
    full, width = rows_per_tile(target), panel_width(target)
    return f"""llvm.func @{NAME}(%ptrs: !llvm.ptr, %ints: !llvm.ptr, %begin: i64, %end: i64) {{
%zero = arith.constant 0 : i64
%one = arith.constant 1 : i64
%full = arith.constant {full} : i64
%width = arith.constant {width} : i64
%group = arith.constant {GROUP} : i64
%limit = arith.constant {BLOCK_ROWS} : i64
%deep = arith.constant {BLOCK_DEPTH} : i64
{_arguments(("a", "b", "bias", "c"), ("m", "n", "k", "lda", "ldc"))}
%panels = arith.ceildivsi %n, %width : i64
%tail = arith.remui %n, %width : i64
%even = arith.divui %n, %width : i64
%panel = arith.muli %k, %width : i64
%blocks = arith.ceildivsi %m, %limit : i64
%share = arith.ceildivsi %m, %blocks : i64
%share_tiles = arith.ceildivsi %share, %full : i64
%step = arith.muli %share_tiles, %full : i64
%passes = arith.ceildivsi %k, %deep : i64
%pass_share = arith.ceildivsi %k, %passes : i64
%first = arith.divui %begin, %panels : i64
%stop = arith.ceildivsi %end, %panels : i64
scf.for %block = %first to %stop step %one : i64 {{
  %base = arith.muli %block, %panels : i64
  %low = arith.subi %begin, %base : i64
  %p0 = arith.maxsi %low, %zero : i64
  %high = arith.subi %end, %base : i64
  %p1 = arith.minsi %high, %panels : i64
  %r0 = arith.muli %block, %step : i64
  %r_end = arith.addi %r0, %step : i64
  %r1 = arith.minsi %r_end, %m : i64
  %whole = arith.minsi %p1, %even : i64
  scf.for %pg = %p0 to %whole step %group : i64 {{
    %pg_end = arith.addi %pg, %group : i64
    %pe = arith.minsi %pg_end, %whole : i64
    scf.for %k0 = %zero to %k step %pass_share : i64 {{
      %k_end = arith.addi %k0, %pass_share : i64
      %k1 = arith.minsi %k_end, %k : i64
      %depth = arith.subi %k1, %k0 : i64
      %is_first = arith.cmpi eq, %k0, %zero : i64
      %ak = llvm.getelementptr %a[%k0] : (!llvm.ptr, i64) -> !llvm.ptr, f32
      scf.for %r = %r0 to %r1 step %full : i64 {{
        %left = arith.subi %r1, %r : i64
        %rows = arith.minsi %left, %full : i64
        %ro = arith.muli %r, %lda : i64
        %ar = llvm.getelementptr %ak[%ro] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %co = arith.muli %r, %ldc : i64
        %cr = llvm.getelementptr %c[%co] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %which = arith.index_cast %rows : i64 to index
        scf.index_switch %which
{_cases(target)}
        default {{
        }}
      }}
    }}
  }}
  %has_tail = arith.cmpi sgt, %p1, %even : i64
  scf.if %has_tail {{
    %bo = arith.muli %even, %panel : i64
    %bt = llvm.getelementptr %b[%bo] : (!llvm.ptr, i64) -> !llvm.ptr, f32
    %j = arith.muli %even, %width : i64
    %biasj = llvm.getelementptr %bias[%j] : (!llvm.ptr, i64) -> !llvm.ptr, f32
    scf.for %k0 = %zero to %k step %pass_share : i64 {{
      %k_end = arith.addi %k0, %pass_share : i64
      %k1 = arith.minsi %k_end, %k : i64
      %depth = arith.subi %k1, %k0 : i64
      %is_first = arith.cmpi eq, %k0, %zero : i64
      %ldi = arith.select %is_first, %zero, %ldc : i64
      %bd = arith.muli %k0, %width : i64
      %bk = llvm.getelementptr %bt[%bd] : (!llvm.ptr, i64) -> !llvm.ptr, f32
      %ak = llvm.getelementptr %a[%k0] : (!llvm.ptr, i64) -> !llvm.ptr, f32
      scf.for %r = %r0 to %r1 step %full : i64 {{
        %left = arith.subi %r1, %r : i64
        %rows = arith.minsi %left, %full : i64
        %ro = arith.muli %r, %lda : i64
        %ar = llvm.getelementptr %ak[%ro] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %co = arith.muli %r, %ldc : i64
        %cj = arith.addi %co, %j : i64
        %cr = llvm.getelementptr %c[%cj] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %init = arith.select %is_first, %biasj, %cr : !llvm.ptr
        llvm.call @gemm_f32_edge(%rows, %tail, %ar, %lda, %bk, %depth, %init, %ldi, %cr, %ldc)
          : (i64, i64, !llvm.ptr, i64, !llvm.ptr, i64, !llvm.ptr, i64, !llvm.ptr, i64) -> ()
      }}
    }}
  }}
}}
llvm.return
}}"""


def _arguments(pointers: Sequence[str], numbers: Sequence[str]) -> str:
    """Load a kernel's arguments under these names, in the order of ``ptrs`` and of ``ints``."""
    lines = []
    for base, kind, names in (("ptrs", "!llvm.ptr", pointers), ("ints", "i64", numbers)):
        for k, name in enumerate(names):
            lines += [
                f"%at_{name} = llvm.getelementptr %{base}[{k}] : (!llvm.ptr) -> !llvm.ptr, {kind}",
                f"%{name} = llvm.load %at_{name} : !llvm.ptr -> {kind}",
            ]
    return "\n".join(lines)


def _cases(target: Target) -> str:
    """Per number of rows: wide tiles over the group while they fit, then single panels."""
    full = rows_per_tile(target)
    wide = {t.rows: t for t in tiles(target) if t.panels > 1}
    return "\n".join(_case(rows, wide.get(rows)) for rows in range(1, full + 1))


def _case(rows: int, wide: Tile | None) -> str:
    lines = [f"case {rows} {{"]
    start = "%pg"
    if wide is not None:
        lines += [
            f"%np = arith.constant {wide.panels} : i64",
            "%count = arith.subi %pe, %pg : i64",
            "%times = arith.divui %count, %np : i64",
            "%covered = arith.muli %times, %np : i64",
            "%middle = arith.addi %pg, %covered : i64",
            *_tile_loop("%pg", "%middle", "%np", wide),
        ]
        start = "%middle"
    lines += [*_tile_loop(start, "%pe", "%one", Tile(rows, 1)), "scf.yield", "}"]
    return "\n".join(lines)


def _tile_loop(low: str, high: str, step: str, tile: Tile) -> list[str]:
    """Tiles of one row block along the panels; the sums start from the bias, later from C."""
    return [
        f"scf.for %p = {low} to {high} step {step} : i64 {{",
        "%bp = arith.muli %p, %panel : i64",
        "%bd = arith.muli %k0, %width : i64",
        "%bo = arith.addi %bp, %bd : i64",
        "%bt = llvm.getelementptr %b[%bo] : (!llvm.ptr, i64) -> !llvm.ptr, f32",
        "%j = arith.muli %p, %width : i64",
        "%cj = llvm.getelementptr %cr[%j] : (!llvm.ptr, i64) -> !llvm.ptr, f32",
        "%biasj = llvm.getelementptr %bias[%j] : (!llvm.ptr, i64) -> !llvm.ptr, f32",
        "%init = arith.select %is_first, %biasj, %cj : !llvm.ptr",
        "%ldi = arith.select %is_first, %zero, %ldc : i64",
        f"llvm.call @{tile_name(tile)}(%ar, %lda, %bt, %panel, %depth, %init, %ldi, %cj, %ldc) : {TILE_TYPES}",
        "}",
    ]
