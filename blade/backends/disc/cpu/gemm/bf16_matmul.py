# SPDX-License-Identifier: Apache-2.0
"""The generated bfloat16 product of two computed matrices, batch by batch: B is packed in pairs on the fly.

    bf16_matmul(ptrs = A, B, bias, C, scratch; ints = ARGUMENTS), units = batches x panels x row groups

A panel of B is copied into scratch in the micro-kernel's layout, over its whole depth, and multiplied with the unit's
rows of A. A's rows are read in place, so their elements must be adjacent; B may have any strides.
"""

import functools

from blade.backends.disc.cpu.attention.tiles import clamped_rows, transposed
from blade.backends.disc.cpu.emit.bf16_dot import PAIR, adjacent_pairs, paired
from blade.backends.disc.cpu.emit.mlir_builder import SsaValue
from blade.backends.disc.cpu.emit.mlir_function import POINTER, MlirRoutine
from blade.backends.disc.cpu.gemm.bf16_gemm import panel_of
from blade.backends.disc.cpu.gemm.bf16_micro_kernel import Bf16KernelSpec
from blade.backends.disc.cpu.gemm.driver import PanelRows

GROUP_ROWS = 192  # rows per unit: enough to make packing a panel once per unit cheap
ARGUMENTS = "m n k a_batch lda b_batch b_row b_column has_bias".split()
"""Sizes, and strides of A and B in elements; without a bias its pointer is to anything."""

_POINTERS = "a b bias c scratch".split()
_PACK = "b:ptr b_row:i64 b_column:i64 k:i64 columns:i64 to:ptr"
_BLOCK = "a:ptr b:ptr bias:ptr c:ptr n:i64 k:i64 lda:i64 ldc:i64 rows:i64 row:i64"


@functools.lru_cache(maxsize=64)
def matmul_text(form: Bf16KernelSpec) -> str:
    """MLIR of the driver, the packing and the micro-kernels."""
    kernels = form.kernels()
    pack, block = _pack(form), MlirRoutine(f"{form.name}_block", _arguments(_BLOCK), form.dot.lanes)
    place = PanelRows(block.whole(0), block["n"], block["row"], block["rows"])
    panel_of(form, block, kernels, place)
    functions = [*kernels.functions, pack, block]
    drive = _driver(form, pack, block)
    return "\n".join([*(f.text() for f in functions), drive.text(False)]) + "\n"


def _arguments(text: str) -> tuple[tuple[str, str], ...]:
    return tuple((n, kind) for n, kind in (word.split(":") for word in text.split()))


def _driver(form: Bf16KernelSpec, pack: MlirRoutine, block: MlirRoutine) -> MlirRoutine:
    f, width, lanes = MlirRoutine(form.name, lanes=form.dot.lanes), form.dot.width, form.dot.lanes
    p = f.unpack(f["ptrs"], _POINTERS, POINTER)
    n = f.unpack(f["ints"], ARGUMENTS, "i64")
    panel = f.at(p["scratch"], width)
    for v in range(form.dot.vectors):
        f.put(f.constant(0.0, "f32", lanes), p["scratch"], v * lanes)
    panels, groups = f.above(n["n"], width), f.above(n["m"], GROUP_ROWS)
    has_bias = f.test("ne", n["has_bias"], 0)
    with f.range(f["begin"], f["end"]) as unit:
        group, place = f.rest(unit, groups), f.over(unit, groups)
        batch, first = f.over(place, panels), f.product(f.rest(place, panels), width)
        columns = f.least(f.minus(n["n"], first), width)
        is_fresh = f.apply("arith.ori", f.compare("eq", unit, f["begin"]), f.test("eq", group, 0))
        with f.when(is_fresh):
            at = f.sum(f.product(batch, n["b_batch"]), f.product(first, n["b_column"]))
            given = {name: n[name] for name in ("b_row", "b_column", "k")}
            f.run(pack, b=f.at(p["b"], at, "i16"), columns=columns, to=panel, **given)
        r0 = f.over(f.product(group, n["m"]), groups)
        r1 = f.over(f.product(f.sum(group, 1), n["m"]), groups)
        to = f.sum(f.product(batch, n["m"], n["n"]), first)
        f.run(
            block,
            a=f.at(p["a"], f.product(batch, n["a_batch"]), "i16"),
            b=panel,
            bias=f.either(has_bias, f.at(p["bias"], first), p["scratch"]),
            c=f.at(p["c"], to, form.result),
            n=columns,
            k=n["k"],
            lda=n["lda"],
            ldc=n["n"],
            rows=f.minus(r1, r0),
            row=r0,
        )
    return f


