# SPDX-License-Identifier: Apache-2.0
"""Reductions whose rows are adjacent in memory, one vector of rows at a time: each lane is a row.

A sum over axis 0 of [n, c] reads each row (a column in memory) with a stride, but the same position of the
next row is the next element. So lanes run along the last outer dimension, and inner is a plain loop:

for each unit in [begin, end):           the other outer dimensions x blocks of rows
  for each pass over the rows:           see kernel_schedule.py
    for each position r along inner:     accumulators in registers, one per vector of rows

Rows of a table that are looked up are read like this, too, if the lanes share their index.

Row values are vectors here. Sums have two levels, so that long rows do not lose precision.
"""

from collections.abc import Sequence

import torch
from torch.utils._sympy.functions import FloorDiv

from blade.backends.disc.cpu.emit import element_types as memory
from blade.backends.disc.cpu.emit import pointwise, reduction
from blade.backends.disc.cpu.emit import vector_memory as transfer
from blade.backends.disc.cpu.emit.loops import carry
from blade.backends.disc.cpu.emit.mlir_builder import SsaValue
from blade.backends.disc.cpu.emit.row import RowEmitter
from blade.backends.disc.ir.iteration_space import number
from blade.backends.disc.ir.kernel import (
    Access,
    Accessing,
    Compute,
    Const,
    Dim,
    Gather,
    Index,
    Kernel,
    Load,
    Reduce,
    Size,
    Store,
)
from blade.backends.disc.ir.kernel_schedule import RowPass, operands

# Positions summed before they are added to the total: of up to _LONG of them, and of more.
_RUN, _LONG_RUN = 32, 512
_LONG = 4096


def side_by_side(kernel: Kernel) -> int | None:
    """The outer dimension along which rows of a reducing kernel are adjacent; ``None`` if there is none."""
    if not any(isinstance(s, Reduce) for s in kernel.body):
        return None
    accesses = [s.access for s in kernel.body if isinstance(s, Accessing)]
    chosen = [s.access for s in kernel.body if isinstance(s, Gather)]  # the index walks
    walked = [a for a in accesses if number(a.strides[-1]) != 0 or a in chosen]
    for k in reversed(range(len(kernel.outer))):
        both = [a for a in walked if number(a.strides[k]) != 0]  # the others are equal in all lanes
        beside = sum(number(a.strides[k]) == 1 for a in both)
        along = sum(number(a.strides[-1]) == 1 for a in both)
        few = number(kernel.outer[k])
        if beside > along and (few is None or few >= 4):
            return k if _takes_whole_rows(kernel, k) else None
    return None


def _takes_whole_rows(kernel: Kernel, dim: int) -> bool:
    """Whether the index of every ``Gather`` is the same along ``dim``: in all lanes of a vector."""
    same: set[int] = set()
    for i, stmt in enumerate(kernel.body):
        if isinstance(stmt, Gather) and stmt.index not in same:
            return False
        if isinstance(stmt, (Load, Gather)) and number(stmt.access.strides[dim]) != 0:
            continue
        if isinstance(stmt, (Reduce, Store)) or (isinstance(stmt, Index) and stmt.dim == dim):
            continue
        if all(a in same for a in operands(stmt)):
            same.add(i)
    return True


