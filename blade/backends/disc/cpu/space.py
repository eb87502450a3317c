# SPDX-License-Identifier: Apache-2.0
"""The iteration space of a kernel: merging dimensions that every access walks as one, and sizes in code."""

from collections.abc import Sequence
from dataclasses import replace

import sympy

from blade.backends.disc.cpu.code import Code, Value
from blade.backends.disc.kernel import (
    Access,
    Accessing,
    Dim,
    Gather,
    Index,
    Kernel,
    Reduce,
    Stmt,
    Store,
)


class Sizes:
    """Values of ``Dim`` expressions in code: ints are constants, symbols come from the ``ints`` argument."""

    def __init__(self, known: Sequence[sympy.Expr]) -> None:
        self.known = tuple(known)
        self.values: dict[sympy.Expr, Value] = {}

    def load(self, code: Code) -> None:
        """Read every entry of ``%ints``."""
        for k, expression in enumerate(self.known):
            address = code.op(
                f"llvm.getelementptr %ints[{k}] : (!llvm.ptr) -> !llvm.ptr, i64", "ptr", 1
            )
            self.values[expression] = code.op(
                f"llvm.load {address.name} : !llvm.ptr -> i64", "i64", 1
            )

    def can_compute(self, dim: Dim) -> bool:
        """Whether ``value`` can produce ``dim``: known, or made by + and * from what is known."""
        if isinstance(dim, int) or dim.is_Integer or dim in self.known:
            return True
        return isinstance(dim, (sympy.Add, sympy.Mul)) and all(map(self.can_compute, dim.args))

    def value(self, code: Code, dim: Dim) -> Value:
        """``dim`` as an i64 scalar, usable from here on."""
        if isinstance(dim, int) or dim.is_Integer:
            return code.constant(int(dim), "i64")
        if dim not in self.values:
            assert isinstance(dim, (sympy.Add, sympy.Mul)), dim
            parts = [self.value(code, a) for a in dim.args]
            total = parts[0]
            for part in parts[1:]:
                total = (
                    code.add(total, part) if isinstance(dim, sympy.Add) else code.mul(total, part)
                )
            self.values[dim] = total
        return self.values[dim]


def number(dim: Dim) -> int | None:
    """``dim`` if it is a constant."""
    if isinstance(dim, int):
        return dim
    return int(dim) if dim.is_Integer else None


def coalesce(kernel: Kernel) -> Kernel:
    """The same kernel over fewer dimensions: neighbours merge where every access walks them as one.

    ``inner`` takes part only in kernels without a reduction. Dimensions an ``Index`` names are left alone.
    """
    sizes = Sizes(kernel.sizes())
    fixed = {s.dim for s in kernel.body if isinstance(s, Index)}
    movable_inner = not any(isinstance(s, Reduce) for s in kernel.body)
    k = len(kernel.outer) - 1
    while k >= 0:
        last = k + 1 == len(kernel.outer)
        if not {k, k + 1} & fixed and (movable_inner or not last) and _as_one(kernel, k, sizes):
            kernel = _merge(kernel, k)
            fixed = {d - (d > k) for d in fixed}
        k -= 1
    return kernel


def across(kernel: Kernel) -> int | None:
    """The outer dimension along which memory is contiguous for an access that jumps along inner, if any.

    Such a kernel transposes: it should walk that dimension and inner in blocks.
    """
    if any(isinstance(s, (Reduce, Gather)) for s in kernel.body):
        return None
    stored = [s.access for s in kernel.body if isinstance(s, Store)]
    if any(number(a.strides[-1]) == 0 for a in stored):
        return None
    for access in _accesses(kernel):
        if number(access.strides[-1]) not in (0, 1):
            steps = [number(s) for s in access.strides[:-1]]
            if 1 in steps:
                return steps.index(1)
    return None


def move_last(kernel: Kernel, k: int) -> Kernel:
    """The same kernel with outer dimension ``k`` as the last outer one."""
    order = [d for d in range(len(kernel.outer)) if d != k] + [k]
    place = {old: new for new, old in enumerate(order)}

    def moved(stmt: Stmt) -> Stmt:
        if isinstance(stmt, Index):
            return replace(stmt, dim=place.get(stmt.dim, stmt.dim))
        if not isinstance(stmt, Accessing):
            return stmt
        strides = stmt.access.strides
        return replace(
            stmt, access=replace(stmt.access, strides=(*(strides[d] for d in order), strides[-1]))
        )

    outer = tuple(kernel.outer[d] for d in order)
    return replace(kernel, outer=outer, body=tuple(map(moved, kernel.body)))


def _accesses(kernel: Kernel) -> list[Access]:
    return [s.access for s in kernel.body if isinstance(s, Accessing)]


def _as_one(kernel: Kernel, k: int, sizes: Sizes) -> bool:
    """Whether dimensions ``k`` and ``k + 1`` can be walked as one of stride ``strides[k + 1]``."""
    dims = (*kernel.outer, kernel.inner)
    if not sizes.can_compute(dims[k] * dims[k + 1]):
        return False
    if number(dims[k]) == 1:
        return True
    return all(
        sympy.expand(a.strides[k] - a.strides[k + 1] * dims[k + 1]) == 0 for a in _accesses(kernel)
    )


def _merge(kernel: Kernel, k: int) -> Kernel:
    dims = (*kernel.outer, kernel.inner)
    merged = (*dims[:k], dims[k] * dims[k + 1], *dims[k + 2 :])
    body = tuple(_without(s, k) for s in kernel.body)
    return replace(kernel, outer=merged[:-1], inner=merged[-1], body=body)


def _without(stmt: Stmt, k: int) -> Stmt:
    if isinstance(stmt, Index) and stmt.dim > k:
        return replace(stmt, dim=stmt.dim - 1)
    if not isinstance(stmt, Accessing):
        return stmt
    strides = stmt.access.strides
    return replace(stmt, access=replace(stmt.access, strides=(*strides[:k], *strides[k + 1 :])))
