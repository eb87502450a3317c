# SPDX-License-Identifier: Apache-2.0
"""The iteration space of a kernel: merges dimensions that every access traverses evenly, and tells which
sizes generated code can compute.
"""

from collections.abc import Sequence
from dataclasses import replace

import sympy

from blade.backends.disc.ir.kernel import (
    Access,
    Accessing,
    Accumulate,
    Dim,
    Gather,
    Index,
    Kernel,
    Reduce,
    Stmt,
    Store,
)


def number(dim: Dim) -> int | None:
    """``dim`` if it is a constant, else ``None``."""
    if isinstance(dim, int):
        return dim
    return int(dim) if dim.is_Integer else None


def coalesce(kernel: Kernel) -> Kernel:
    """The same kernel over fewer dimensions: merges neighbours that every access traverses as one.

    ``inner`` merges only in kernels without a reduction. Dimensions that an ``Index`` names stay.
    """
    known = kernel.sizes()
    fixed = {s.dim for s in kernel.body if isinstance(s, Index)}
    movable_inner = not any(isinstance(s, Reduce) for s in kernel.body)
    k = len(kernel.outer) - 1
    while k >= 0:
        last = k + 1 == len(kernel.outer)
        if not {k, k + 1} & fixed and (movable_inner or not last) and _as_one(kernel, k, known):
            kernel = _merge(kernel, k)
            fixed = {d - (d > k) for d in fixed}
        k -= 1
    return kernel


def across(kernel: Kernel) -> int | None:
    """The outer dimension that is contiguous in memory for an access strided along inner, if any.

    Such a kernel transposes: its code should traverse that dimension and inner in blocks.
    """
    if any(isinstance(s, (Reduce, Gather, Accumulate)) for s in kernel.body):
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


def is_computable(dim: Dim, known: Sequence[sympy.Expr]) -> bool:
    """Whether code can compute ``dim``: it is known, or a sum or product of known expressions."""
    if isinstance(dim, int) or dim.is_Integer or dim in known:
        return True
    return isinstance(dim, (sympy.Add, sympy.Mul)) and all(
        is_computable(arg, known) for arg in dim.args
    )


def _as_one(kernel: Kernel, k: int, known: Sequence[sympy.Expr]) -> bool:
    """Whether every access traverses dimensions ``k`` and ``k + 1`` evenly, with ``strides[k + 1]``."""
    dims = (*kernel.outer, kernel.inner)
    if not is_computable(dims[k] * dims[k + 1], known):
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
