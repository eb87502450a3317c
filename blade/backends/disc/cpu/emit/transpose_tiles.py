# SPDX-License-Identifier: Apache-2.0
"""Transposing kernels, in square tiles: a row of the tile is a vector, and so is a column.

An access that is strided along inner but contiguous along the last outer dimension is read (or written) one
column of the tile at a time, in whole cache lines. Registers transpose it in log2(16) rounds of shuffles.

for each unit in [begin, end):           the other outer dimensions x blocks of 16 rows
  for each whole tile along inner:       16 x 16
  for the remainder of the block:        rows in short pieces, see row_loops.py
"""

from collections.abc import Sequence

import torch

from blade.backends.disc.cpu.emit import element_types as memory
from blade.backends.disc.cpu.emit import pointwise
from blade.backends.disc.cpu.emit import vector_memory as transfer
from blade.backends.disc.cpu.emit.loops import carry
from blade.backends.disc.cpu.emit.mlir_builder import MlirBuilder, SsaValue
from blade.backends.disc.cpu.emit.row import RowEmitter
from blade.backends.disc.ir.iteration_space import number
from blade.backends.disc.ir.kernel import (
    Access,
    Compute,
    Const,
    Index,
    Load,
    Size,
    Store,
)

SIDE = 16  # floats of a cache line


def emit_tiles(row: RowEmitter, rest: Sequence[SsaValue], first: SsaValue, high: SsaValue) -> None:
    """All tiles of rows ``first`` to ``first + SIDE`` with inner in [0, high), a multiple of SIDE."""
    _TransposeTiles(row, [*rest, first], high).emit()


def transpose(code: MlirBuilder, rows: Sequence[SsaValue]) -> list[SsaValue]:
    """Transpose a square of vectors: element j of vector i becomes element i of vector j.

    Each round exchanges blocks of size d across the diagonal (Eklundh's method).
    """
    square, side = list(rows), len(rows)
    distance = 1
    while distance < side:
        for i in range(side):
            if i & distance:
                continue
            a, b = square[i], square[i + distance]
            low = [k if not k & distance else side + k - distance for k in range(side)]
            high = [k + distance if not k & distance else side + k for k in range(side)]
            square[i], square[i + distance] = _shuffle(code, a, b, low), _shuffle(code, a, b, high)
        distance *= 2
    return square


def _shuffle(code: MlirBuilder, a: SsaValue, b: SsaValue, picks: Sequence[int]) -> SsaValue:
    text = f"vector.shuffle {a.name}, {b.name} [{', '.join(map(str, picks))}] : {a.type}, {b.type}"
    return code.op(text, a.element, a.lanes)


