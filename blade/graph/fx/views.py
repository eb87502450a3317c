# SPDX-License-Identifier: Apache-2.0
"""Which ops return memory of their operands, by their schemas.

is_view(aten.slice.Tensor)                  # a view, or a copy where there is no such view (reshape)
may_lie_in_operand(aten.copy_.default)      # also what returns the operand that it wrote to
"""

from functools import cache
from typing import Any

import torch

_UNMARKED = (torch.ops.aten._unsafe_view.default,)  # by its schema it returns memory of its own


@cache
def is_view(target: Any) -> bool:
    """Whether a result of an op is a view of an operand that the op does not write to."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    marked = (one.alias_info for one in target._schema.returns)
    return any(alias is not None and not alias.is_write for alias in marked)


@cache
def may_lie_in_operand(target: Any) -> bool:
    """Whether a result of an op may lie in the memory of an operand, its first one."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return target in _UNMARKED or any(r.alias_info is not None for r in target._schema.returns)
