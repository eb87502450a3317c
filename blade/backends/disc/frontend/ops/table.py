# SPDX-License-Identifier: Apache-2.0
"""The lowering table, ATen overload -> DISC IR, and the context that its rows receive.

    @lowers(aten.relu.default)
    def relu(lo: Lowering, x: Value) -> Value:
        return lo.b.pointwise("maximum", x, lo.b.fill(0, x.shape, x.dtype))

A row receives the op's arguments by position and keyword as in torch's schema: tensors as IR values,
sizes as ints or expressions. It may refuse a case (``raise lo.otherwise()``), which then runs as a
dispatcher ``call``. ``support.why_not_op`` reads the same table.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import sympy
import torch

from blade.backends.disc.frontend.ops.random_calls import draws
from blade.backends.disc.ir.graph import (
    IrBuilder,
    Shape,
    Value,
    plain,
)
from blade.backends.disc.target.capabilities import CPU, TargetCapabilities

LoweringRule = Callable[..., Any]
RuleT = TypeVar("RuleT", bound=LoweringRule)
TABLE: dict[torch._ops.OpOverload, LoweringRule] = {}
NAMED: dict[str, LoweringRule] = {}
"""Rows by qualified name, for ops that exist only once their library is imported."""


def lowers(*targets: torch._ops.OpOverload) -> Callable[[RuleT], RuleT]:
    """Register a row for ``targets``."""

    def register(rule: RuleT) -> RuleT:
        for target in targets:
            assert target not in TABLE, target
            TABLE[target] = rule
        return rule

    return register


def lowers_named(*names: str) -> Callable[[RuleT], RuleT]:
    """Register a row for overloads by name, for example ``library.op.default``."""

    def register(rule: RuleT) -> RuleT:
        for name in names:
            assert name not in NAMED, name
            NAMED[name] = rule
        return rule

    return register


def rule_for(target: Any) -> LoweringRule | None:
    """The row of ``target``, or ``None``."""
    return TABLE.get(target) or NAMED.get(str(target))


class NotLowered(Exception):
    """Raised by a row that does not handle this case: the op becomes a ``call``."""


@dataclass(frozen=True)
class ResultType:
    """Type of one result of an op, from torch's meta kernel."""

    shape: Shape
    dtype: torch.dtype
    strides: Shape


class OperandSlot(int):
    """In a call's argument template: the position of a tensor among the call's operands."""