def _pack(form: Bf16KernelSpec) -> MlirRoutine:
    """``to[row / 2][column][row % 2] = b[row * b_row + column * b_column]``; undefined beyond the columns.

    The last row of an odd number has zeros beside it.
    """
    f = MlirRoutine(f"{form.name}_pack", _arguments(_PACK), form.dot.lanes)
    with f.when(f.test("eq", f["b_column"], 1)):
        _interleave(f, form)
        f.branch()
        with f.when(f.test("eq", f["b_row"], 1)):
            _transpose(f, form)
            f.branch()
            _gather(f, form, f.whole(0))
    return f


def _interleave(f: MlirRoutine, form: Bf16KernelSpec) -> None:
    """Pack B whose rows are contiguous: two rows, vector by vector."""
    lanes, whole = form.dot.lanes, f.over(f["k"], PAIR)
    for v in range(form.dot.vectors):
        left = f.minus(f["columns"], v * lanes)
        with f.when(f.test("sgt", left, 0)):
            mask = f.first_lanes(left)
            start = f.at(f["b"], v * lanes, "i16")
            with f.range(0, whole) as pair:
                rows = [
                    f.at(start, f.product(f.sum(f.product(pair, PAIR), r), f["b_row"]), "i16")
                    for r in range(PAIR)
                ]
                low, high = (f.load_masked(row, mask, "i16") for row in rows)
                to = f.at(f["to"], f.sum(f.product(pair, form.dot.width), v * lanes))
                f.store(paired(f, low, high), to)
    _gather(f, form, whole)


def _transpose(f: MlirRoutine, form: Bf16KernelSpec) -> None:
    """Pack B whose columns are contiguous: transpose squares of pairs in registers."""
    lanes, width = form.dot.lanes, form.dot.width
    whole = f.floor_to(f.over(f["k"], PAIR), lanes)
    for v in range(form.dot.vectors):
        left = f.minus(f["columns"], v * lanes)
        with f.when(f.test("sgt", left, 0)):
            column = f.at(f["b"], f.product(f["b_column"], v * lanes), "i16")
            starts = clamped_rows(f, column, f["b_column"], left, lanes, "i16")
            with f.range(0, whole, lanes) as pair:
                first = f.product(pair, PAIR)
                rows = [adjacent_pairs(f, f.at(start, first, "i16"), lanes) for start in starts]
                to = f.at(f["to"], f.sum(f.product(pair, width), v * lanes))
                for k, row in enumerate(transposed(f, rows)):
                    f.put(row, to, k * width)
    _gather(f, form, whole)


def _gather(f: MlirRoutine, form: Bf16KernelSpec, low: SsaValue) -> None:
    """Pack the pairs of rows from ``low`` on, element by element."""
    with (
        f.range(low, f.above(f["k"], PAIR)) as pair,
        f.range(0, f["columns"]) as j,
    ):
        parts = []
        for r in range(PAIR):
            row = f.sum(f.product(pair, PAIR), r)
            here = f.least(row, f.minus(f["k"], 1))
            x = f.get(
                f["b"], f.sum(f.product(here, f["b_row"]), f.product(j, f["b_column"])), "i16"
            )
            parts.append(f.select(f.test("slt", row, f["k"]), x, f.constant(0, "i16")))
        to = f.sum(f.product(pair, form.dot.width), j)
        f.put(paired(f, parts[0], parts[1]), f["to"], to)