class _TransposeTiles:
    def __init__(self, row: RowEmitter, index: list[SsaValue], high: SsaValue) -> None:
        self.row, self.code, self.body, self.high = row, row.code, row.kernel.body, high
        self.zero = self.code.constant(0, "i64")
        row.start(index, self.zero, high, None, SIDE)
        self.values: dict[tuple[int, int], SsaValue] = {}  # (statement, row) -> vector along inner

    def emit(self) -> None:
        (step,) = self.row.plan.passes  # nothing is reduced, and there is a store along inner
        for i in (*step.uniforms, *self.row.plan.finals):
            for u in range(SIDE):
                self.values[i, u] = self._uniform(i, u)

        def tile(at: SsaValue, _: list[SsaValue]) -> list[SsaValue]:
            for i in step.points:
                for u, value in enumerate(self._point(i, at)):
                    self.values[i, u] = value
            for i in step.stores:
                self._store(i, at)
            return []

        carry(self.code, self.zero, self.high, self.code.constant(SIDE, "i64"), [], tile)

    def _uniform(self, i: int, u: int) -> SsaValue:
        """A value that is the same along inner, for row ``u``, in every lane."""
        code, stmt = self.code, self.body[i]
        if isinstance(stmt, Const):
            return code.constant(stmt.value, memory.REGISTER[stmt.dtype], SIDE)
        if isinstance(stmt, Compute):
            return self._compute(stmt, u)
        if isinstance(stmt, Load):
            element, address = self._element(stmt.access), self._start(stmt.access, u)
            raw = code.op(f"llvm.load {address.name} : !llvm.ptr -> {element}", element, 1)
            return memory.decode(code, code.broadcast(raw, SIDE), stmt.dtype)
        if isinstance(stmt, Size):
            whole = self.row.sizes.value(code, stmt.value)
        else:
            assert isinstance(stmt, Index), stmt
            last = stmt.dim == len(self.row.kernel.outer) - 1
            whole = transfer.shift(self.row, self.row.index[stmt.dim], u if last else 0)
        return pointwise.cast(code, code.broadcast(whole, SIDE), torch.int64, stmt.dtype)

    def _point(self, i: int, at: SsaValue) -> list[SsaValue]:
        """One vector per row of the tile."""
        code, stmt = self.code, self.body[i]
        if isinstance(stmt, Compute):
            return [self._compute(stmt, u) for u in range(SIDE)]
        if isinstance(stmt, Load):
            return [memory.decode(code, v, stmt.dtype) for v in self._load(stmt.access, at)]
        assert isinstance(stmt, Index), stmt
        here = code.add(code.broadcast(at, SIDE), code.iota("i64", SIDE))
        return [pointwise.cast(code, here, torch.int64, stmt.dtype)] * SIDE

    def _compute(self, stmt: Compute, u: int) -> SsaValue:
        args = [self.values[a, u] for a in stmt.args]
        source = self.row.dtype(stmt.args[-1])
        return pointwise.compute(self.code, stmt.op, args, source, stmt.dtype)

    def _load(self, access: Access, at: SsaValue) -> list[SsaValue]:
        if number(access.strides[-1]) == 1:
            return [self._vector(access, self._row(access, u, at)) for u in range(SIDE)]
        if number(access.strides[-2]) == 1:
            columns = [self._vector(access, self._column(access, k, at)) for k in range(SIDE)]
            return transpose(self.code, columns)
        return [
            self.code.from_lanes([self._one(access, u, k, at) for k in range(SIDE)])
            for u in range(SIDE)
        ]

    def _store(self, i: int, at: SsaValue) -> None:
        stmt = self.body[i]
        assert isinstance(stmt, Store), stmt
        code, access = self.code, stmt.access
        kind = self.row.kernel.args[access.arg].dtype
        rows = [memory.encode(code, self.values[stmt.value, u], kind) for u in range(SIDE)]
        if number(access.strides[-1]) == 1:
            for u, value in enumerate(rows):
                transfer.vector_store(self.row, value, self._row(access, u, at), None)
        elif number(access.strides[-2]) == 1:
            for k, value in enumerate(transpose(code, rows)):
                transfer.vector_store(self.row, value, self._column(access, k, at), None)
        else:
            for u, value in enumerate(rows):
                for k in range(SIDE):
                    address, one = self._place(access, u, k, at), code.lane(value, k)
                    code.line(f"llvm.store {one.name}, {address.name} : {one.element}, !llvm.ptr")

    # --- addresses ---

    def _element(self, access: Access) -> str:
        return self.row.memory_type(access)

    def _vector(self, access: Access, address: SsaValue) -> SsaValue:
        return transfer.vector_load(self.row, address, self._element(access), SIDE, None)

    def _one(self, access: Access, u: int, k: int, at: SsaValue) -> SsaValue:
        address, element = self._place(access, u, k, at), self._element(access)
        return self.code.op(f"llvm.load {address.name} : !llvm.ptr -> {element}", element, 1)

    def _start(self, access: Access, u: int) -> SsaValue:
        """The address of row ``u`` of the block at inner index 0."""
        base, stride = self.row.bases[access], access.strides[-2]
        if u == 0 or number(stride) == 0:
            return base
        step = self.code.constant(u, "i64")
        if number(stride) != 1:
            step = self.code.mul(step, self.row.sizes.value(self.code, stride))
        return self.row.gep(base, step, self._element(access))

    def _row(self, access: Access, u: int, at: SsaValue) -> SsaValue:
        return self.row.gep(self._start(access, u), at, self._element(access))

    def _column(self, access: Access, k: int, at: SsaValue) -> SsaValue:
        """The address of inner index ``at + k`` in the block's first row."""
        return self._place(access, 0, k, at)

    def _place(self, access: Access, u: int, k: int, at: SsaValue) -> SsaValue:
        code, stride = self.code, self.row.sizes.value(self.code, access.strides[-1])
        step = code.mul(transfer.shift(self.row, at, k), stride)
        return self.row.gep(self._start(access, u), step, self._element(access))
