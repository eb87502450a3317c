# SPDX-License-Identifier: Apache-2.0
"""The conditions on sizes under which an exported program is right, as few as will do.

    found = find_guards(program, leaves, all_ranges=True)
    [text_of(one) for one in found.conditions]       # ["x.size(1) % 7 == 0", "x.size(1) >= 14"]

They come from the sizes that export made constant or equal, from the ranges of its symbols, and from the
guards that it recorded. What the others imply is left out (``simplify_guards.py``).
"""

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.export import ExportedProgram
from torch.utils._sympy.functions import FloorDiv, Max, Min, PythonMod
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.value_ranges import ValueRanges

from blade.capture.exported.simplify_guards import simplified
from blade.core.reason import Code
from blade.errors import Refused

_UNCHECKED = 2  # torch.export takes this lower end for granted, and programs are right below it


@dataclass(frozen=True)
class Leaf:
    """A leaf of the arguments: how messages and export's guards call it, and what it was at export.

    ``given`` is a fake tensor, a number (symbolic or not), or any other constant.
    """

    name: str
    sources: tuple[str, ...]
    given: Any


@dataclass(frozen=True)
class Guards:
    """``conditions`` over ``symbols``; a symbol is an axis of a leaf, or a leaf that is an int itself."""

    conditions: tuple[Any, ...]
    symbols: dict[sympy.Symbol, tuple[int, int | None]]


def find_guards(program: ExportedProgram, leaves: Sequence[Leaf], all_ranges: bool) -> Guards:
    """Return the conditions of ``program`` on ``leaves``, those of its arguments.

    ``all_ranges``: the lower end 2 of a range is a condition too. torch's own check of a program leaves it
    out, because most programs are right for smaller sizes. Raises ``Refused`` for a condition that cannot be
    expressed.
    """
    sizes = _Sizes(program, all_ranges)
    for index, leaf in enumerate(leaves):
        sizes.add(index, leaf)
    sizes.settle()
    conditions = [*sizes.conditions]
    for code in program._guards_code:
        conditions.append(_parse(code, leaves, sizes.known))
    return Guards(tuple(simplified(conditions, sizes.ranges)), sizes.symbols)


def text_of(condition: Any) -> str:
    """``condition`` as a Python expression."""
    return ast.unparse(ast.parse(PythonPrinter().doprint(condition), mode="eval"))


class _Sizes:
    """What the program says of each size: a number, a symbol of its own, or an expression of such."""

    def __init__(self, program: ExportedProgram, all_ranges: bool) -> None:
        self._constraints = program.range_constraints
        self._all_ranges = all_ranges
        self._own: dict[sympy.Symbol, Any] = {}  # export's symbol -> an expression of ours
        self._later: list[tuple[sympy.Symbol, Any]] = []
        self.symbols: dict[sympy.Symbol, tuple[int, int | None]] = {}
        self.known: dict[tuple[int, int | None], Any] = {}
        self.conditions: list[Any] = []
        self.ranges: dict[sympy.Symbol, ValueRanges[Any]] = {}

    def add(self, index: int, leaf: Leaf) -> None:
        if isinstance(leaf.given, torch.Tensor):
            for axis, size in enumerate(leaf.given.shape):
                self._add((index, axis), f"{leaf.name}.size({axis})", size)
        elif isinstance(leaf.given, (int, torch.SymInt)):
            self._add((index, None), leaf.name, leaf.given)

    def settle(self) -> None:
        """Take the expressions of several symbols, and solve those of a symbol that is no size itself."""
        for symbol, expression in self._later:
            for one in expression.free_symbols - set(self._own):
                self._own[one] = self._solved(symbol, expression, one)
            self.conditions.append(sympy.Eq(symbol, expression.xreplace(self._own)))
        for place, expression in self.known.items():
            self.known[place] = expression.xreplace(self._own)
        for one, own in self._own.items():
            if own not in self.symbols:  # the range of a symbol that is an expression of a size
                low, high = self._range(one)
                self.conditions += [own >= low, own <= high] if high < int_oo else [own >= low]

    def _add(self, place: tuple[int, int | None], name: str, size: int | torch.SymInt) -> None:
        symbol = sympy.Symbol(name, integer=True, nonnegative=True)
        self.symbols[symbol] = place
        self.ranges[symbol] = ValueRanges(0, int_oo)
        if isinstance(size, int):
            expression: Any = sympy.Integer(int(size))
        else:
            expression = size.node.expr
        self.known[place] = expression
        if isinstance(expression, sympy.Symbol) and expression not in self._own:
            self._own[expression] = symbol
            low, high = self._range(expression)
            self.ranges[symbol] = ValueRanges(low, high)
            self.conditions += [symbol >= low] if low > 0 else []
            self.conditions += [symbol <= high] if high < int_oo else []
        else:
            self._later.append((symbol, expression))

    def _range(self, symbol: sympy.Symbol) -> tuple[Any, Any]:
        found = self._constraints.get(symbol)
        low, high = (0, int_oo) if found is None else (found.lower, found.upper)
        low = max(low, 0)
        return low if self._all_ranges or low > _UNCHECKED else sympy.Integer(0), high

    def _solved(self, symbol: sympy.Symbol, expression: Any, unknown: sympy.Symbol) -> Any:
        """``unknown``, from ``symbol == factor * unknown + rest``."""
        factor = expression.coeff(unknown, 1)
        rest = expression - factor * unknown
        if not factor.is_Integer or factor <= 0 or rest.free_symbols - set(self._own):
            raise Refused(
                Code.EXPORT_FAILED, f"{symbol} is {expression}, which gives no value of {unknown}."
            )
        return FloorDiv(symbol - rest.xreplace(self._own), factor)


