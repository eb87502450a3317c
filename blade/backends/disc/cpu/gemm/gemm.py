# SPDX-License-Identifier: Apache-2.0
"""The generated GEMM: ``C[m, n] = bias[n] + sum_k A[m, k] * B[k, n]`` over a packed B.

One driver and a few micro-kernels handle all shapes; sizes are arguments. B is packed once per loaded
engine in panels of ``width`` columns, ``panel[p][k][j] = B[k, p * width + j]``, zero beyond n. The
structure follows Goto and van de Geijn ("Anatomy of High-Performance Matrix Multiplication", 2008), but A is
not packed: its rows are read in place, one broadcast per element, while a block of B stays in L2.

    gemm(ptrs = A, B, bias, C; ints = m, n, k, lda, ldc), units = panels x row groups

With few rows, row groups are counted fastest: a thread's run of units is a range of columns, so each thread
reads its own weights, the same in every call. With many rows, panels are counted fastest: a thread then has
the same rows as in the kernels before and after, which split by rows.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from blade.backends.disc.cpu.gemm.micro_kernel import (
    TILE_TYPES,
    GemmTiling,
    MicroKernelTile,
    micro_kernel,
)

GROUP_ROWS = 48  # rows of a unit, at most
MANY_ROWS = 256  # from here on work is split by rows, as in other kernels, not by columns
BLOCK_DEPTH = 384  # k per pass over C: a pass reads 96 KiB of a panel, which fits L2
BLOCK_SIZE = 128 * 1024  # elements of A per block of rows, which stays in L2: 512 KiB
BLOCK_ROWS = 192  # rows of such a block, at most; at least GROUP_ROWS


@dataclass(frozen=True)
class GemmKernel:
    """The code of a GEMM; ``edges``: numbers of vectors that a last, narrower panel may hold."""

    form: GemmTiling
    edges: tuple[int, ...] = ()
    kind: str = "gemm"

    @property
    def name(self) -> str:
        return f"{self.kind}_{self.form.element}" + "".join(f"_edge{e}" for e in self.edges)

    def tile_name(self, tile: MicroKernelTile) -> str:
        return f"{self.name}_{tile.rows}x{tile.vectors}{'_masked' * tile.masked}"

    @property
    def tiles(self) -> list[MicroKernelTile]:
        """One tile per number of rows."""
        return [MicroKernelTile(rows, self.form.vectors) for rows in range(1, self.form.rows + 1)]

    @property
    def edge_tiles(self) -> list[MicroKernelTile]:
        """Tiles of the last panel, which may be narrower."""
        return [
            MicroKernelTile(r, e, True) for e in self.edges for r in range(1, self.form.rows + 1)
        ]


def gemm_for(columns: int, form: GemmTiling) -> GemmKernel:
    """The code for a product with ``columns`` columns."""
    rest = columns % form.width
    return GemmKernel(form, (-(-rest // form.lanes),) if rest else ())


def pack_name(form: GemmTiling) -> str:
    return f"gemm_{form.element}_pack"


def panels(columns: int, form: GemmTiling) -> int:
    """The number of panels of ``columns`` columns of B."""
    return -(-columns // form.width)


@functools.lru_cache(maxsize=64)
def gemm_text(gemm: GemmKernel) -> str:
    """MLIR of the driver and its micro-kernels."""
    return f"{product_text(gemm)}\n{_driver(gemm)}\n"


def product_text(gemm: GemmKernel) -> str:
    """MLIR of the micro-kernels and of ``NAME_block``, which multiplies panels with rows."""
    tiles = gemm.tiles + gemm.edge_tiles
    parts = [micro_kernel(tile, gemm.form, gemm.tile_name(tile)) for tile in tiles]
    return "\n".join([*parts, _choice(gemm), _block(gemm)])


@functools.lru_cache(maxsize=64)
def pack_text(form: GemmTiling) -> str:
    """MLIR of the packing: ``n`` columns of a matrix become columns ``first...`` of packed panels.

    ``(ptrs = B, packed; ints = offset, k, distance of columns, of rows, first), units = columns``.
    With k = 1 it packs a bias: the columns one after the other.
    """
    return f"""llvm.func @{pack_name(form)}(%ptrs: !llvm.ptr, %ints: !llvm.ptr, %begin: i64, %end: i64) {{
%zero = arith.constant 0 : i64
%one = arith.constant 1 : i64
%width = arith.constant {form.width} : i64
{_arguments(("source", "to"), ("offset", "k", "dn", "dk", "first"))}
%b = llvm.getelementptr %source[%offset] : (!llvm.ptr, i64) -> !llvm.ptr, {form.element}
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
    %fp = llvm.getelementptr %b[%f] : (!llvm.ptr, i64) -> !llvm.ptr, {form.element}
    %tp = llvm.getelementptr %to[%t] : (!llvm.ptr, i64) -> !llvm.ptr, {form.element}
    %x = llvm.load %fp : !llvm.ptr -> {form.element}
    llvm.store %x, %tp : {form.element}, !llvm.ptr
  }}
}}
llvm.return
}}
"""


def _driver(gemm: GemmKernel) -> str:
    """A run of units as rectangles: the end of a row of units, whole rows, and the start of a row."""
    return f"""llvm.func @{gemm.name}(%ptrs: !llvm.ptr, %ints: !llvm.ptr, %begin: i64, %end: i64) {{
%one = arith.constant 1 : i64
%zero = arith.constant 0 : i64
%limit = arith.constant {GROUP_ROWS} : i64
%width = arith.constant {gemm.form.width} : i64
%many = arith.constant {MANY_ROWS} : i64
{_arguments(("a", "b", "bias", "c"), ("m", "n", "k", "lda", "ldc"))}
%groups = arith.ceildivui %m, %limit : i64
%panels = arith.ceildivui %n, %width : i64
%by_rows = arith.cmpi sge, %m, %many : i64
%fast = arith.select %by_rows, %panels, %groups : i64
scf.while (%at = %begin) : (i64) -> i64 {{
  %more = arith.cmpi slt, %at, %end : i64
  scf.condition(%more) %at : i64
}} do {{
^bb0(%at: i64):
  %s0 = arith.divui %at, %fast : i64
  %f0 = arith.remui %at, %fast : i64
  %left = arith.subi %end, %at : i64
  %whole = arith.divui %left, %fast : i64
  %starts = arith.cmpi eq, %f0, %zero : i64
  %some = arith.cmpi sge, %whole, %one : i64
  %is_whole = arith.andi %starts, %some : i1
  %rest = arith.subi %fast, %f0 : i64
  %part = arith.minsi %rest, %left : i64
  %ns = arith.select %is_whole, %whole, %one : i64
  %nf = arith.select %is_whole, %fast, %part : i64
  %s1 = arith.addi %s0, %ns : i64
  %f1 = arith.addi %f0, %nf : i64
  %p0 = arith.select %by_rows, %f0, %s0 : i64
  %p1 = arith.select %by_rows, %f1, %s1 : i64
  %g0 = arith.select %by_rows, %s0, %f0 : i64
  %g1 = arith.select %by_rows, %s1, %f1 : i64
  %low = arith.muli %g0, %m : i64
  %r0 = arith.divui %low, %groups : i64
  %high = arith.muli %g1, %m : i64
  %r1 = arith.divui %high, %groups : i64
  llvm.call @{gemm.name}_block(%a, %b, %bias, %c, %n, %k, %lda, %ldc, %p0, %p1, %r0, %r1, %zero)
    : (!llvm.ptr, !llvm.ptr, !llvm.ptr, !llvm.ptr, i64, i64, i64, i64, i64, i64, i64, i64, i64) -> ()
  %units = arith.muli %ns, %nf : i64
  %next = arith.addi %at, %units : i64
  scf.yield %next : i64
}}
llvm.return
}}"""


BLOCK_POINTERS = "a b bias c".split()
BLOCK_NUMBERS = "n k lda ldc p0 p1 r0 r1 before".split()


def _block(gemm: GemmKernel) -> str:
    """Panels p0..p1 times rows r0..r1: the loops over row blocks, panels, passes over k and tiles.

    If k is 0 there is still one pass, which writes the bias. If parts of k came ``before``, the pass adds to
    C. The data of the next pass follows that of this pass in B, except for panels packed on the fly
    (batched_matmul.py).

    Tiles of a block differ by at most one row: 16 rows = 6 + 5 + 5.
    """
    pointers = [f"%{name}: !llvm.ptr" for name in BLOCK_POINTERS]
    arguments = ", ".join([*pointers, *(f"%{name}: i64" for name in BLOCK_NUMBERS)])
    form, element = gemm.form, gemm.form.element
    return f"""llvm.func internal @{gemm.name}_block({arguments}) {{
%zero = arith.constant 0 : i64
%one = arith.constant 1 : i64
%full = arith.constant {form.rows} : i64
%width = arith.constant {form.width} : i64
%most = arith.constant {BLOCK_ROWS} : i64
%fewest = arith.constant {GROUP_ROWS} : i64
%size = arith.constant {BLOCK_SIZE} : i64
%deep = arith.constant {BLOCK_DEPTH} : i64
%line = arith.constant {form.line} : i64
%parts = arith.constant {max(1, form.width // form.line)} : i64
%panel = arith.muli %k, %width : i64
%k_end = arith.maxsi %k, %one : i64
%passes = arith.ceildivui %k_end, %deep : i64
%depth_limit = arith.ceildivui %k_end, %passes : i64
%fit = arith.divui %size, %k_end : i64
%fit_most = arith.minsi %fit, %most : i64
%limit = arith.maxsi %fit_most, %fewest : i64
%rows = arith.subi %r1, %r0 : i64
%blocks = arith.ceildivui %rows, %limit : i64
%share = arith.ceildivui %rows, %blocks : i64
scf.for %rb = %r0 to %r1 step %share : i64 {{
  %rb_end = arith.addi %rb, %share : i64
  %re = arith.minsi %rb_end, %r1 : i64
  %height = arith.subi %re, %rb : i64
  %tiles = arith.ceildivui %height, %full : i64
  %least = arith.divui %height, %tiles : i64
  %larger = arith.remui %height, %tiles : i64
  scf.for %p = %p0 to %p1 step %one : i64 {{
    %j = arith.muli %p, %width : i64
    %n_left = arith.subi %n, %j : i64
    %columns = arith.minsi %n_left, %width : i64
    %bo = arith.muli %p, %panel : i64
    %bp = llvm.getelementptr %b[%bo] : (!llvm.ptr, i64) -> !llvm.ptr, {element}
    %biasj = llvm.getelementptr %bias[%j] : (!llvm.ptr, i64) -> !llvm.ptr, {element}
    %cj = llvm.getelementptr %c[%j] : (!llvm.ptr, i64) -> !llvm.ptr, {element}
    scf.for %k0 = %zero to %k_end step %depth_limit : i64 {{
      %k_left = arith.subi %k, %k0 : i64
      %depth = arith.minsi %k_left, %depth_limit : i64
      %earlier = arith.addi %k0, %before : i64
      %is_first = arith.cmpi eq, %earlier, %zero : i64
      %ldi = arith.select %is_first, %zero, %ldc : i64
      %ak = llvm.getelementptr %a[%k0] : (!llvm.ptr, i64) -> !llvm.ptr, {element}
      %bd = arith.muli %k0, %width : i64
      %bt = llvm.getelementptr %bp[%bd] : (!llvm.ptr, i64) -> !llvm.ptr, {element}
      %read = arith.muli %depth, %{"width" if gemm.kind == "gemm" else "zero"} : i64
      %after = llvm.getelementptr %bt[%read] : (!llvm.ptr, i64) -> !llvm.ptr, {element}
      %part = arith.muli %depth, %line : i64
      scf.for %t = %zero to %tiles step %one iter_args(%r = %rb) -> (i64) : i64 {{
        %is_larger = arith.cmpi slt, %t, %larger : i64
        %extra = arith.extui %is_larger : i1 to i64
        %count = arith.addi %least, %extra : i64
        %ro = arith.muli %r, %lda : i64
        %ar = llvm.getelementptr %ak[%ro] : (!llvm.ptr, i64) -> !llvm.ptr, {element}
        %co = arith.muli %r, %ldc : i64
        %cr = llvm.getelementptr %cj[%co] : (!llvm.ptr, i64) -> !llvm.ptr, {element}
        %init = arith.select %is_first, %biasj, %cr : !llvm.ptr
        %which = arith.remui %t, %parts : i64
        %so = arith.muli %which, %part : i64
        %soon = llvm.getelementptr %after[%so] : (!llvm.ptr, i64) -> !llvm.ptr, {element}
        llvm.call @{gemm.name}_tile(%count, %columns, %ar, %lda, %bt, %depth, %init, %ldi, %cr, %ldc, %soon)
          : (i64, i64, !llvm.ptr, i64, !llvm.ptr, i64, !llvm.ptr, i64, !llvm.ptr, i64, !llvm.ptr) -> ()
        %below = arith.addi %r, %count : i64
        scf.yield %below : i64
      }}
    }}
  }}
}}
llvm.return
}}"""


def _choice(gemm: GemmKernel) -> str:
    """The choice of a micro-kernel by the number of rows, and by whole or last panel."""
    signature = (
        "%rows: i64, %columns: i64, %a: !llvm.ptr, %lda: i64, %b: !llvm.ptr, "
        "%depth: i64, %init: !llvm.ptr, %ldi: i64, %c: !llvm.ptr, %ldc: i64, %soon: !llvm.ptr"
    )
    return f"""llvm.func internal @{gemm.name}_tile({signature}) {{
%lanes = arith.constant {gemm.form.lanes} : i64
%full = arith.constant {gemm.form.width} : i64
%base = arith.constant {gemm.form.rows + 1} : i64
%is_whole = arith.cmpi eq, %columns, %full : i64
scf.if %is_whole {{
  %which = arith.index_cast %rows : i64 to index
{_switch(gemm, gemm.tiles)}
}} else {{
  %vectors = arith.ceildivui %columns, %lanes : i64
  %skip = arith.muli %vectors, %base : i64
  %number = arith.addi %skip, %rows : i64
  %which = arith.index_cast %number : i64 to index
{_switch(gemm, gemm.edge_tiles)}
}}
llvm.return
}}"""


def _switch(gemm: GemmKernel, tiles: Sequence[MicroKernelTile]) -> str:
    arguments = "%a, %lda, %b, %depth, %init, %ldi, %c, %ldc, %columns, %soon"
    cases = []
    for t in tiles:
        number = t.rows + (t.vectors * (gemm.form.rows + 1) if t.masked else 0)
        call = f"llvm.call @{gemm.tile_name(t)}({arguments}) : {TILE_TYPES}"
        cases.append(f"case {number} {{\n{call}\nscf.yield\n}}")
    return "\n".join(["scf.index_switch %which", *cases, "default {", "}"])


def _arguments(pointers: Sequence[str], numbers: Sequence[str]) -> str:
    """Load a kernel's arguments under these names, in the order of ``ptrs`` and ``ints``."""
    lines = []
    for base, kind, names in (("ptrs", "!llvm.ptr", pointers), ("ints", "i64", numbers)):
        for k, name in enumerate(names):
            lines += [
                f"%at_{name} = llvm.getelementptr %{base}[{k}] : (!llvm.ptr) -> !llvm.ptr, {kind}",
                f"%{name} = llvm.load %at_{name} : !llvm.ptr -> {kind}",
            ]
    return "\n".join(lines)