@dataclass(frozen=True)
class Lowering:
    """The context of a row: the builder, and the types of the op's results.

    ``places``: positions of ``results`` among the op's results, if some are undefined. ``forms``: dtypes
    that the target implements for each op. ``first_only``: no result but the first is read.
    """

    b: IrBuilder
    results: tuple[ResultType, ...]
    places: tuple[int, ...] | None = None
    forms: TargetCapabilities = CPU
    first_only: bool = False

    @property
    def shape(self) -> Shape:
        return self.results[0].shape

    @property
    def dtype(self) -> torch.dtype:
        return self.results[0].dtype

    def otherwise(self) -> NotLowered:
        return NotLowered()

    def value(self, x: Any, dtype: torch.dtype, shape: Sequence[Any] | None = None) -> Value:
        """An operand (tensor or number) as a value of ``dtype``, broadcast to ``shape``."""
        shape = self.shape if shape is None else shape
        if isinstance(x, Value):
            return self.b.broadcast(self.b.cast(x, dtype), shape)
        if isinstance(x, torch.SymFloat):
            return self.b.cast(self.real(x.node.expr, shape), dtype)
        return self.b.fill(x, shape, dtype)

    def real(self, expr: sympy.Expr, shape: Sequence[Any]) -> Value:
        """A real expression of sizes (``1 / sqrt(size)``) at every point of ``shape``, in float64."""
        f64 = torch.float64
        if expr.is_number:
            return self.b.fill(float(expr), shape, f64)
        if expr.is_integer:
            return self.b.cast(self.b.fill(expr, shape, torch.int64), f64)
        name = _REAL.get(type(expr).__name__)
        if isinstance(expr, sympy.Pow):
            name = {-1: "reciprocal", 0.5: "sqrt", -0.5: "rsqrt"}.get(float(expr.exp))
            return self._real(name, expr.args[:1], shape)
        return self._real(name, expr.args, shape)

    def _real(self, name: str | None, args: Sequence[Any], shape: Sequence[Any]) -> Value:
        if name is None:
            raise self.otherwise()
        values = [self.real(a, shape) for a in args]
        if name in ("sqrt", "rsqrt", "reciprocal"):
            return self.b.pointwise(name, *values)
        total = values[0]
        for value in values[1:]:
            total = self.b.pointwise(name, total, value)
        return total

    def at_least(self, size: Any, number: int, why: str) -> None:
        """Rely on ``size >= number``; torch's size symbols claim to be positive, but 0 occurs."""
        if not isinstance(size, int):
            self.b.require(sympy.Ge(size, number, evaluate=False), why)

    def number(self, x: Any, like: Value) -> Value:
        """A scalar at every point of ``like``."""
        return self.b.fill(x, like.shape, like.dtype)

    def call(self, target: torch._ops.OpOverload, args: Sequence[Any]) -> Any:
        """``target`` through the dispatcher, with all schema arguments in order; one value or a list."""
        tensors: list[Value] = []
        template = tuple(
            _template(self._operand(wanted.type, a), tensors)
            for wanted, a in zip(target._schema.arguments, args, strict=True)
        )
        first = self.results[0]
        attrs = self._draw(tensors) if draws(target, args) else {}
        call = self.b.make(
            "call",
            tensors,
            first.shape,
            first.dtype,
            first.strides,
            target=target,
            template=template,
            **attrs,
        )
        if [str(r.type) for r in target._schema.returns] == ["Tensor"]:
            return call
        places = range(len(self.results)) if self.places is None else self.places
        found: list[Value | None] = [None] * (max(places) + 1)
        for k, r in zip(places, self.results, strict=True):
            found[k] = self.b.make("item", (call,), r.shape, r.dtype, r.strides, index=k)
        return found

    def _operand(self, wanted: Any, arg: Any) -> Any:
        """A number as a value if a tensor is wanted: ``7 // x`` is ``floor_divide(7, x)``, which only Python
        accepts.
        """
        is_number = isinstance(arg, int | float) and wanted.kind() == "TensorType"
        dtype = self.dtype
        if dtype.is_complex:  # a number beside complex ones stays real: no kernel stores others
            dtype = torch.float64 if isinstance(arg, float) else torch.int64
        return self.b.fill(arg, (), dtype) if is_number else arg

    def _draw(self, operands: list[Value]) -> dict[str, int]:
        """The number of a call that draws, and its dependence on the previous draw (random_calls.py)."""
        before = [v for v in self.b.values if "draw" in v.attrs]
        operands += before[-1:]
        return {"draw": len(before)}


def _template(arg: Any, tensors: list[Value]) -> Any:
    if isinstance(arg, Value):
        tensors.append(arg)
        return OperandSlot(len(tensors) - 1)
    if isinstance(arg, (list, tuple)):
        return tuple(_template(a, tensors) for a in arg)
    return None if arg is torch.strided else arg  # torch.strided is the default layout


_REAL = {
    "Add": "add",
    "Mul": "mul",
    "ToFloat": "add",
    "FloatTrueDiv": "div",
    "IntTrueDiv": "div",
    "OpaqueUnaryFn_sqrt": "sqrt",
}
"""Name of the sympy class -> op, for functions of sizes with real results."""


def common_dtype(*args: Any) -> torch.dtype:
    """torch's type promotion for tensors (IR values) and Python numbers or sizes."""
    return torch.result_type(*(_stand_in(a) for a in args))


def _stand_in(arg: Any) -> Any:
    if isinstance(arg, Value):
        return torch.empty((1,) * len(arg.shape), dtype=arg.dtype, device="meta")
    if isinstance(arg, torch.SymFloat):
        return 0.5
    if isinstance(arg, sympy.Expr) and not isinstance(plain(arg), int):
        return 2
    return arg if not isinstance(arg, sympy.Expr) else int(arg)


def float_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which torch computes a transcendental function of ``dtype``."""
    return dtype if dtype.is_floating_point else torch.get_default_dtype()
