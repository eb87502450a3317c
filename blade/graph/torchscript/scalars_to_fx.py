# SPDX-License-Identifier: Apache-2.0
"""Converts scalar lines to FX: sizes become ``aten.sym_size.int``, arithmetic ``operator.*``.

A number that is the same for every shape is folded into its user; only a number that depends on a size
becomes a node, with a SymInt (SymFloat, SymBool) in ``meta["val"]``.
"""

import math
import operator
from collections.abc import Callable
from typing import Any

import torch

from blade.core.torch_modes import SYM_SQRT

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "aten::add": operator.add,
    "aten::sub": operator.sub,
    "aten::mul": operator.mul,
    "aten::div": operator.truediv,
    "aten::floordiv": operator.floordiv,
    "aten::floor_divide": operator.floordiv,
    "aten::remainder": operator.mod,
    "aten::neg": operator.neg,
    "aten::pow": operator.pow,
    "aten::eq": operator.eq,
    "aten::ne": operator.ne,
    "aten::lt": operator.lt,
    "aten::le": operator.le,
    "aten::gt": operator.gt,
    "aten::ge": operator.ge,
    "aten::__not__": torch.sym_not,
    "aten::sqrt": SYM_SQRT,
    "aten::Int": torch.sym_int,
    "aten::Float": torch.sym_float,
    "aten::len": len,
    "aten::ceil": math.ceil,
    "aten::floor": math.floor,
    "prim::min": torch.sym_min,
    "prim::max": torch.sym_max,
}
"""Kind -> function on numbers and symbolic numbers; other kinds cannot be expressed."""

LISTS: dict[str, Callable[..., Any]] = {
    "aten::__contains__": operator.contains,
    "aten::__getitem__": operator.getitem,
    "aten::add": operator.add,
    "aten::copy": list,
    "aten::len": len,
    "aten::list": list,
    "aten::mul": operator.mul,
    "aten::slice": lambda numbers, start, end, step: numbers[start:end:step],
}
"""Kind -> function on lists of numbers, whose elements may be symbolic."""

FOLDS: dict[str, str] = {
    "prim::min": "prim::min",
    "prim::max": "prim::max",
    "aten::sum": "aten::add",
}
"""Kind on a list of numbers -> kind on two of them that is applied from element to element."""

PASS_THROUGH = frozenset(
    "prim::NumToTensor aten::ScalarImplicit aten::IntImplicit aten::FloatImplicit "
    "prim::unchecked_cast".split()
)

_BY_HAND = frozenset(
    "prim::Constant prim::ListConstruct prim::TupleConstruct prim::ListUnpack prim::TupleUnpack aten::size aten::numel "
    "aten::dim aten::is_floating_point prim::dtype prim::device prim::layout prim::is_cuda prim::is_cpu prim::type "
    "aten::rsub aten::to aten::clamp aten::div aten::divmod prim::abs aten::abs aten::__lshift__ "
    "aten::__rshift__ aten::where aten::Bool".split()
)
"""Further kinds that ``to_fx`` converts."""


def has_form(kind: str) -> bool:
    """Whether a scalar line of this kind can be converted."""
    return (
        kind in PASS_THROUGH
        or kind in _BY_HAND
        or any(kind in t for t in (FUNCTIONS, LISTS, FOLDS))
    )
