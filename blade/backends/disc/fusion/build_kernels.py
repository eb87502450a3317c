# SPDX-License-Identifier: Apache-2.0
"""Fusion groups as kernels: loads, statements and stores over one iteration space."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from sympy import sympify

from blade.backends.disc.fusion.fuse import Fused, FusionGroup, row_source, space_of
from blade.backends.disc.ir.graph import (
    LEAVES,
    Shape,
    Value,
    contiguous_strides,
    plain,
)
from blade.backends.disc.ir.kernel import (
    Access,
    Accessing,
    Accumulate,
    Arg,
    Compute,
    Const,
    Dim,
    Gather,
    Index,
    Kernel,
    Load,
    Reduce,
    Size,
    Stmt,
    Store,
)
from blade.backends.disc.ir.views import StridedView, collapse, view_of


@dataclass(frozen=True)
class GroupKernel:
    """A kernel and the values whose buffers are its pointer arguments, in order."""

    kernel: Kernel
    buffers: tuple[Value, ...]


def build_kernel(group: FusionGroup, fused: Fused) -> GroupKernel:
    """The kernel that computes ``group`` and stores the members that other units read."""
    built = _KernelBuilder(group, fused)
    for member in group.members:
        built.member(member)
    return built.finish()


def build_copy(part: Value, whole: StridedView, axis: int, start: Dim) -> GroupKernel:
    """The kernel that writes ``part`` into ``whole`` from ``start`` along ``axis``."""
    view = view_of(part)
    assert view is not None, part
    load = Load(Access(0, view.strides, view.offset), part.dtype)
    offset = plain(whole.offset + sympify(start) * whole.strides[axis])
    store = Store(Access(1, whole.strides, offset), 0)
    outer, inner, body = _space(part.shape, [load, store], False, set())
    args = (Arg(part.dtype, False), Arg(part.dtype, True))
    return GroupKernel(Kernel(outer, inner, args, tuple(body)), (view.base, whole.base))


def build_put(written: Value) -> GroupKernel:
    """The kernel that writes values at an index along one axis of an input: ``written`` is its new contents."""
    index, values = written.args
    axis, size, own = written.attrs["axis"], written.shape, contiguous_strides(written.shape)
    shape = tuple(index.shape[0] if k == axis else n for k, n in enumerate(size))
    at, of = view_of(index), view_of(values)
    assert at is not None and of is not None, written
    along = tuple(at.strides[0] if k == axis else 0 for k in range(len(shape)))
    missing = (0,) * (len(shape) - len(values.shape))
    spread = (
        *missing,
        *(0 if n == 1 else s for n, s in zip(values.shape, of.strides, strict=True)),
    )
    body: list[Stmt] = [
        Load(Access(0, along, at.offset), index.dtype),
        Load(Access(1, spread, of.offset), values.dtype),
    ]
    if written.attrs["negative"]:
        bound = size[axis]
        whole = Const(bound, index.dtype) if isinstance(bound, int) else Size(bound, index.dtype)
        body += [
            whole,
            Const(0, index.dtype),
            Compute("lt", (0, 3), torch.bool),
            Compute("add", (0, 2), index.dtype),
            Compute("where", (4, 5, 0), index.dtype),
        ]
    place = len(body) - 1 if written.attrs["negative"] else 0
    others = tuple(0 if k == axis else stride for k, stride in enumerate(own))
    body.append(Accumulate(Access(2, others), 1, place, own[axis], size[axis], "put"))
    outer, inner, body = _space(shape, body, False, set())
    args = (Arg(index.dtype, False), Arg(values.dtype, False), Arg(written.dtype, True))
    return GroupKernel(Kernel(outer, inner, args, tuple(body)), (at.base, of.base, written))


def join_copies(copies: Sequence[GroupKernel]) -> list[GroupKernel]:
    """Joins copies over equal spaces into one kernel if none reads a buffer that another one writes.

    A cache of keys and one of values grow by the same size: two launches instead of four.
    """
    joined: list[list[GroupKernel]] = []
    written: set[int] = set()
    for one in copies:
        source, whole = one.buffers
        alike = [] if source.id in written else joined
        written.add(whole.id)
        same = next((g for g in alike if _space_of(g[0]) == _space_of(one)), None)
        if same is None:
            joined.append([one])
        else:
            same.append(one)
    return [_one_kernel(group) for group in joined]


def _space_of(copy: GroupKernel) -> tuple[object, ...]:
    kernel = copy.kernel
    return kernel.outer, kernel.inner, tuple(arg.dtype for arg in kernel.args)


def _one_kernel(copies: Sequence[GroupKernel]) -> GroupKernel:
    """One kernel that loads every element before it stores any."""
    buffers = {v.id: v for copy in copies for v in copy.buffers}
    places = {k: n for n, k in enumerate(buffers)}
    loads: list[Stmt] = []
    stores: list[Stmt] = []
    for k, copy in enumerate(copies):
        source, whole = copy.buffers
        load, store = copy.kernel.body
        assert isinstance(load, Load) and isinstance(store, Store), copy
        loads.append(replace(load, access=replace(load.access, arg=places[source.id])))
        stores.append(Store(replace(store.access, arg=places[whole.id]), k))
    written = {copy.buffers[1].id for copy in copies}
    args = tuple(Arg(v.dtype, v.id in written) for v in buffers.values())
    kernel = replace(copies[0].kernel, args=args, body=(*loads, *stores))
    return GroupKernel(kernel, tuple(buffers.values()))


class _KernelBuilder:
    def __init__(self, group: FusionGroup, fused: Fused) -> None:
        self.group = group
        self.fused = fused
        self.buffers: dict[int, Value] = {}
        self.written: set[int] = set()
        self.body: list[Stmt] = []
        self.stores: list[Store] = []
        self.known: dict[object, int] = {}
        self.number: dict[int, int] = {}

    def member(self, v: Value) -> None:
        stmt: Stmt
        if v.op == "scatter":
            self.stores.append(self.scatter(v))
            return
        if v.op == "gather":
            stmt = self.gather(v)
        elif v.op == "reduce":
            stmt = Reduce(v.attrs["kind"], self.operand(v.args[0]), v.dtype)
        else:
            stmt = Compute(v.op, tuple(map(self.operand, v.args)), v.dtype)
        self.number[v.id] = self.emit(stmt)
        if v.id in self.fused.stored:
            place = self.fused.placed.get(v.id) or StridedView(v, contiguous_strides(v.shape))
            again = [where for (_, k), where in self.fused.repeated.items() if k == v.id]
            for where in (place, *again):
                self.written.add(where.base.id)
                self.stores.append(Store(self.access(where, v.shape), self.number[v.id]))

    def operand(self, v: Value) -> int:
        source = row_source(v) or v
        if source.id in self.number:
            return self.number[source.id]
        if v.op in LEAVES:
            return self.emit(self.leaf(v))
        view = view_of(v)
        assert view is not None, v
        return self.emit(Load(self.access(view, v.shape), v.dtype))

    def gather(self, v: Value) -> Gather:
        """Element ``index`` along one axis of the source, at the point's own index along the others."""
        view = view_of(v.args[0])
        assert view is not None, v
        strides = _moved(view.strides, v)
        access = self.access(StridedView(view.base, strides, view.offset), v.shape)
        axis = v.attrs["axis"]
        bound = v.args[0].shape[axis] if v.attrs.get("asserts") else None
        return Gather(access, self.operand(v.args[1]), view.strides[axis], v.dtype, bound)

    def scatter(self, v: Value) -> Accumulate:
        """Each point of the source goes to element ``index`` along one axis of the result."""
        index, source = v.args
        own = contiguous_strides(v.shape)
        self.written.add(v.id)
        access = self.access(StridedView(v, _moved(own, v)), source.shape)
        axis = v.attrs["axis"]
        return Accumulate(
            access,
            self.operand(source),
            self.operand(index),
            own[axis],
            v.shape[axis],
            v.attrs["kind"],
        )

    def leaf(self, v: Value) -> Stmt:
        if v.op == "fill":
            return Const(v.attrs["value"], v.dtype)
        if v.op == "size":
            return Size(v.attrs["value"], v.dtype)
        return Index(v.attrs["axis"], v.dtype)

    def access(self, view: StridedView, shape: Shape) -> Access:
        self.buffers.setdefault(view.base.id, view.base)
        strides = list(view.strides)
        for k, (size, whole) in enumerate(zip(shape, self.group.shape, strict=True)):
            if size == 1 and whole != 1:  # a row value: the same along the row
                strides[k] = 0
        position = list(self.buffers).index(view.base.id)
        return Access(position, tuple(strides), view.offset)

    def emit(self, stmt: Stmt) -> int:
        # by text: 0.0 == -0.0 and 1 == True
        key = (repr(stmt.value), stmt.dtype) if isinstance(stmt, Const) else stmt
        if key not in self.known:
            self.known[key] = len(self.body)
            self.body.append(stmt)
        return self.known[key]

    def finish(self) -> GroupKernel:
        body = [*self.body, *self.stores]
        shape = self.group.shape
        indexed = {s.dim for s in body if isinstance(s, Index)}
        outer, inner, body = _space(shape, body, self.group.row, indexed)
        args = tuple(Arg(v.dtype, v.id in self.written) for v in self.buffers.values())
        multiple = next(n for n in (64, 32, 16, 8, 4, 2, 1) if self.fused.facts.divides(n, inner))
        kernel = Kernel(outer, inner, args, tuple(body), multiple)
        return GroupKernel(kernel, tuple(self.buffers.values()))


