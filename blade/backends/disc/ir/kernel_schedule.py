# SPDX-License-Identifier: Apache-2.0
"""Schedules a kernel: the passes over the row, and the values that each computes, keeps and reloads.

A value is *uniform* if it is the same along the row (constants, sizes, loads with inner stride 0,
reductions and values computed from those): it is computed once per row, as a scalar. Any other value is
a *point* value. A value's *stage* is the number of reductions that must end before it can be known. Pass
p computes the point values up to stage p that its reductions and stores need. It recomputes values of
earlier passes that are cheap (a load, an addition) and reloads others from a scratch row. All point
stores happen in the last pass, because an output may share its memory with an input that earlier passes
read again.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from blade.backends.disc.ir.kernel import (
    Accumulate,
    Compute,
    Const,
    Gather,
    Index,
    Kernel,
    Load,
    Reduce,
    Size,
    Stmt,
    Store,
)

# Rough cost of one vector, in loads from L1.
_HEAVY = {
    **dict.fromkeys(
        "exp exp2 expm1 log log2 log1p tanh erf erfc sigmoid sin cos tan sinh cosh".split(), 12.0
    ),
    **dict.fromkeys("asin acos atan atan2 pow remainder fmod div_floor div_trunc".split(), 20.0),
    **dict.fromkeys("div sqrt rsqrt reciprocal".split(), 4.0),
}
_KEEP_FROM = 2.5  # a costlier value is written to scratch instead of recomputed


@dataclass(frozen=True)
class RowPass:
    """One pass over the row. All entries are statement numbers in evaluation order."""

    uniforms: tuple[int, ...]  # once, before the loop
    points: tuple[int, ...]
    reload: tuple[int, ...]  # point values read from scratch
    keep: tuple[int, ...]  # point values also written to scratch
    reductions: tuple[int, ...]
    stores: tuple[int, ...]


@dataclass(frozen=True)
class KernelSchedule:
    passes: tuple[RowPass, ...]
    finals: tuple[int, ...]  # uniforms after the last pass
    row_stores: tuple[int, ...]
    uniform: frozenset[int]


def operands(stmt: Stmt) -> tuple[int, ...]:
    """The statements whose values ``stmt`` reads."""
    if isinstance(stmt, Compute):
        return stmt.args
    if isinstance(stmt, Reduce):
        return (stmt.arg,)
    if isinstance(stmt, Gather):
        return (stmt.index,)
    if isinstance(stmt, Accumulate):
        return (stmt.value, stmt.index)
    return (stmt.value,) if isinstance(stmt, Store) else ()


def cost(stmt: Stmt, axis: int = -1) -> float:
    """Cost of one vector of this statement along ``axis``, in loads."""
    if isinstance(stmt, Load):
        return 1.0 if stmt.access.strides[axis] in (0, 1) else 8.0
    if isinstance(stmt, Gather):
        return 8.0 if axis == -1 else 1.0  # beside inner, lanes share the index (column_blocks.py)
    if isinstance(stmt, Compute):
        return _HEAVY.get(stmt.op, 0.5)
    return 0.0


def schedule_kernel(kernel: Kernel, axis: int = -1, scratch: bool = True) -> KernelSchedule:
    """Split the body into passes, without statements that no store needs. ``axis``: the vectorized axis.

    Without ``scratch`` nothing is kept from pass to pass: values are recomputed.
    """
    return _Scheduler(kernel, axis, scratch).plan()


def live(body: Sequence[Stmt]) -> set[int]:
    """The stores, and the statements that they need."""
    found: set[int] = set()
    todo = [i for i, s in enumerate(body) if isinstance(s, Store)]
    while todo:
        i = todo.pop()
        if i not in found:
            found.add(i)
            todo.extend(operands(body[i]))
    return found


class _Scheduler:
    def __init__(self, kernel: Kernel, axis: int, scratch: bool) -> None:
        self.body = kernel.body
        self.axis, self.scratch = axis, scratch
        self.live = live(kernel.body)
        self.uniform: set[int] = set()
        self.stage: dict[int, int] = {}
        for i, stmt in enumerate(self.body):
            args = operands(stmt)
            after = max((self.stage[a] for a in args), default=0)
            self.stage[i] = after + 1 if isinstance(stmt, Reduce) else after
            if self._is_uniform(stmt, len(kernel.outer)):
                self.uniform.add(i)
        # In rows of at most one element, inner stride 0 is equivalent to stride 1.
        few = kernel.inner in (0, 1)
        self.row_stores = tuple(
            i
            for i, s in enumerate(self.body)
            if isinstance(s, Store)
            and s.access.strides[-1] == 0
            and not (few and s.value not in self.uniform)
        )
        self.kept: dict[int, int] = {}  # value -> the pass that writes it to scratch
        self.first: dict[int, int] = {}  # point value -> the first pass that computes it

    def plan(self) -> KernelSchedule:
        stores = [
            i for i, s in enumerate(self.body) if isinstance(s, Store) and i not in self.row_stores
        ]
        reductions = [
            i for i, s in enumerate(self.body) if isinstance(s, Reduce) and i in self.live
        ]
        ends = [self.stage[i] for i in stores] + [self.stage[i] - 1 for i in reductions]
        count = max(ends, default=-1) + 1
        drafts = []
        for p in range(count):
            ending = tuple(r for r in reductions if self.stage[r] == p + 1)
            storing = tuple(stores) if p == count - 1 else ()
            drafts.append((*self._walk(p, (*ending, *storing)), ending, storing))
        passes = tuple(
            RowPass(self._uniforms_at(p), points, reload, self._kept_in(p), ending, storing)
            for p, (points, reload, ending, storing) in enumerate(drafts)
        )
        finals = tuple(i for i in self._uniforms() if self.stage[i] >= count)
        return KernelSchedule(passes, finals, self.row_stores, frozenset(self.uniform))

    def _is_uniform(self, stmt: Stmt, inner: int) -> bool:
        if isinstance(stmt, (Const, Size, Reduce)):
            return True
        if isinstance(stmt, Load):
            return stmt.access.strides[-1] == 0
        if isinstance(stmt, Gather):
            return stmt.access.strides[-1] == 0 and stmt.index in self.uniform
        if isinstance(stmt, Index):
            return stmt.dim != inner
        return isinstance(stmt, Compute) and all(a in self.uniform for a in stmt.args)

    def _uniforms(self) -> Iterable[int]:
        """Live uniform values except reductions, which passes compute."""
        return (i for i in sorted(self.uniform & self.live) if not isinstance(self.body[i], Reduce))

    def _uniforms_at(self, p: int) -> tuple[int, ...]:
        return tuple(i for i in self._uniforms() if self.stage[i] == p)

    def _kept_in(self, p: int) -> tuple[int, ...]:
        return tuple(sorted(v for v, writer in self.kept.items() if writer == p))

    def _walk(self, p: int, targets: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Point values that pass ``p`` computes, and those it reloads from scratch, for its ``targets``."""
        points: set[int] = set()
        reload: set[int] = set()
        todo = [a for t in targets for a in operands(self.body[t])]
        while todo:
            v = todo.pop()
            if v in self.uniform or v in points or v in reload:
                continue
            if self._from_scratch(v, p):
                self.kept.setdefault(v, self.first[v])
                reload.add(v)
                continue
            points.add(v)
            self.first.setdefault(v, p)
            todo.extend(operands(self.body[v]))
        loads_first = sorted(points, key=lambda v: (not isinstance(self.body[v], Load), v))
        return tuple(loads_first), tuple(sorted(reload))

    def _from_scratch(self, v: int, p: int) -> bool:
        earlier = self.scratch and self.first.get(v, p) < p
        return earlier and (v in self.kept or self._again(v, p, set()) > _KEEP_FROM)

    def _again(self, v: int, p: int, seen: set[int]) -> float:
        """Cost of recomputing ``v`` in pass ``p``; kept values count as loads."""
        if v in self.uniform or v in seen:
            return 0.0
        seen.add(v)
        if v in self.kept and self.kept[v] < p:
            return 1.0
        return cost(self.body[v], self.axis) + sum(
            self._again(a, p, seen) for a in operands(self.body[v])
        )
