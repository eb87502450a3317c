# SPDX-License-Identifier: Apache-2.0
"""Kernel -> MLIR text of one function ``void NAME(void** ptrs, const int64_t* ints, int64_t begin, int64_t end)``.

for each unit in [begin, end):           a row (or, if everything is contiguous, an element)
  for each pass over the row:            see kernel_schedule.py
    main loop, unrolled vectors          see row_loops.py
    remainder: whole vectors, then a masked one
"""

from dataclasses import dataclass

import torch

from blade.backends.disc.cpu.emit import element_types as memory
from blade.backends.disc.cpu.emit.column_blocks import blocks, emit_block, side_by_side
from blade.backends.disc.cpu.emit.mlir_builder import MlirBuilder, SsaValue
from blade.backends.disc.cpu.emit.row import RowEmitter
from blade.backends.disc.cpu.emit.row_loops import emit_row_loops
from blade.backends.disc.cpu.emit.sizes import MlirSizes
from blade.backends.disc.cpu.emit.transpose_tiles import SIDE, emit_tiles
from blade.backends.disc.ir.iteration_space import (
    across,
    coalesce,
    move_last,
    number,
)
from blade.backends.disc.ir.kernel import Dim, Gather, Kernel, Reduce
from blade.backends.disc.ir.kernel_powers import constant_powers
from blade.backends.disc.ir.kernel_schedule import cost, schedule_kernel
from blade.backends.disc.target.cpu import CpuTarget
from blade.core.reason import Code
from blade.errors import Refused

# The remainder of a transposing kernel is walked in pieces of this length.
_BLOCK_COLUMNS = 64
# Kernels that reduce only leading axes are split among threads by blocks of columns: at least so many.
_FEW_BLOCKS = 4


@dataclass(frozen=True)
class EmittedKernel:
    """A kernel's text with the data for its calls. ``scratch``: bytes per thread, 0 if none is needed.

    ``extent``: number of units; ``begin``/``end`` run over it. ``cost``: work per unit, in plain elements.
    """

    text: str
    scratch: Dim
    extent: Dim
    cost: Dim


def emit(kernel: Kernel, name: str, target: CpuTarget) -> EmittedKernel:
    """MLIR of ``kernel``. Raises ``Refused`` (unsupported_dtype) if the CPU emitter cannot generate it."""
    _check(kernel, target)
    sizes = MlirSizes(kernel.sizes())
    kernel = coalesce(constant_powers(kernel))
    beside = side_by_side(kernel)
    if beside is not None:
        return _emit_columns(move_last(kernel, beside), name, sizes, target)
    contiguous = across(kernel)
    if contiguous is not None:
        kernel = move_last(kernel, contiguous)
    steps = schedule_kernel(kernel)
    row = RowEmitter(kernel, steps, sizes, target.lanes)
    code = row.code
    row.enter()
    flat = not kernel.outer and not any(isinstance(s, Reduce) for s in kernel.body)
    if flat:
        _emit_row(row, [], SsaValue("%begin", "i64", 1), SsaValue("%end", "i64", 1), None, 1)
    elif contiguous is not None:
        _emit_blocks(row)
    else:
        _emit_rows(row)
    extent: Dim = kernel.inner if flat else 1
    for dim in () if flat else kernel.outer if contiguous is None else kernel.outer[:-1]:
        extent = extent * dim
    if contiguous is not None:
        extent = extent * blocks(kernel, SIDE)
    weight = max(1, round(sum(map(cost, kernel.body)) / 8))
    return EmittedKernel(
        _text(code, name),
        row.scratch_bytes(),
        extent,
        weight * (1 if flat else kernel.inner) * (1 if contiguous is None else SIDE),
    )


