# SPDX-License-Identifier: Apache-2.0
"""Shortens the size that pads another one to a multiple: ``(7 - h % 7) % 7`` becomes ``7 * ((h + 6) // 7) - h``.

    padded = shortened((7 - h % 7) % 7) + h       # 7 * ((h + 6) // 7): h is there once, not twice
    is_padded(padded, h)                          # True: at least h

A model that pads at each stage, as those with windows do, has sizes that would double at each of them.
"""

from typing import Any

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv, Mod, PythonMod


def shortened(number: Any) -> Any:
    """``number``, as another expression of the same value if it is such a padding."""
    if not isinstance(number, torch.SymInt) or not isinstance(number.node.expr, (Mod, PythonMod)):
        return number
    node = number.node
    size = _padded(*node.expr.args)
    if size is None:
        return number
    base, multiple = size
    padding = _rounded_up(base, multiple) - base
    made: torch.SymInt = node.shape_env.create_symintnode(padding, hint=node.hint)
    return made


def is_padded(size: Any, base: Any) -> bool:
    """Whether ``size`` is ``base`` rounded up to a multiple of a number."""
    if not isinstance(size, torch.SymInt) or not isinstance(base, torch.SymInt):
        return False
    whole, part = sympy.expand(size.node.expr), base.node.expr
    common, _ = whole.as_content_primitive()
    multiples = sympy.divisors(common)[1:] if common.is_Integer else []
    return any(_rounded_up(part, multiple) == whole for multiple in multiples)


def _rounded_up(base: Any, multiple: Any) -> Any:
    return sympy.expand(multiple * FloorDiv(base + multiple - 1, multiple))


def _padded(part: Any, multiple: Any) -> tuple[Any, Any] | None:
    """(e, k) of ``(k - e % k) % k``, with a positive number k."""
    if not multiple.is_Integer or multiple < 1:
        return None
    rest = sympy.expand(multiple - part)
    if isinstance(rest, (Mod, PythonMod)) and rest.args[1] == multiple:
        return rest.args[0], multiple
    return None
