# SPDX-License-Identifier: Apache-2.0
"""Converts scalar lines to FX: sizes become ``aten.sym_size.int``, arithmetic ``operator.*``.

A number that is the same for every shape is folded into its user; only a number that depends on a size
becomes a node, with a SymInt (SymFloat, SymBool) in ``meta["val"]``.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch

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
    "aten::sqrt": torch._sym_sqrt,  # type: ignore[attr-defined]
    "aten::Int": torch.sym_int,
    "aten::Float": torch.sym_float,
    "aten::len": len,
    "prim::min": torch.sym_min,
    "prim::max": torch.sym_max,
}
"""Kind -> function on numbers and symbolic numbers; other kinds cannot be expressed."""

PASS_THROUGH = frozenset(
    "prim::NumToTensor aten::ScalarImplicit aten::IntImplicit aten::FloatImplicit "
    "prim::unchecked_cast".split()
)
