# SPDX-License-Identifier: Apache-2.0
"""Translate size expressions to the program's integer registers, each expression once."""

from typing import Union

import sympy
from torch.utils._sympy.functions import (
    CeilToInt,
    CleanDiv,
    FloorDiv,
    FloorToInt,
    Max,
    Min,
    Mod,
    ModularIndexing,
    PythonMod,
    ToFloat,
    TruncToInt,
)

from blade.core.reason import Code
from blade.errors import Refused
from blade.graph.shapes.symbolic import is_late

Dim = Union[int, sympy.Expr]

_BINARY = {
    FloorDiv: "floordiv",
    CleanDiv: "floordiv",
    Mod: "mod",
    PythonMod: "mod",
    sympy.Mod: "mod",
    sympy.Eq: "eq",
    sympy.Ne: "ne",
    sympy.Lt: "lt",
    sympy.Le: "le",
    sympy.Gt: "gt",
    sympy.Ge: "ge",
}
_FOLDED = {sympy.Add: "add", sympy.And: "and", sympy.Or: "or"}
_FOLDED |= {Min: "min", sympy.Min: "min", Max: "max", sympy.Max: "max"}


class Registers:
    """``lines`` define registers 0, 1, ...; ``of(expr)`` is the register of ``expr``."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._known: dict[object, int] = {}

    def dim(self, input_index: int, axis: int) -> int:
        """The register of one input's size along one axis."""
        return self._line(f"dim {input_index} {axis}")

    def index(self, symbol: sympy.Symbol) -> int:
        """A new register for ``symbol``, the iteration index of a loop."""
        self.lines.append("index")
        self._known[symbol] = len(self.lines) - 1
        return self._known[symbol]

    def bind(self, symbol: sympy.Basic, register: int) -> None:
        self._known[symbol] = register

    def late(self, symbol: sympy.Basic) -> int:
        """A register for ``symbol``, a size that a call makes; the same one for every question."""
        if symbol not in self._known:
            self._known[symbol] = len(self.lines)
            self.lines.append("late")
        return self._known[symbol]

    def is_bound(self, symbol: sympy.Basic) -> bool:
        return symbol in self._known

    def of(self, expr: Dim | sympy.Basic) -> int:
        """The register of ``expr``. Raises ``Refused`` for an expression that registers cannot express."""
        if isinstance(expr, (int, sympy.Integer)):
            return self._line(f"const {int(expr)}")
        if expr in self._known:
            return self._known[expr]
        register = self._compute(expr)
        self._known[expr] = register
        return register

    def compare(self, op: str, a: int, b: int) -> int:
        """The register of a comparison between two registers."""
        return self._line(f"{op} {a} {b}")

    def _compute(self, expr: sympy.Basic) -> int:
        if expr in (sympy.true, sympy.false):
            return self._line(f"const {int(expr == sympy.true)}")
        if is_late(expr):
            return self.late(expr)
        if type(expr) in _FOLDED:
            return self._fold(_FOLDED[type(expr)], [self.of(a) for a in expr.args])
        if isinstance(expr, sympy.Mul):
            return self._product(expr)
        if isinstance(expr, sympy.Pow) and expr.exp.is_Integer and int(expr.exp) > 0:
            return self._fold("mul", [self.of(expr.base)] * int(expr.exp))
        if isinstance(expr, sympy.Not):
            return self._line(f"eq {self.of(expr.args[0])} {self.of(0)}")
        if isinstance(expr, ModularIndexing):
            base, divisor, modulus = expr.args
            return self.of(Mod(FloorDiv(base, divisor), modulus))
        if isinstance(expr, FloorToInt | CeilToInt) and expr.args[0].is_integer:
            return self.of(expr.args[0])
        if isinstance(expr, TruncToInt | FloorToInt) and (scaled := _scaled(expr.args[0])):
            return self.of(scaled)
        if isinstance(expr, FloorToInt | TruncToInt) and (square := _square(expr.args[0])):
            return self._line(f"root {self.of(square)}")
        if isinstance(expr, FloorToInt | TruncToInt):
            return self._times_float(expr)
        if type(expr) in _BINARY:
            a, b = (self.of(x) for x in expr.args)
            return self._line(f"{_BINARY[type(expr)]} {a} {b}")
        raise Refused(Code.CONVERSION_FAILED, f"The size {expr} has no form in registers.")

    def _times_float(self, expr: sympy.Basic) -> int:
        """A size times a float, truncated to an integer (equal to the floor, as neither is negative)."""
        factor, rest = expr.args[0].as_coeff_Mul()
        if not isinstance(rest, ToFloat) or not factor.is_Float or factor < 0:
            raise Refused(Code.CONVERSION_FAILED, f"The size {expr} has no form in registers.")
        return self._line(f"scale {self.of(rest.args[0])} {float(factor)!r}")

    def _product(self, expr: sympy.Mul) -> int:
        """A product of sizes; a rational factor divides the rest exactly, because sizes are integers."""
        number, rest = expr.as_coeff_Mul()
        if not number.is_Rational:
            raise Refused(Code.CONVERSION_FAILED, f"The size {expr} has no form in registers.")
        above = [f for f in sympy.Mul.make_args(rest) if not _is_inverse(f)]
        below = [1 / f for f in sympy.Mul.make_args(rest) if _is_inverse(f)]
        top = self._fold("mul", [self.of(f) for f in [sympy.Integer(number.p), *above]])
        bottom = [f for f in [sympy.Integer(number.q), *below] if f != 1]
        if not bottom:
            return top
        return self._line(f"floordiv {top} {self._fold('mul', [self.of(f) for f in bottom])}")

    def _fold(self, op: str, registers: list[int]) -> int:
        result = registers[0]
        for register in registers[1:]:
            result = self._line(f"{op} {result} {register}")
        return result

    def _line(self, text: str) -> int:
        if text not in self._known:
            self._known[text] = len(self.lines)
            self.lines.append(text)
        return self._known[text]


def _is_inverse(factor: sympy.Basic) -> bool:
    return isinstance(factor, sympy.Pow) and bool(factor.exp.is_negative)


def _square(expr: sympy.Basic) -> sympy.Basic | None:
    """The size whose square root ``expr`` is, if it is one."""
    if type(expr).__name__ != "OpaqueUnaryFn_sqrt":  # torch makes the class
        return None
    [operand] = expr.args
    return operand.args[0] if isinstance(operand, ToFloat) else operand


def _scaled(expr: sympy.Basic) -> sympy.Basic | None:
    """The floor of a size times a scale factor such as 1.5, in integers.

    The product is exact in float64 too if the factor's denominator is a small power of two.
    """
    number, rest = expr.as_coeff_Mul()
    if not isinstance(rest, ToFloat) or not number.is_Float or number <= 0:
        return None
    above, below = float(number).as_integer_ratio()
    return FloorDiv(above * rest.args[0], below) if max(above, below) <= 1 << 16 else None
