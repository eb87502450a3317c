# SPDX-License-Identifier: Apache-2.0
"""Finds ``a is b`` in a model's code: whether two arguments are one tensor cannot be seen while it is traced."""

import dis
from inspect import getattr_static
from types import CodeType

from torch import nn


def code_that_compares_objects(model: nn.Module) -> tuple[CodeType, int] | None:
    """The code and line of the first ``a is b`` in a ``forward`` of ``model``; ``None`` if none.

    A comparison with a constant, a global or a name of an enclosing function compares no arguments.
    """
    for kind in dict.fromkeys(type(part) for part in model.modules()):
        code = getattr(getattr_static(kind, "forward", None), "__code__", None)
        if code is not None and (line := _line(code)) is not None:
            return code, line
    return None


def _line(code: CodeType) -> int | None:
    line, before = code.co_firstlineno, ""
    for one in dis.get_instructions(code):
        line = (
            one.starts_line
            if isinstance(one.starts_line, int) and not isinstance(one.starts_line, bool)
            else line
        )
        if one.opname == "IS_OP" and before.startswith(("LOAD_FAST", "LOAD_ATTR")):
            return line
        before = one.opname
    return None