def _moved(strides: Shape, v: Value) -> Shape:
    """``strides`` of what the `gather` or `scatter` ``v`` indexes, by the axes of the index."""
    found: list[Dim] = [0] * len(space_of(v))
    for stride, place in zip(strides, v.attrs["axes"], strict=True):
        if place is not None:
            found[place] = stride
    return tuple(found)


def _space(
    shape: Shape, body: list[Stmt], row: bool, indexed: set[int]
) -> tuple[tuple[Dim, ...], Dim, list[Stmt]]:
    """Split ``shape`` into outer and inner axes; merges evenly traversed axes."""
    accesses = [s.access for s in body if isinstance(s, Accessing)]
    if indexed or not shape:
        dims, columns = shape or (1,), [a.strides if shape else (0,) for a in accesses]
        return dims[:-1], dims[-1], _with_strides(body, columns)
    if not row:
        dims, merged = collapse(shape, [a.strides for a in accesses])
        if not dims:
            dims, merged = (1,), [(0,) for _ in accesses]
        return dims[:-1], dims[-1], _with_strides(body, merged)
    outer, merged = collapse(shape[:-1], [a.strides[:-1] for a in accesses])
    columns = [(*m, a.strides[-1]) for m, a in zip(merged, accesses, strict=True)]
    return outer, shape[-1], _with_strides(body, columns)


def _with_strides(body: list[Stmt], columns: list[Shape]) -> list[Stmt]:
    rest = iter(columns)
    return [
        replace(s, access=replace(s.access, strides=next(rest))) if isinstance(s, Accessing) else s
        for s in body
    ]
