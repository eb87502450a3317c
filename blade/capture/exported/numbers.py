# SPDX-License-Identifier: Apache-2.0
"""Numbers of an exported program as TorchScript: calls of Python's operators, and sympy expressions.

write_call(writer, operator.floordiv, [size, 7], INT)           # aten::floordiv(%size, 7)
write_expression(writer, sympy.Eq(Mod(s, 7), 0), {s: size})     # aten::eq(aten::remainder(%size, 7), 0)
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import sympy
import torch
from torch.utils._sympy import functions

from blade.core.reason import Code
from blade.core.torch_modes import SYM_SQRT
from blade.errors import Refused
from blade.graph.torchscript.alias import schema_of
from blade.graph.torchscript.writer import BOOL, FLOAT, INT, ScriptWriter

Number = torch._C.Value | bool | int | float

_KINDS: dict[Callable[..., Any], str] = {
    operator.add: "aten::add",
    operator.sub: "aten::sub",
    operator.mul: "aten::mul",
    operator.truediv: "aten::div",
    operator.floordiv: "aten::floordiv",
    operator.mod: "aten::remainder",
    operator.pow: "aten::pow",
    operator.neg: "aten::neg",
    operator.eq: "aten::eq",
    operator.ne: "aten::ne",
    operator.lt: "aten::lt",
    operator.le: "aten::le",
    operator.gt: "aten::gt",
    operator.ge: "aten::ge",
    operator.and_: "aten::__and__",
    operator.or_: "aten::__or__",
    operator.abs: "prim::abs",
    math.trunc: "aten::Int",
    math.floor: "aten::floor",
    math.ceil: "aten::ceil",
    round: "aten::round",
    torch.sym_not: "aten::__not__",
    torch.sym_max: "prim::max",
    torch.sym_min: "prim::min",
    torch.sym_int: "aten::Int",
    torch.sym_float: "aten::Float",
    SYM_SQRT: "aten::sqrt",
}

_FOLDED: dict[type, Callable[..., Any]] = {
    sympy.Add: operator.add,
    sympy.Mul: operator.mul,
    sympy.And: operator.and_,
    sympy.Or: operator.or_,
    sympy.Max: torch.sym_max,
    sympy.Min: torch.sym_min,
    functions.Max: torch.sym_max,
    functions.Min: torch.sym_min,
}

_BINARY: dict[type, Callable[..., Any]] = {
    functions.FloorDiv: operator.floordiv,
    functions.CleanDiv: operator.floordiv,
    functions.Mod: operator.mod,
    functions.PythonMod: operator.mod,
    sympy.Mod: operator.mod,
    sympy.Eq: operator.eq,
    sympy.Ne: operator.ne,
    sympy.StrictLessThan: operator.lt,
    sympy.LessThan: operator.le,
    sympy.StrictGreaterThan: operator.gt,
    sympy.GreaterThan: operator.ge,
}


def kind_of(value: Any) -> torch._C.JitType | None:
    """The type of a number or symbolic number; ``None`` for anything else."""
    if isinstance(value, (bool, torch.SymBool)):
        return BOOL
    if isinstance(value, (int, torch.SymInt)):
        return INT
    return FLOAT if isinstance(value, (float, torch.SymFloat)) else None


def is_number_function(function: Any) -> bool:
    """Whether ``write_call`` takes ``function``."""
    return function in _KINDS or function in (torch.sym_sum, torch.sym_ite)


def write_call(
    writer: ScriptWriter,
    function: Callable[..., Any],
    inputs: Sequence[Any],
    result: torch._C.JitType,
) -> Number:
    """``function`` of numbers; raises ``Refused`` where TorchScript has no such operator."""
    if function is torch.sym_sum:
        total: Number = reduce(partial(_added, writer, result), inputs[0])
        return total
    if not any(isinstance(one, torch._C.Value) for one in inputs):
        known: Number = function(*inputs)
        return known
    values = [value_of(writer, one) for one in inputs]
    if function is torch.sym_ite:
        condition, then, other = values
        return writer.branch(condition, lambda: [then], lambda: [other])[0]
    made = writer.op(_KINDS[function], values, result)
    schema = schema_of(made.node())
    if schema is None:
        kinds = ", ".join(str(one.type()) for one in values)
        raise Refused(Code.EXPORT_FAILED, f"TorchScript has no {_KINDS[function]}({kinds}).")
    made.setType(schema.returns[0].type)
    return as_kind(writer, made, result)


def _added(writer: ScriptWriter, result: torch._C.JitType, a: Any, b: Any) -> Number:
    return write_call(writer, operator.add, [a, b], result)


def as_kind(writer: ScriptWriter, value: torch._C.Value, kind: torch._C.JitType) -> torch._C.Value:
    """``value`` converted to the number type ``kind``."""
    if value.type().kind() == kind.kind():
        return value
    casts = {"IntType": "aten::Int", "FloatType": "aten::Float", "BoolType": "aten::Bool"}
    return writer.op(casts[kind.kind()], [value], kind)


def value_of(writer: ScriptWriter, number: Any) -> torch._C.Value:
    """``number`` in the graph."""
    return number if isinstance(number, torch._C.Value) else writer.constant(number)


def write_expression(
    writer: ScriptWriter, expression: Any, symbols: Mapping[sympy.Symbol, torch._C.Value]
) -> Number:
    """A sympy expression or condition over integer ``symbols``; raises ``Refused`` for other functions."""
    if expression in symbols:
        return symbols[expression]
    if expression.is_Integer:
        return int(expression)
    if expression in (sympy.true, sympy.false):
        return bool(expression)
    inner = [write_expression(writer, one, symbols) for one in expression.args]
    result = BOOL if isinstance(expression, sympy.logic.boolalg.Boolean) else INT
    if isinstance(expression, sympy.Not):
        return write_call(writer, torch.sym_not, inner, BOOL)
    if type(expression) in _BINARY:
        return write_call(writer, _BINARY[type(expression)], inner, result)
    if type(expression) in _FOLDED:
        fold = _FOLDED[type(expression)]
        return reduce(lambda a, b: write_call(writer, fold, [a, b], result), inner)
    if expression.is_Pow and expression.exp.is_Integer and 0 < expression.exp <= 4:
        factors = inner[:1] * int(expression.exp)
        return reduce(lambda a, b: write_call(writer, operator.mul, [a, b], INT), factors)
    raise Refused(
        Code.EXPORT_FAILED, f"A condition on sizes has no form in TorchScript: {expression}."
    )