def _emit_columns(kernel: Kernel, name: str, sizes: MlirSizes, target: CpuTarget) -> EmittedKernel:
    """A reduction over an axis other than the contiguous one."""
    steps = schedule_kernel(kernel, axis=-2)
    work = sum(cost(s, -2) for s in kernel.body)
    vectors = 2 if work > 10 or any(p.keep for p in steps.passes) else 4
    columns = number(kernel.outer[-1])
    if vectors == 4 and columns is not None and any(isinstance(s, Gather) for s in kernel.body):
        vectors = max(1, min(8, columns // target.lanes))  # a row that is looked up is read at once
    while vectors > 1 and len(kernel.outer) == 1 and columns is not None:
        if columns >= _FEW_BLOCKS * vectors * target.lanes:
            break
        vectors //= 2
    width = vectors * target.lanes
    row = RowEmitter(kernel, steps, sizes, target.lanes, width)
    code = row.code
    row.enter()
    rest = [row.sizes.value(code, d) for d in kernel.outer[:-1]]
    more = code.add(row.sizes.value(code, kernel.outer[-1]), code.constant(width - 1, "i64"))
    count = code.apply("arith.divui", more, code.constant(width, "i64"))
    one, unit = code.constant(1, "i64"), SsaValue("%unit", "i64", 1)
    code.open(f"scf.for {unit.name} = %begin to %end step {one.name} : i64")
    *index, block = _split(code, unit, [*rest, count])
    emit_block(row, index, block)
    code.close()
    extent = blocks(kernel, width)
    for dim in kernel.outer[:-1]:
        extent = extent * dim
    return EmittedKernel(
        _text(code, name),
        row.scratch_bytes(),
        extent,
        max(1, round(work / 8)) * width * kernel.inner,
    )


def _check(kernel: Kernel, target: CpuTarget) -> None:
    for arg in kernel.args:
        name = str(arg.dtype).removeprefix("torch.")
        if arg.dtype not in memory.MEMORY:
            raise Refused(Code.UNSUPPORTED_DTYPE, f"The CPU emitter has no {name} buffers.")
        if arg.dtype == torch.float16 and not target.has_half:
            raise Refused(Code.UNSUPPORTED_DTYPE, "float16 needs a CPU with F16C.")


def _text(code: MlirBuilder, name: str) -> str:
    constants = [f"    {c} = arith.constant {text}" for text, c in code.constants.items()]
    signature = "%ptrs: !llvm.ptr, %ints: !llvm.ptr, %begin: i64, %end: i64"
    head = f"llvm.func @{name}({signature}) {{"
    return (
        "\n".join([*code.externals.values(), head, *constants, *code.lines, "    llvm.return", "}"])
        + "\n"
    )


def _emit_rows(row: RowEmitter) -> None:
    """The loop over units. The outer index is split into its dimensions once and then counted up."""
    code, dims = row.code, row.kernel.outer
    one, zero = code.constant(1, "i64"), code.constant(0, "i64")
    bounds = [row.sizes.value(code, d) for d in dims]
    start = _split(code, SsaValue("%begin", "i64", 1), bounds)
    head, names = "scf.for %unit = %begin to %end step " + one.name, []
    if len(dims) > 1:
        names = [f"%i{k}" for k in range(len(dims))]
        pairs = ", ".join(f"{n} = {s.name}" for n, s in zip(names, start))
        head = f"{code.fresh()}:{len(dims)} = {head} iter_args({pairs}) -> ({', '.join(['i64'] * len(dims))})"
    code.open(head + " : i64")
    index = [SsaValue(n, "i64", 1) for n in names] or [SsaValue("%unit", "i64", 1)] * len(dims)
    inner = row.kernel.inner
    high = row.sizes.value(code, inner)
    _emit_row(row, index, zero, high, number(inner), row.kernel.multiple)
    if names:
        following = [n.name for n in _count_up(code, index, bounds)]
        code.line(f"scf.yield {', '.join(following)} : {', '.join(['i64'] * len(dims))}")
    code.close()


def _emit_blocks(row: RowEmitter) -> None:
    """Rows in groups: whole tiles, then the rest block by block along inner.

    Strided accesses of one row touch cache lines that the next rows use.
    """
    code, one = row.code, row.code.constant(1, "i64")
    rows, columns = code.constant(SIDE, "i64"), code.constant(_BLOCK_COLUMNS, "i64")
    *bounds, side = [row.sizes.value(code, d) for d in row.kernel.outer]
    count = code.apply("arith.ceildivsi", side, rows)
    inner, zero = row.sizes.value(code, row.kernel.inner), code.constant(0, "i64")
    group, block, line = (SsaValue(n, "i64", 1) for n in ("%group", "%block", "%line"))
    code.open(f"scf.for {group.name} = %begin to %end step {one.name} : i64")
    *rest, number_of_block = _split(code, group, [*bounds, count])
    first = code.mul(number_of_block, rows)
    after = code.add(first, rows)
    whole = code.compare("sle", after, side)
    tiled = code.apply("arith.andi", inner, code.constant(-SIDE, "i64"))
    done = code.select(whole, tiled, zero)
    code.open(f"scf.if {whole.name}")
    emit_tiles(row, rest, first, tiled)
    code.close()
    last = code.apply("arith.minsi", after, side)
    code.open(f"scf.for {block.name} = {done.name} to {inner.name} step {columns.name} : i64")
    high = code.apply("arith.minsi", code.add(block, columns), inner)
    code.open(f"scf.for {line.name} = {first.name} to {last.name} step {one.name} : i64")
    _emit_row(row, [*rest, line], block, high, None, 1)
    for _ in range(3):
        code.close()


def _split(code: MlirBuilder, unit: SsaValue, bounds: list[SsaValue]) -> list[SsaValue]:
    if len(bounds) < 2:
        return [unit] * len(bounds)
    index = []
    for bound in reversed(bounds[1:]):
        # An empty space may be called with zero units: do not divide by its size, which is 0.
        bound = code.apply("arith.maxsi", bound, code.constant(1, "i64"))
        index.append(code.apply("arith.remui", unit, bound))
        unit = code.apply("arith.divui", unit, bound)
    return [unit, *reversed(index)]


def _count_up(code: MlirBuilder, index: list[SsaValue], bounds: list[SsaValue]) -> list[SsaValue]:
    one, zero = code.constant(1, "i64"), code.constant(0, "i64")
    carry, result = one, []
    for i, bound in zip(reversed(index[1:]), reversed(bounds[1:])):
        i = code.add(i, carry)
        wrapped = code.compare("eq", i, bound)
        result.append(code.select(wrapped, zero, i))
        carry = code.select(wrapped, one, zero)
    return [code.add(index[0], carry), *reversed(result)]


def _emit_row(
    row: RowEmitter,
    index: list[SsaValue],
    low: SsaValue,
    high: SsaValue,
    length: int | None,
    multiple: int,
) -> None:
    row.start(index, low, high, length, multiple)
    for step in row.plan.passes:
        row.compute_uniforms(step.uniforms)
        emit_row_loops(row, step)
    row.compute_uniforms(row.plan.finals)
    row.store_uniforms(row.plan.row_stores)
