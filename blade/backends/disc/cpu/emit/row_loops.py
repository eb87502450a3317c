# SPDX-License-Identifier: Apache-2.0
"""One pass over a row: an unrolled vector loop, a loop of whole vectors, and the remainder.

The remainder is one masked vector, or a scalar loop if an access is strided. The main loop has no mask,
which would cost more than the arithmetic. Reductions keep one accumulator per unrolled vector and combine
them after the loops.
"""

import torch

from blade.backends.disc.cpu.emit import element_types as memory
from blade.backends.disc.cpu.emit import pointwise, reduction
from blade.backends.disc.cpu.emit import vector_memory as transfer
from blade.backends.disc.cpu.emit.mlir_builder import MlirBuilder, SsaValue
from blade.backends.disc.cpu.emit.row import RowEmitter
from blade.backends.disc.cpu.emit.vector_memory import Chunk
from blade.backends.disc.ir.iteration_space import number
from blade.backends.disc.ir.kernel import (
    Accessing,
    Compute,
    Gather,
    Index,
    Load,
    Reduce,
    Stmt,
    Store,
)
from blade.backends.disc.ir.kernel_schedule import RowPass, cost, operands


def emit_row_loops(row: RowEmitter, step: RowPass) -> None:
    """Generate the pass; its reductions become uniforms of ``row``."""
    _RowLoops(row, step).run()


