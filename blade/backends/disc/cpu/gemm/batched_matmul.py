# SPDX-License-Identifier: Apache-2.0
"""The generated product of two computed matrices, batch by batch: the GEMM with B packed on the fly.

    matmul(ptrs = A, B, C, scratch; ints = ARGUMENTS), units = batches x panels x row groups
    matmul_bias(ptrs = A, B, bias, C, scratch; ...)

A panel of B is copied into scratch, in the micro-kernel's layout, and multiplied with the unit's rows of A.
Panels longer than ``PANEL_DEPTH`` are processed in parts, each with all rows of the unit. A's rows are read
in place, so their elements must be adjacent; B may have any strides.
"""

import functools
from dataclasses import replace

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv

from blade.backends.disc.cpu.attention.tiles import clamped_rows, transposed
from blade.backends.disc.cpu.emit import mlir_builder as code
from blade.backends.disc.cpu.emit.mlir_function import ENTRY, MlirFunction
from blade.backends.disc.cpu.gemm.gemm import (
    BLOCK_DEPTH,
    BLOCK_NUMBERS,
    BLOCK_POINTERS,
    GemmKernel,
    gemm_for,
    product_text,
)
from blade.backends.disc.cpu.gemm.micro_kernel import GemmTiling, gemm_tiling
from blade.backends.disc.ir.graph import Value, numel, plain
from blade.backends.disc.ir.kernel import Dim
from blade.backends.disc.ir.views import row_distance, view_of
from blade.backends.disc.program.instructions import NativeCall
from blade.backends.disc.target.cpu import CpuTarget

GROUP_ROWS = 192  # rows per unit: enough to make packing a panel once per unit cheap
PANEL_DEPTH = 4 * BLOCK_DEPTH  # a part of a panel takes 384 KiB of L2
ARGUMENTS = (
    "m n k a_batch lda b_batch b_row b_column".split()
)  # and strides of A and B, in elements


def matmul(columns: Dim, tiles: GemmTiling, biased: bool = False) -> GemmKernel:
    """The code for ``columns`` columns; if the number is unknown, there are tiles for every edge."""
    kind = "matmul_bias" if biased else "matmul"
    if isinstance(columns, int):
        return replace(gemm_for(columns, tiles), kind=kind)
    return GemmKernel(tiles, tuple(range(1, tiles.vectors + 1)), kind)


def matmul_call(value: Value, target: CpuTarget) -> NativeCall | None:
    """The call that computes a ``matmul`` of the IR; ``None`` if ATen computes it."""
    a, b, *bias = value.args
    if any(v.dtype != torch.float32 for v in (*value.args, value)) or a.shape[-2] == 1:
        return None
    a_strides, b_strides = matrix_strides(a), matrix_strides(b)
    if a_strides[-1] != 1:
        return None
    tiles, (m, n), k = gemm_tiling(target), value.shape[-2:], a.shape[-1]
    groups = FloorDiv(sympy.sympify(m) + GROUP_ROWS - 1, GROUP_ROWS)
    panels = FloorDiv(sympy.sympify(n) + tiles.width - 1, tiles.width)
    rows = sympy.Min(m, GROUP_ROWS)
    return NativeCall(
        matmul(n, tiles, bool(bias)).name,
        plain(numel(value.shape[:-2]) * groups * panels),
        plain((rows + tiles.lanes) * k * tiles.vectors),
        plain((sympy.Min(k, PANEL_DEPTH) + 1) * tiles.width * tiles.bytes),
        (a, b, *bias, value),
        (m, n, k, *a_strides[:2], *b_strides),
    )


def matrix_strides(x: Value) -> tuple[Dim, Dim, Dim]:
    """Strides of the merged leading axes, of a row and of a column; 1 for an axis of size 1."""
    view = view_of(x)
    assert view is not None, x
    row, column = (1 if d == 1 else s for d, s in zip(x.shape[-2:], view.strides[-2:], strict=True))
    return row_distance(x, len(x.shape) - 2), row, column


@functools.lru_cache(maxsize=64)  # the products of a graph share few variants
def matmul_text(gemm: GemmKernel) -> str:
    pack = _pack(gemm)
    return "\n".join([product_text(gemm), pack.text(), _driver(gemm, pack).text(False)]) + "\n"


def _pack(gemm: GemmKernel) -> MlirFunction:
    """``to[row][column] = b[row * b_row + column * b_column]``; undefined beyond the columns."""
    tiles = gemm.form
    f = MlirFunction(
        f"{gemm.name}_pack",
        "b:ptr b_row:i64 b_column:i64 rows:i64 columns:i64 to:ptr",
        tiles.lanes,
    )
    with f.when(f.compare("eq", f["b_column"], f.number(1))):
        _copy_rows(f, tiles)
        f.branch()
        with f.when(f.compare("eq", f["b_row"], f.number(1))):
            _transpose(f, tiles)
            f.branch()
            _gather(f, tiles, f.number(0))
    return f


def _copy_rows(f: MlirFunction, tiles: GemmTiling) -> None:
    """Pack B whose rows are contiguous, like a panel's: copy vector by vector."""
    offsets = [v * tiles.lanes for v in range(tiles.vectors)]
    with f.when(f.compare("eq", f["columns"], f.number(tiles.width))):
        with f.loop(f.number(0), f["rows"], 1) as i:
            row, to = _row(f, tiles, i)
            for offset in offsets:
                f.store(f.load(f.at(row, offset), tiles.lanes), f.at(to, offset))
        f.branch()
        masks = [f.first_lanes(f.sub(f["columns"], f.number(offset))) for offset in offsets]
        with f.loop(f.number(0), f["rows"], 1) as i:
            row, to = _row(f, tiles, i)
            for offset, mask in zip(offsets, masks, strict=True):
                f.store(f.load_masked(f.at(row, offset), mask), f.at(to, offset))


