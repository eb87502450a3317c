# SPDX-License-Identifier: Apache-2.0
"""Float32 values that reach memory as 16 bits alone: the rounding hides what fast forms of functions err by.

    %4 f32 = exp %3           hidden: all that becomes of it is %7
    %5 f32 = sum %4           hidden: a sum of what is positive is as exact as what it adds up
    %6 f32 = div %4 %5        hidden
    %7 f16 = cast %6

A softmax in float32 between products of halves is three times as fast for it. What is added or subtracted is not
hidden: terms that cancel leave their errors.
"""

import torch

from blade.backends.disc.cpu.passes import operands
from blade.backends.disc.gpu.pointwise import HALVES
from blade.backends.disc.kernel import Compute, Const, Kernel, Reduce, Stmt

_SCALES = ("mul", "div", "where")
_POSITIVE = ("exp", "exp2", "sigmoid")


def hidden(kernel: Kernel) -> frozenset[int]:
    """The statements of ``kernel`` with such values."""
    users, found = _users(kernel), set[int]()
    for i in reversed(range(len(kernel.body))):
        stmt = kernel.body[i]
        if not isinstance(stmt, (Compute, Reduce)) or stmt.dtype != torch.float32 or not users[i]:
            continue
        if all(_hides(kernel.body[u], stmt, u in found) for u in users[i]):
            found.add(i)
    return frozenset(found)


def beside_one(kernel: Kernel) -> frozenset[int]:
    """What ``kernel`` computes to add 1 to it and do nothing else: how near to 0 they are does not matter."""
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
    """Statement -> those that have it as an operand."""
    found: list[list[int]] = [[] for _ in kernel.body]
    for i, stmt in enumerate(kernel.body):
        for operand in operands(stmt):
            found[operand].append(i)
    return found


def _hides(user: Stmt, stmt: Compute | Reduce, known: bool) -> bool:
    """Does ``user`` hide the error of ``stmt``? ``known``: its own is hidden."""
    if isinstance(user, Compute) and user.op == "cast":
        return user.dtype in HALVES
    if isinstance(user, Reduce):
        positive = isinstance(stmt, Compute) and stmt.op in _POSITIVE
        return known and user.kind == "sum" and positive
    return known and isinstance(user, Compute) and user.op in _SCALES