class _RowLoops:
    def __init__(self, row: RowEmitter, step: RowPass) -> None:
        self.row, self.step, self.code = row, step, row.code
        self.body = row.kernel.body
        self.reductions = [
            s for s in (self.body[r] for r in step.reductions) if isinstance(s, Reduce)
        ]
        accesses = [self.body[i] for i in (*step.points, *step.stores)]
        self.dense = all(map(self._is_dense, accesses))
        self.length = row.length

    def run(self) -> None:
        lanes, unroll = self.row.lanes, self._unroll()
        self._spread_uniforms(lanes)
        ends = self._split(lanes, unroll)
        values = [
            reduction.identity(self.code, r, lanes) for r in self.reductions for _ in range(unroll)
        ]
        values = self._loop(self.row.low, ends[0], lanes, unroll, values)
        firsts = [
            self._join(r, values[k * unroll : (k + 1) * unroll])
            for k, r in enumerate(self.reductions)
        ]
        firsts = self._loop(ends[0], ends[1], lanes, 1, firsts) if unroll > 1 else firsts
        if self.dense:
            firsts = self._masked(ends[1], firsts)
        results = [reduction.across(self.code, r, v) for r, v in zip(self.reductions, firsts)]
        if not self.dense:
            results = self._loop(ends[1], self.row.high, 1, 1, results)
        for r, value in zip(self.step.reductions, results):
            self.row.uniforms[r] = reduction.finish(self.code, self.body[r], value)

    # --- the three parts of the row ---

    def _unroll(self) -> int:
        """Vectors per step of the main loop: few if each is long; a divisor of a known length."""
        work = sum(cost(self.body[i]) for i in self.step.points)
        wide = any(self.row.dtype(i) in (torch.int64, torch.float64) for i in self.step.points)
        most = 4 if work < 10 and not wide else 2
        if self.length is None:
            return most
        vectors = self.length // self.row.lanes
        return next(
            (u for u in (most, 2) if u <= most and vectors >= u and vectors % u == 0),
            1 if vectors < 8 else most,
        )

    def _split(self, lanes: int, unroll: int) -> tuple[SsaValue, SsaValue]:
        """The ends of the unrolled loop and of the loop of whole vectors."""
        code, row = self.code, self.row
        if self.length is not None:
            ends = [self.length // n * n for n in (lanes * unroll, lanes)]
            return code.constant(ends[0], "i64"), code.constant(ends[1], "i64")
        total = code.sub(row.high, row.low)
        main = code.apply("arith.andi", total, code.constant(-lanes * unroll, "i64"))
        whole = code.apply("arith.andi", total, code.constant(-lanes, "i64"))
        return code.add(row.low, main), code.add(row.low, whole)

    def _loop(
        self, low: SsaValue, high: SsaValue, lanes: int, unroll: int, values: list[SsaValue]
    ) -> list[SsaValue]:
        """``scf.for`` over [low, high) in steps of ``unroll`` vectors, carrying ``values``."""
        if low == high:
            return values
        code = self.code
        if lanes == 1:
            self._spread_uniforms(1)
        step = code.constant(lanes * unroll, "i64")
        at = SsaValue(code.fresh(), "i64", 1)
        head = f"scf.for {at.name} = {low.name} to {high.name} step {step.name}"
        carried = [SsaValue(code.fresh(), v.element, v.lanes) for v in values]
        results = self._open_carrying(head, carried, values, " : i64")
        self._yield(self._emit(Chunk(at, lanes, unroll), carried))
        code.close()
        return results

    def _masked(self, low: SsaValue, values: list[SsaValue]) -> list[SsaValue]:
        """The last, incomplete vector."""
        code, lanes = self.code, self.row.lanes
        if self.row.multiple % lanes == 0:
            return values
        left = code.sub(self.row.high, low)
        limit = code.broadcast(code.convert("arith.trunci", left, "i32"), lanes)
        mask = code.compare("slt", code.iota("i32", lanes), limit)
        if self.length is not None:
            return self._emit(Chunk(low, lanes, 1, mask), values)
        some = code.compare("sgt", left, code.constant(0, "i64"))
        types = ", ".join(v.type for v in values)
        results = _numbered(code, values)
        prefix = f"{results[0].name.partition('#')[0]}:{len(values)} = " if values else ""
        code.open(f"{prefix}scf.if {some.name}" + (f" -> ({types})" if values else ""))
        self._yield(self._emit(Chunk(low, lanes, 1, mask), values))
        if values:
            code.close("} else {")
            code.indent += 1
            self._yield(values)
        code.close()
        return results

    def _open_carrying(
        self, head: str, carried: list[SsaValue], start: list[SsaValue], tail: str
    ) -> list[SsaValue]:
        if not start:
            self.code.open(head + tail)
            return []
        results = _numbered(self.code, start)
        pairs = ", ".join(f"{c.name} = {s.name}" for c, s in zip(carried, start))
        types = ", ".join(s.type for s in start)
        name = results[0].name.partition("#")[0]
        self.code.open(f"{name}:{len(start)} = {head} iter_args({pairs}) -> ({types}){tail}")
        return results

    def _yield(self, values: list[SsaValue]) -> None:
        if values:
            self.code.line(
                f"scf.yield {', '.join(v.name for v in values)} : {', '.join(v.type for v in values)}"
            )

    # --- one chunk ---

    def _emit(self, chunk: Chunk, values: list[SsaValue]) -> list[SsaValue]:
        """All statements of the pass for ``chunk``; returns the accumulators after it.

        Each statement runs for all vectors of the chunk, so that independent operations overlap.
        """
        points: dict[tuple[int, int], SsaValue] = {}
        at = [transfer.shift(self.row, chunk.at, u * chunk.lanes) for u in range(chunk.count)]
        for v in self.step.reload:
            for u in range(chunk.count):
                points[v, u] = transfer.reload(self.row, v, at[u], chunk.lanes)
        for i in self.step.points:
            for u in range(chunk.count):
                points[i, u] = self._point(i, u, at[u], chunk, points)
                if i in self.step.keep:
                    transfer.keep(self.row, i, at[u], points[i, u])
        result = list(values)
        for k, r in enumerate(self.reductions):
            for u in range(chunk.count):
                here = k * chunk.count + u
                result[here] = self._reduce(r, result[here], u, chunk, points)
        for i in self.step.stores:
            for u in range(chunk.count):
                self._store(i, at[u], chunk, points, u)
        return result

    def _reduce(
        self,
        r: Reduce,
        total: SsaValue,
        u: int,
        chunk: Chunk,
        points: dict[tuple[int, int], SsaValue],
    ) -> SsaValue:
        x = reduction.prepare(self.code, r, self._read(r.arg, u, chunk.lanes, points))
        if chunk.mask is not None:
            x = self.code.select(chunk.mask, x, reduction.identity(self.code, r, chunk.lanes))
        return reduction.combine(self.code, r, total, x)

    def _store(
        self, i: int, at: SsaValue, chunk: Chunk, points: dict[tuple[int, int], SsaValue], u: int
    ) -> None:
        stmt = self.body[i]
        assert isinstance(stmt, Store), stmt
        value = self._read(stmt.value, u, chunk.lanes, points)
        raw = memory.encode(self.code, value, self.row.kernel.args[stmt.access.arg].dtype)
        transfer.store(self.row, stmt.access, raw, at, chunk)

    def _read(
        self, v: int, u: int, lanes: int, points: dict[tuple[int, int], SsaValue]
    ) -> SsaValue:
        return self.row.as_lanes(v, lanes) if v in self.row.plan.uniform else points[v, u]

    def _point(
        self, i: int, u: int, at: SsaValue, chunk: Chunk, points: dict[tuple[int, int], SsaValue]
    ) -> SsaValue:
        code, stmt, lanes = self.code, self.body[i], chunk.lanes
        if isinstance(stmt, Load):
            return memory.decode(code, transfer.load(self.row, stmt.access, at, chunk), stmt.dtype)
        if isinstance(stmt, Gather):
            return memory.decode(code, self._gather(stmt, u, at, chunk, points), stmt.dtype)
        if isinstance(stmt, Index):
            here = code.add(code.broadcast(at, lanes), code.iota("i64", lanes)) if lanes > 1 else at
            return pointwise.cast(code, here, torch.int64, stmt.dtype)
        assert isinstance(stmt, Compute), stmt
        args = [self._read(a, u, lanes, points) for a in stmt.args]
        return pointwise.compute(code, stmt.op, args, self.row.dtype(stmt.args[-1]), stmt.dtype)

    def _gather(
        self,
        stmt: Gather,
        u: int,
        at: SsaValue,
        chunk: Chunk,
        points: dict[tuple[int, int], SsaValue],
    ) -> SsaValue:
        """With one index per row this is a plain vector load; otherwise each lane loads its own element."""
        if stmt.index in self.row.plan.uniform:
            base = self.row.gathered(stmt, self.row.uniforms[stmt.index])
            return transfer.load(self.row, stmt.access, at, chunk, base)
        return transfer.gather(self.row, stmt, points[stmt.index, u], at)

    # --- small things ---

    def _is_dense(self, stmt: Stmt) -> bool:
        """Can a vector of this statement be masked?"""
        if isinstance(stmt, Gather) and stmt.index not in self.row.plan.uniform:
            return False
        return not isinstance(stmt, Accessing) or number(stmt.access.strides[-1]) in (0, 1)

    def _join(self, r: Reduce, values: list[SsaValue]) -> SsaValue:
        while len(values) > 1:
            pairs = zip(values[::2], values[1::2])
            values = [reduction.combine(self.code, r, a, b) for a, b in pairs]
        return values[0]

    def _spread_uniforms(self, lanes: int) -> None:
        """Broadcast the uniforms that the pass reads, before its loops."""
        for i in (*self.step.points, *self.step.reductions, *self.step.stores):
            for a in operands(self.body[i]):
                if a in self.row.plan.uniform:
                    self.row.as_lanes(a, lanes)


def _numbered(code: MlirBuilder, like: list[SsaValue]) -> list[SsaValue]:
    if not like:
        return []
    name = code.fresh()
    return [SsaValue(f"{name}#{k}", v.element, v.lanes) for k, v in enumerate(like)]