def blocks(kernel: Kernel, width: int) -> Dim:
    """The number of blocks of ``width`` rows."""
    rows = kernel.outer[-1]
    if isinstance(rows, int):
        return -(-rows // width)
    blocks: Dim = FloorDiv(rows + width - 1, width)
    return blocks


def emit_block(row: RowEmitter, rest: Sequence[SsaValue], block: SsaValue) -> None:
    """The rows of one block: all vectors at once, or, in the last block, one vector after the other."""
    code, lanes, width = row.code, row.lanes, row.width
    at = code.mul(block, code.constant(width, "i64"))
    left = code.sub(row.sizes.value(code, row.kernel.outer[-1]), at)
    whole = code.compare("sge", left, code.constant(width, "i64"))
    code.open(f"scf.if {whole.name}")
    _ColumnBlock(row, [*rest, at], width // lanes, None).emit()
    code.close("} else {")
    code.indent += 1
    vector = SsaValue("%vector", "i64", 1)
    zero, step = code.constant(0, "i64"), code.constant(lanes, "i64")
    code.open(f"scf.for {vector.name} = {zero.name} to {left.name} step {step.name} : i64")
    here = code.sub(left, vector)
    _ColumnBlock(row, [*rest, code.add(at, vector)], 1, here).emit()
    code.close()
    code.close()


class _ColumnBlock:
    """``count`` vectors of rows that start at ``index``; ``left``: the rows that exist, if maybe too few."""

    def __init__(
        self, row: RowEmitter, index: list[SsaValue], count: int, left: SsaValue | None
    ) -> None:
        self.row, self.code, self.body = row, row.code, row.kernel.body
        self.count, self.lanes, self.left = count, row.lanes, left
        inner = row.kernel.inner
        self.zero = self.code.constant(0, "i64")
        self.high = row.sizes.value(self.code, inner)
        row.start(index, self.zero, self.high, number(inner), 1)
        self.mask = None if left is None else self._mask(left)
        self.values: dict[tuple[int, int], SsaValue] = {}

    def emit(self) -> None:
        plan = self.row.plan
        for step in plan.passes:
            self._uniforms(step.uniforms)
            self._walk(step)
        self._uniforms(plan.finals)
        for i in plan.row_stores:
            for u in range(self.count):
                self._store(i, None, u)

    def _mask(self, left: SsaValue) -> SsaValue:
        code = self.code
        limit = code.broadcast(code.convert("arith.trunci", left, "i32"), self.lanes)
        return code.compare("slt", code.iota("i32", self.lanes), limit)

    def _uniforms(self, numbers: Sequence[int]) -> None:
        for i in numbers:
            for u in range(self.count):
                self.values[i, u] = self._value(i, None, u)

    # --- one pass ---

    def _walk(self, step: RowPass) -> None:
        reductions = [s for s in (self.body[r] for r in step.reductions) if isinstance(s, Reduce)]
        each = [r for r in reductions for _ in range(self.count)]
        start = [reduction.identity(self.code, r, self.lanes) for r in each]
        one = self.code.constant(1, "i64")
        if not each:
            carry(self.code, self.zero, self.high, one, [], lambda r, _: self._place(step, r, []))
            return

        is_long = self.code.compare("sgt", self.high, self.code.constant(_LONG, "i64"))
        sizes = (self.code.constant(n, "i64") for n in (_LONG_RUN, _RUN))
        stride = self.code.select(is_long, *sizes)

        def run(first: SsaValue, totals: list[SsaValue]) -> list[SsaValue]:
            end = self.code.add(first, stride)
            end = self.code.apply("arith.minsi", end, self.high)
            parts = carry(self.code, first, end, one, start, lambda r, v: self._place(step, r, v))
            return [
                reduction.combine(self.code, r, total, part)
                for r, total, part in zip(each, totals, parts)
            ]

        totals = carry(self.code, self.zero, self.high, stride, start, run)
        for k, r in enumerate(step.reductions):
            for u in range(self.count):
                total = totals[k * self.count + u]
                self.values[r, u] = reduction.finish(self.code, self.body[r], total)

    def _place(self, step: RowPass, r: SsaValue, totals: list[SsaValue]) -> list[SsaValue]:
        """Position ``r`` of every row of the block; returns the new accumulators."""
        for v in step.reload:
            for u in range(self.count):
                at = self._kept_at(r, u)
                self.values[v, u] = transfer.reload(self.row, v, at, self.lanes)
        for i in step.points:
            for u in range(self.count):
                self.values[i, u] = self._value(i, r, u)
                if i in step.keep:
                    transfer.keep(self.row, i, self._kept_at(r, u), self.values[i, u])
        result = []
        for k, i in enumerate(step.reductions):
            stmt = self.body[i]
            assert isinstance(stmt, Reduce), stmt
            for u in range(self.count):
                x = reduction.prepare(self.code, stmt, self.values[stmt.arg, u])
                result.append(reduction.combine(self.code, stmt, totals[k * self.count + u], x))
        for i in step.stores:
            for u in range(self.count):
                self._store(i, r, u)
        return result

    def _kept_at(self, r: SsaValue, u: int) -> SsaValue:
        at = self.code.mul(r, self.code.constant(self.row.width, "i64"))
        return transfer.shift(self.row, at, u * self.lanes)

    # --- one statement ---

    def _value(self, i: int, r: SsaValue | None, u: int) -> SsaValue:
        """Statement ``i`` for vector ``u``; ``r``: the position along inner, ``None`` for a row value."""
        code, stmt, lanes = self.code, self.body[i], self.lanes
        if isinstance(stmt, Const):
            return code.constant(stmt.value, memory.REGISTER[stmt.dtype], lanes)
        if isinstance(stmt, Compute):
            args = [self.values[a, u] for a in stmt.args]
            return pointwise.compute(code, stmt.op, args, self.row.dtype(stmt.args[-1]), stmt.dtype)
        if isinstance(stmt, Load):
            return memory.decode(
                code, self._load(stmt.access, self._at(stmt.access, r), u), stmt.dtype
            )
        if isinstance(stmt, Gather):
            at = self._gathered(stmt, r, u)
            return memory.decode(code, self._load(stmt.access, at, u), stmt.dtype)
        if isinstance(stmt, Size):
            whole = code.broadcast(self.row.sizes.value(code, stmt.value), lanes)
        else:
            assert isinstance(stmt, Index), stmt
            whole = self._index(stmt.dim, r, u)
        return pointwise.cast(code, whole, torch.int64, stmt.dtype)

    def _index(self, dim: int, r: SsaValue | None, u: int) -> SsaValue:
        code, last = self.code, len(self.row.kernel.outer) - 1
        if dim > last:
            assert r is not None, dim
            return code.broadcast(r, self.lanes)
        if dim < last:
            return code.broadcast(self.row.index[dim], self.lanes)
        first = transfer.shift(self.row, self.row.index[dim], u * self.lanes)
        return code.add(code.broadcast(first, self.lanes), code.iota("i64", self.lanes))

    def _gathered(self, stmt: Gather, r: SsaValue | None, u: int) -> SsaValue:
        """The address of position ``r`` in the block's first row, moved by the index, one for all lanes."""
        row, code, at = self.row, self.code, self._at(stmt.access, r)
        one = code.lane(self.values[stmt.index, u], 0)
        index = pointwise.cast(code, one, row.dtype(stmt.index), torch.int64)
        step = code.mul(index, row.sizes.value(code, stmt.stride))
        return row.gep(at, step, row.memory_type(stmt.access))

    def _load(self, access: Access, at: SsaValue, u: int) -> SsaValue:
        """One vector of rows; ``at``: the address in the block's first row."""
        code, row, element = self.code, self.row, self.row.memory_type(access)
        beside = number(access.strides[-2])
        if beside == 1:
            address = row.gep(at, code.constant(u * self.lanes, "i64"), element)
            return transfer.vector_load(row, address, element, self.lanes, self.mask)
        if beside == 0:
            one = code.op(f"llvm.load {at.name} : !llvm.ptr -> {element}", element, 1)
            return code.broadcast(one, self.lanes)
        parts = []
        for k in range(self.lanes):
            address = self._lane(access, at, u, k)
            parts.append(code.op(f"llvm.load {address.name} : !llvm.ptr -> {element}", element, 1))
        return code.from_lanes(parts)

    def _store(self, i: int, r: SsaValue | None, u: int) -> None:
        code, stmt = self.code, self.body[i]
        assert isinstance(stmt, Store), stmt
        access, at = stmt.access, self._at(stmt.access, r)
        kind = self.row.kernel.args[access.arg].dtype
        value = memory.encode(code, self.values[stmt.value, u], kind)
        if number(access.strides[-2]) == 1:
            address = self.row.gep(at, code.constant(u * self.lanes, "i64"), value.element)
            transfer.vector_store(self.row, value, address, self.mask)
            return
        for k in reversed(
            range(self.lanes)
        ):  # lanes past the end write the last row before its own lane does
            address, one = self._lane(access, at, u, k), code.lane(value, k)
            code.line(f"llvm.store {one.name}, {address.name} : {one.element}, !llvm.ptr")

    def _at(self, access: Access, r: SsaValue | None) -> SsaValue:
        """The address of position ``r`` in the block's first row."""
        base, stride = self.row.bases[access], access.strides[-1]
        if r is None or number(stride) == 0:
            return base
        step = self.code.mul(r, self.row.sizes.value(self.code, stride))
        return self.row.gep(base, step, self.row.memory_type(access))

    def _lane(self, access: Access, at: SsaValue, u: int, k: int) -> SsaValue:
        code, lane = self.code, self.code.constant(u * self.lanes + k, "i64")
        if self.left is not None:
            last = code.sub(self.left, code.constant(1, "i64"))
            lane = code.apply("arith.minsi", lane, last)
        step = code.mul(lane, self.row.sizes.value(code, access.strides[-2]))
        return self.row.gep(at, step, self.row.memory_type(access))
