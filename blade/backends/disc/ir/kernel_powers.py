# SPDX-License-Identifier: Apache-2.0
"""``pow`` with a constant exponent as a multiplication or a root, as torch does for ``x ** 2``."""

from dataclasses import replace

from blade.backends.disc.ir.kernel import (
    Compute,
    Const,
    Kernel,
    Stmt,
)

# Exponent -> op on the base; "square" and "cube" are no ops of the kernel IR, codegen adds them.
_FLOAT: dict[float, str] = {2: "square", 3: "cube", 0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}
_INT: dict[float, str] = {2: "square", 3: "cube"}


def constant_powers(kernel: Kernel) -> Kernel:
    """The same kernel with calls of ``pow`` replaced where a cheaper form exists."""
    return replace(kernel, body=tuple(_cheaper(s, kernel.body) for s in kernel.body))


def _cheaper(stmt: Stmt, body: tuple[Stmt, ...]) -> Stmt:
    if not isinstance(stmt, Compute) or stmt.op != "pow":
        return stmt
    exponent = body[stmt.args[1]]
    if not isinstance(exponent, Const):
        return stmt
    forms = _FLOAT if stmt.dtype.is_floating_point else _INT
    op = forms.get(exponent.value)
    return stmt if op is None else Compute(op, stmt.args[:1], stmt.dtype)