def _row(
    f: MlirFunction, tiles: GemmTiling, i: code.SsaValue
) -> tuple[code.SsaValue, code.SsaValue]:
    return f.at(f["b"], f.mul(i, f["b_row"])), f.at(f["to"], f.mul(i, f.number(tiles.width)))


def _transpose(f: MlirFunction, tiles: GemmTiling) -> None:
    """Pack B whose columns are contiguous: transpose squares of vectors in registers."""
    whole = f.floor_to(f["rows"], tiles.lanes)
    for v in range(tiles.vectors):
        first = f.number(v * tiles.lanes)
        left = f.sub(f["columns"], first)
        with f.when(f.compare("sgt", left, f.number(0))):
            column = f.at(f["b"], f.mul(first, f["b_column"]))
            starts = clamped_rows(f, column, f["b_column"], left, tiles.lanes)
            with f.loop(f.number(0), whole, tiles.lanes) as i:
                rows = transposed(f, [f.load(f.at(start, i), tiles.lanes) for start in starts])
                to = f.at(f.at(f["to"], f.mul(i, f.number(tiles.width))), v * tiles.lanes)
                for k, row in enumerate(rows):
                    f.store(row, f.at(to, k * tiles.width))
    _gather(f, tiles, whole)


def _gather(f: MlirFunction, tiles: GemmTiling, low: code.SsaValue) -> None:
    """Pack the rows from ``low`` on, element by element."""
    with f.loop(low, f["rows"], 1) as i:
        row, to = _row(f, tiles, i)
        with f.loop(f.number(0), f.number(tiles.width), 1) as j:
            f.store(f.load(f.at(row, f.mul(_existing(f, j), f["b_column"]))), f.at(to, j))


def _existing(f: MlirFunction, column: code.SsaValue) -> code.SsaValue:
    """``column``, clamped to the last existing one."""
    return f.least(column, f.sub(f["columns"], f.number(1)))


def _driver(gemm: GemmKernel, pack: MlirFunction) -> MlirFunction:
    tiles = gemm.form
    f = MlirFunction(gemm.name, ENTRY, tiles.lanes)
    biased = gemm.kind == "matmul_bias"
    pointers = [f.load(f.at(f["ptrs"], k, "ptr"), 1, "ptr") for k in range(4 + biased)]
    a, b, c, scratch = *pointers[:2], *pointers[-2:]
    n = {w: f.load(f.at(f["ints"], k, "i64"), 1, "i64") for k, w in enumerate(ARGUMENTS)}
    zero, one, width = f.number(0), f.number(1), f.number(tiles.width)
    most = f.number(PANEL_DEPTH)
    panel = f.at(scratch, tiles.width)
    for v in range(tiles.vectors):
        f.store(f.constant(0.0, "f32", tiles.lanes), f.at(scratch, v * tiles.lanes))
    panels, groups = f.above(n["n"], tiles.width), f.above(n["m"], GROUP_ROWS)
    block = MlirFunction(f"{gemm.name}_block", _BLOCK, tiles.lanes)  # product_text emits its body
    with f.loop(f["begin"], f["end"], 1) as unit:
        group = f.apply("arith.remui", unit, groups)
        place = f.apply("arith.divui", unit, groups)
        batch = f.apply("arith.divui", place, panels)
        first = f.mul(f.apply("arith.remui", place, panels), width)
        columns = f.least(f.sub(n["n"], first), width)
        from_panel = f.at(f.at(b, f.mul(batch, n["b_batch"])), f.mul(first, n["b_column"]))
        fresh = f.apply(
            "arith.ori", f.compare("eq", unit, f["begin"]), f.compare("eq", group, zero)
        )
        fresh = f.apply("arith.ori", fresh, f.compare("sgt", n["k"], most))
        # if k is 0 there is still one part, which writes the bias
        with f.loop(zero, f.most(n["k"], one), PANEL_DEPTH) as k0:
            rows = f.least(f.sub(n["k"], k0), most)
            with f.when(fresh):
                f.run(
                    pack,
                    b=f.at(from_panel, f.mul(k0, n["b_row"])),
                    b_row=n["b_row"],
                    b_column=n["b_column"],
                    rows=rows,
                    columns=columns,
                    to=panel,
                )
            f.run(
                block,
                a=f.at(f.at(a, f.mul(batch, n["a_batch"])), k0),
                b=panel,
                bias=f.at(pointers[2], first) if biased else scratch,
                c=f.at(c, f.add(f.mul(f.mul(batch, n["m"]), n["n"]), first)),
                n=columns,
                k=rows,
                lda=n["lda"],
                ldc=n["n"],
                p0=zero,
                p1=one,
                r0=f.apply("arith.divui", f.mul(group, n["m"]), groups),
                r1=f.apply("arith.divui", f.mul(f.add(group, one), n["m"]), groups),
                before=k0,
            )
    return f


_BLOCK = " ".join([*(f"{p}:ptr" for p in BLOCK_POINTERS), *(f"{i}:i64" for i in BLOCK_NUMBERS)])
