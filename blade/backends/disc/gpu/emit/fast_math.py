# SPDX-License-Identifier: Apache-2.0
"""Float32 values that reach memory only as 16 bits: the rounding hides the errors of fast math functions.

    %4 f32 = exp %3           hidden: only %7 depends on it
    %5 f32 = sum %4           hidden: a sum of positive terms has their relative error
    %6 f32 = div %4 %5        hidden
    %7 f16 = cast %6

This makes a float32 softmax between products of halves three times as fast. Operands of additions and
subtractions are not hidden, since cancellation amplifies their errors.
"""

import torch

from blade.backends.disc.ir.kernel import (
    Compute,
    Const,
    Kernel,
    Reduce,
    Stmt,
)
from blade.backends.disc.ir.kernel_schedule import operands
from blade.core.dtypes import HALVES

_SCALES = ("mul", "div", "where")
_POSITIVE = ("exp", "exp2", "sigmoid")


def hidden(kernel: Kernel) -> frozenset[int]:
    """The statements of ``kernel`` whose errors are hidden."""
    users, found = _users(kernel), set[int]()
    for i in reversed(range(len(kernel.body))):
        stmt = kernel.body[i]
        if not isinstance(stmt, (Compute, Reduce)) or stmt.dtype != torch.float32 or not users[i]:
            continue
        if all(_hides(kernel.body[u], stmt, u in found) for u in users[i]):
            found.add(i)
    return frozenset(found)


def beside_one(kernel: Kernel) -> frozenset[int]:
    """The statements whose only use is an addition of 1: their relative error near 0 does not matter."""
    return frozenset(
        i
        for i, users in enumerate(_users(kernel))
        if isinstance(kernel.body[i], Compute)
        and users
        and all(_adds_one(kernel, kernel.body[u]) for u in users)
    )


def _adds_one(kernel: Kernel, stmt: Stmt) -> bool:
    if not isinstance(stmt, Compute) or stmt.op != "add":
        return False
    return any(isinstance(c := kernel.body[a], Const) and c.value == 1 for a in stmt.args)


def _users(kernel: Kernel) -> list[list[int]]:
    """Statement -> the statements that have it as an operand."""
    found: list[list[int]] = [[] for _ in kernel.body]
    for i, stmt in enumerate(kernel.body):
        for operand in operands(stmt):
            found[operand].append(i)
    return found


def _hides(user: Stmt, stmt: Compute | Reduce, known: bool) -> bool:
    """Does ``user`` hide the error of ``stmt``? ``known``: the error of ``user`` is hidden."""
    if isinstance(user, Compute) and user.op == "cast":
        return user.dtype in HALVES
    if isinstance(user, Reduce):
        positive = isinstance(stmt, Compute) and stmt.op in _POSITIVE
        return known and user.kind == "sum" and positive
    return known and isinstance(user, Compute) and user.op in _SCALES