_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: FloorDiv,
    ast.Mod: PythonMod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.Eq: sympy.Eq,
    ast.NotEq: sympy.Ne,
    ast.Lt: sympy.Lt,
    ast.LtE: sympy.Le,
    ast.Gt: sympy.Gt,
    ast.GtE: sympy.Ge,
    ast.And: sympy.And,
    ast.Or: sympy.Or,
    ast.Not: sympy.Not,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "max": Max,
    "min": Min,
    "Max": Max,
    "Min": Min,
    "FloorDiv": FloorDiv,
    "Mod": PythonMod,
    "PythonMod": PythonMod,
}


def _parse(code: str, leaves: Sequence[Leaf], known: Mapping[tuple[int, int | None], Any]) -> Any:
    """A guard as export writes it (``L['x'].size()[1] % 7 == 0``) over ``known``."""
    text = code
    for index, leaf in enumerate(leaves):
        for source in leaf.sources:
            text = text.replace(source, f"leaf[{index}]")
    try:
        return _Parser(known).read(ast.parse(text.replace("\n", ""), mode="eval").body)
    except (SyntaxError, KeyError) as error:
        raise Refused(
            Code.EXPORT_FAILED, f"A guard of the exported program cannot be checked: {code}."
        ) from error


class _Parser:
    """Python expressions over ``leaf[i]`` and ``leaf[i].size()[axis]``; a KeyError for any other."""

    def __init__(self, known: Mapping[tuple[int, int | None], Any]) -> None:
        self._known = known

    def read(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=bool(value)):
                return sympy.true if value else sympy.false
            case ast.Constant(value=int(value)):
                return sympy.Integer(value)
            case ast.Subscript(value=ast.Name(id="leaf"), slice=ast.Constant(value=int(index))):
                return self._known[index, None]
            case ast.Subscript(
                value=ast.Call(
                    func=ast.Attribute(
                        value=ast.Subscript(
                            value=ast.Name(id="leaf"), slice=ast.Constant(value=int(index))
                        ),
                        attr="size",
                    )
                ),
                slice=ast.Constant(value=int(axis)),
            ):
                return self._known[index, axis]
            case ast.UnaryOp(op=op, operand=operand):
                return _OPERATORS[type(op)](self.read(operand))
            case ast.BinOp(left=left, op=op, right=right):
                return _OPERATORS[type(op)](self.read(left), self.read(right))
            case ast.BoolOp(op=op, values=values):
                return _OPERATORS[type(op)](*map(self.read, values))
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return _OPERATORS[type(op)](self.read(left), self.read(right))
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="math"), attr="ceil" | "floor" as name),
                args=[ast.BinOp(left=left, op=ast.Div(), right=right)],
            ):
                sign = -1 if name == "ceil" else 1
                return sign * FloorDiv(sign * self.read(left), self.read(right))
            case ast.Call(func=ast.Name(id=name), args=args):
                return _FUNCTIONS[name](*map(self.read, args))
        raise KeyError(ast.dump(node))
