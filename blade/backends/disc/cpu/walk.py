# SPDX-License-Identifier: Apache-2.0
"""One pass over a row: an unrolled vector loop, a loop of whole vectors, and the rest.

The rest is one masked vector, or, where an access is strided, a scalar loop. A mask never enters the main loop: it would
cost more than the arithmetic. Reductions keep one accumulator per unrolled vector, joined after the loops.
"""

from dataclasses import dataclass

import torch

from blade.backends.disc.cpu import memory, pointwise, reduction
from blade.backends.disc.cpu.code import Code, Value, type_text
from blade.backends.disc.cpu.passes import Pass, cost, operands
from blade.backends.disc.cpu.row import Row
from blade.backends.disc.cpu.space import number
from blade.backends.disc.kernel import Access, Compute, Index, Load, Reduce, Stmt, Store


def walk(row: Row, step: Pass) -> None:
    """Generate the pass; its reductions become uniforms of ``row``."""
    _Walk(row, step).run()


@dataclass(frozen=True)
class _Chunk:
    """``count`` vectors (or scalars) starting at inner index ``at``."""

    at: Value
    lanes: int
    count: int
    mask: Value | None = None


class _Walk:
    def __init__(self, row: Row, step: Pass) -> None:
        self.row, self.step, self.code = row, step, row.code
        self.body = row.kernel.body
        self.reductions = [
            s for s in (self.body[r] for r in step.reductions) if isinstance(s, Reduce)
        ]
        accesses = [self._stmt(i) for i in (*step.points, *step.stores)]
        self.dense = all(_inner(s) in (0, 1) for s in accesses if isinstance(s, (Load, Store)))
        self.length = None if row.low.name == "%begin" else number(row.kernel.inner)

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
        """How many vectors the main loop takes at a time: few when each is long, a divisor if the length is known."""
        work = sum(cost(self._stmt(i)) for i in self.step.points)
        wide = any(self._dtype(i) in (torch.int64, torch.float64) for i in self.step.points)
        most = 4 if work < 10 and not wide else 2
        if self.length is None:
            return most
        vectors = self.length // self.row.lanes
        return next(
            (u for u in (most, 2) if u <= most and vectors >= u and vectors % u == 0),
            1 if vectors < 8 else most,
        )

    def _split(self, lanes: int, unroll: int) -> tuple[Value, Value]:
        """Where the unrolled loop and the loop of whole vectors end."""
        code, row = self.code, self.row
        if self.length is not None:
            ends = [self.length // n * n for n in (lanes * unroll, lanes)]
            return code.constant(ends[0], "i64"), code.constant(ends[1], "i64")
        total = code.sub(row.high, row.low)
        main = code.apply("arith.andi", total, code.constant(-lanes * unroll, "i64"))
        whole = code.apply("arith.andi", total, code.constant(-lanes, "i64"))
        return code.add(row.low, main), code.add(row.low, whole)

    def _loop(
        self, low: Value, high: Value, lanes: int, unroll: int, values: list[Value]
    ) -> list[Value]:
        """``scf.for`` over [low, high) in steps of ``unroll`` vectors, carrying ``values``."""
        if low == high:
            return values
        code = self.code
        if lanes == 1:
            self._spread_uniforms(1)
        step = code.constant(lanes * unroll, "i64")
        at = Value(code.fresh(), "i64", 1)
        head = f"scf.for {at.name} = {low.name} to {high.name} step {step.name}"
        carried = [Value(code.fresh(), v.element, v.lanes) for v in values]
        results = self._open_carrying(head, carried, values, " : i64")
        self._yield(self._chunk(_Chunk(at, lanes, unroll), carried))
        code.close()
        return results

    def _masked(self, low: Value, values: list[Value]) -> list[Value]:
        """The last, incomplete vector."""
        code, lanes = self.code, self.row.lanes
        if self.length is not None and self.length % lanes == 0:
            return values
        left = code.sub(self.row.high, low)
        limit = code.broadcast(code.convert("arith.trunci", left, "i32"), lanes)
        mask = code.compare("slt", code.iota("i32", lanes), limit)
        if self.length is not None:
            return self._chunk(_Chunk(low, lanes, 1, mask), values)
        some = code.compare("sgt", left, code.constant(0, "i64"))
        types = ", ".join(v.type for v in values)
        results = [Value(f"{code.fresh()}#{k}", v.element, v.lanes) for k, v in enumerate(values)]
        results = _numbered(code, values)
        prefix = f"{results[0].name.partition('#')[0]}:{len(values)} = " if values else ""
        code.open(f"{prefix}scf.if {some.name}" + (f" -> ({types})" if values else ""))
        self._yield(self._chunk(_Chunk(low, lanes, 1, mask), values))
        if values:
            code.close("} else {")
            code.indent += 1
            self._yield(values)
        code.close()
        return results

    def _open_carrying(
        self, head: str, carried: list[Value], start: list[Value], tail: str
    ) -> list[Value]:
        if not start:
            self.code.open(head + tail)
            return []
        results = _numbered(self.code, start)
        pairs = ", ".join(f"{c.name} = {s.name}" for c, s in zip(carried, start))
        types = ", ".join(s.type for s in start)
        name = results[0].name.partition("#")[0]
        self.code.open(f"{name}:{len(start)} = {head} iter_args({pairs}) -> ({types}){tail}")
        return results

    def _yield(self, values: list[Value]) -> None:
        if values:
            self.code.line(
                f"scf.yield {', '.join(v.name for v in values)} : {', '.join(v.type for v in values)}"
            )

    # --- one chunk ---

    def _chunk(self, chunk: _Chunk, values: list[Value]) -> list[Value]:
        """All statements of the pass for ``chunk``; returns the accumulators after it.

        Statement by statement, the vectors of the chunk side by side: independent work to overlap.
        """
        points: dict[tuple[int, int], Value] = {}
        at = [self._offset(chunk.at, u * chunk.lanes) for u in range(chunk.count)]
        for v in self.step.reload:
            for u in range(chunk.count):
                points[v, u] = self._reload(v, at[u], chunk.lanes)
        for i in self.step.points:
            for u in range(chunk.count):
                points[i, u] = self._point(i, u, at[u], chunk, points)
                if i in self.step.keep:
                    self._keep(i, at[u], points[i, u])
        result = list(values)
        for k, r in enumerate(self.reductions):
            for u in range(chunk.count):
                x = reduction.prepare(self.code, r, self._read(r.arg, u, chunk.lanes, points))
                if chunk.mask is not None:
                    x = self.code.select(
                        chunk.mask, x, reduction.identity(self.code, r, chunk.lanes)
                    )
                result[k * chunk.count + u] = reduction.combine(
                    self.code, r, result[k * chunk.count + u], x
                )
        for i in self.step.stores:
            for u in range(chunk.count):
                self._store(i, u, at[u], chunk, points)
        return result

    def _offset(self, at: Value, by: int) -> Value:
        return at if by == 0 else self.code.add(at, self.code.constant(by, "i64"))

    def _read(self, v: int, u: int, lanes: int, points: dict[tuple[int, int], Value]) -> Value:
        return self.row.as_lanes(v, lanes) if v in self.row.plan.uniform else points[v, u]

    def _point(
        self, i: int, u: int, at: Value, chunk: _Chunk, points: dict[tuple[int, int], Value]
    ) -> Value:
        code, stmt, lanes = self.code, self.body[i], chunk.lanes
        if isinstance(stmt, Load):
            return memory.decode(code, self._load(stmt.access, at, chunk), stmt.dtype)
        if isinstance(stmt, Index):
            here = code.add(code.broadcast(at, lanes), code.iota("i64", lanes)) if lanes > 1 else at
            return pointwise.cast(code, here, torch.int64, stmt.dtype)
        assert isinstance(stmt, Compute), stmt
        args = [self._read(a, u, lanes, points) for a in stmt.args]
        return pointwise.compute(code, stmt.op, args, self._dtype(stmt.args[-1]), stmt.dtype)

    # --- memory ---

    def _load(self, access: Access, at: Value, chunk: _Chunk) -> Value:
        code, lanes, element = self.code, chunk.lanes, self.row.memory_type(access)
        base = self.row.bases[access]
        if lanes > 1 and number(access.strides[-1]) != 1:
            return code.from_lanes(
                [self._load_one(access, self._offset(at, k)) for k in range(lanes)]
            )
        if lanes == 1:
            return self._load_one(access, at)
        address = self.row.gep(base, at, element)
        align = _align(element)
        kind = type_text(element, lanes)
        if chunk.mask is None:
            return code.op(
                f"llvm.load {address.name} {{alignment = {align} : i64}} : !llvm.ptr -> {kind}",
                element,
                lanes,
            )
        # Lanes that are not there compute on ones: no division by zero, no slow denormals.
        ones = code.constant(1, element, lanes)
        text = f"llvm.intr.masked.load {address.name}, {chunk.mask.name}, {ones.name} {{alignment = {align} : i32}}"
        return code.op(f"{text} : (!llvm.ptr, {chunk.mask.type}, {kind}) -> {kind}", element, lanes)

    def _load_one(self, access: Access, at: Value) -> Value:
        element = self.row.memory_type(access)
        address = self._element(access, at)
        return self.code.op(f"llvm.load {address.name} : !llvm.ptr -> {element}", element, 1)

    def _element(self, access: Access, at: Value) -> Value:
        stride = access.strides[-1]
        if number(stride) != 1:
            at = self.code.mul(at, self.row.sizes.value(self.code, stride))
        return self.row.gep(self.row.bases[access], at, self.row.memory_type(access))

    def _store(
        self, i: int, u: int, at: Value, chunk: _Chunk, points: dict[tuple[int, int], Value]
    ) -> None:
        code, stmt = self.code, self.body[i]
        assert isinstance(stmt, Store), stmt
        access = stmt.access
        value = memory.encode(
            code,
            self._read(stmt.value, u, chunk.lanes, points),
            self.row.kernel.args[access.arg].dtype,
        )
        if chunk.lanes == 1 or number(access.strides[-1]) != 1:
            for k in range(chunk.lanes):
                address = self._element(access, self._offset(at, k))
                code.line(
                    f"llvm.store {code.lane(value, k).name}, {address.name} : {value.element}, !llvm.ptr"
                )
            return
        address = self.row.gep(self.row.bases[access], at, value.element)
        align = _align(value.element)
        if chunk.mask is None:
            code.line(
                f"llvm.store {value.name}, {address.name} {{alignment = {align} : i64}} : {value.type}, !llvm.ptr"
            )
            return
        kinds = f"{value.type}, {chunk.mask.type} into !llvm.ptr"
        code.line(
            f"llvm.intr.masked.store {value.name}, {address.name}, {chunk.mask.name} {{alignment = {align} : i32}} : {kinds}"
        )

    def _reload(self, v: int, at: Value, lanes: int) -> Value:
        element = self.row.kept_type(v)
        address = self.row.gep(self.row.scratch[v], at, element)
        text = f"llvm.load {address.name} {{alignment = {_align(element)} : i64}} : !llvm.ptr"
        raw = self.code.op(f"{text} -> {type_text(element, lanes)}", element, lanes)
        return memory.decode(self.code, raw, torch.bool) if self._dtype(v) == torch.bool else raw

    def _keep(self, v: int, at: Value, value: Value) -> None:
        if value.element == "i1":
            value = memory.encode(self.code, value, torch.bool)
        address = self.row.gep(self.row.scratch[v], at, value.element)
        align = _align(value.element)
        self.code.line(
            f"llvm.store {value.name}, {address.name} {{alignment = {align} : i64}} : {value.type}, !llvm.ptr"
        )

    # --- small things ---

    def _stmt(self, i: int) -> Stmt:
        return self.body[i]

    def _dtype(self, i: int) -> torch.dtype:
        return self.row.dtype(i)

    def _join(self, r: Reduce, values: list[Value]) -> Value:
        while len(values) > 1:
            pairs = zip(values[::2], values[1::2])
            values = [reduction.combine(self.code, r, a, b) for a, b in pairs]
        return values[0]

    def _spread_uniforms(self, lanes: int) -> None:
        """Broadcast what the pass reads while still outside its loops."""
        for i in (*self.step.points, *self.step.reductions, *self.step.stores):
            for a in operands(self.body[i]):
                if a in self.row.plan.uniform:
                    self.row.as_lanes(a, lanes)


def _numbered(code: Code, like: list[Value]) -> list[Value]:
    if not like:
        return []
    name = code.fresh()
    return [Value(f"{name}#{k}", v.element, v.lanes) for k, v in enumerate(like)]


def _inner(stmt: Load | Store) -> int | None:
    return number(stmt.access.strides[-1])


def _align(element: str) -> int:
    return int(element[1:]) // 8
