# SPDX-License-Identifier: Apache-2.0
"""Leaves out conditions on sizes that others imply.

    simplified([Eq(n % 7, 0), Ne(n // 7, 1), Eq(8 * n * m, 56 * m * (n // 7))], ranges)
                                                # [Eq(n % 7, 0), n // 7 >= 2]

A size that is divided by a number is a quotient and a rest: ``n`` is ``7 * q + r``. The rests that the
conditions admit are tried one by one; where there is one only, ``r`` is that number. Then most of the
conditions that shape functions record are equations that hold for every ``q``. A condition that fails at
the lower end of a range raises that end.
"""

from collections.abc import Sequence
from typing import Any

import sympy
from torch.utils._sympy.functions import FloorDiv, Max, Min, PythonMod
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

_ROUNDS = 16  # divisions that are resolved
_STEPS = 16  # how often the lower end of one range is raised for one condition
_RESTS = 64  # the largest divisor whose rests are tried
_LONG = 400  # operations of a condition that is kept as it is

Ranges = dict[sympy.Symbol, ValueRanges[Any]]


def simplified(conditions: Sequence[Any], ranges: Ranges) -> list[Any]:
    """Return conditions that together say the same as ``conditions``.

    The symbols are integers within ``ranges``, whose ends are conditions too.
    """
    ends, rest = _sorted(conditions)
    facts = _Facts(_narrowed(ranges, ends))
    short = [one for one in dict.fromkeys(rest) if one.count_ops() < _LONG]
    pairs = [(one, facts.reduced(one)) for one in short]
    for _ in range(_ROUNDS):
        pairs = facts.settled(pairs)
        division = _division([one for _, one in pairs])
        if division is None:
            break
        facts.divide(*division, [one for _, one in pairs])
        pairs = [(one, facts.reduced(reduced)) for one, reduced in pairs]
    kept = [one for one, _ in facts.settled(pairs)]
    return [*facts.conditions(), *kept, *(one for one in dict.fromkeys(rest) if one not in short)]


def _sorted(conditions: Sequence[Any]) -> tuple[dict[Any, tuple[Any, Any]], list[Any]]:
    """The conditions ``low <= s <= high`` by symbol, and all others.

    A size that is constant is so whatever else is known of it.
    """
    ends: dict[Any, tuple[Any, Any]] = {}
    constants: dict[Any, tuple[Any, Any]] = {}
    rest = []
    for one in conditions:
        match one:
            case sympy.Ge(args=(sympy.Symbol() as symbol, sympy.Integer() as number)):
                low, high = ends.get(symbol, (0, int_oo))
                ends[symbol] = max(low, number), high
            case sympy.Le(args=(sympy.Symbol() as symbol, sympy.Integer() as number)):
                low, high = ends.get(symbol, (0, int_oo))
                ends[symbol] = low, min(high, number)
            case sympy.Eq(args=(sympy.Symbol() as symbol, sympy.Integer() as number)):
                constants[symbol] = number, number
            case sympy.Eq(args=(Min(args=(sympy.Integer() as number, symbol)), other)) if (
                symbol == other and symbol.is_Symbol
            ):
                low, high = ends.get(symbol, (0, int_oo))
                ends[symbol] = low, min(high, number)
            case _:
                rest.append(one)
    return ends | constants, rest


def _narrowed(ranges: Ranges, ends: dict[Any, tuple[Any, Any]]) -> Ranges:
    narrowed = dict(ranges)
    for symbol, (low, high) in ends.items():
        known = ranges[symbol]
        if low != high:
            low, high = max(low, known.lower), min(high, known.upper)
        narrowed[symbol] = ValueRanges(low, high)
    return narrowed


def _division(reduced: Sequence[Any]) -> tuple[sympy.Symbol, int] | None:
    """A symbol that is divided by a number, and the number."""
    found = {
        (symbol, int(divisor) // int(sympy.gcd(factor, divisor)))
        for one in reduced
        for base, divisor in (division.args for division in one.atoms(PythonMod, FloorDiv))
        for factor, symbol in [base.as_coeff_Mul()]
        if divisor.is_Integer and symbol.is_Symbol and factor.is_Integer
    }
    usable = [(symbol, number) for symbol, number in found if number > 1]
    return min(usable, key=lambda one: (str(one[0]), one[1]), default=None)


class _Facts:
    """What is known of each symbol: its range, what it means, and what takes its place."""

    def __init__(self, ranges: Ranges) -> None:
        self._ranges = dict(ranges)
        self._given = dict.fromkeys(ranges, sympy.S.Zero)  # lower ends that need no condition
        self._meaning: dict[sympy.Symbol, Any] = {symbol: symbol for symbol in ranges}
        self._given_sizes = frozenset(ranges)
        self._replaced: dict[Any, Any] = {}
        self._exact = {symbol: (symbol, 1) for symbol in ranges}  # symbol * number is the size
        self._multiples: dict[sympy.Symbol, int] = {}
        self._divided: list[Any] = []
        self._known_divisions: dict[Any, Any] = {}
        for symbol, known in ranges.items():
            if known.lower == known.upper:
                self._replaced[symbol] = known.lower

    def settled(self, pairs: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """Raise ends until none changes; return the pairs whose second condition is not decided by now."""
        before: Any = None
        while before != (lows := [one.lower for one in self._ranges.values()]):
            before = lows
            for _, reduced in pairs:
                self._raise_ends(reduced)
        return [(one, reduced) for one, reduced in pairs if self._decide(reduced) is not True]

    def divide(self, symbol: sympy.Symbol, number: int, conditions: Sequence[Any]) -> None:
        """Replace ``symbol`` by a quotient and a rest; by a quotient alone if only one rest is possible."""
        known, meaning = self._ranges[symbol], self._meaning[symbol]
        top = known.upper if known.upper == int_oo else known.upper // number
        quotient = self._new(FloorDiv(meaning, number), known.lower // number, top)
        rest = self._new(PythonMod(meaning, number), sympy.S.Zero, sympy.Integer(number - 1))
        self._replace(symbol, number * quotient + rest)
        if number > _RESTS:
            return
        fitting = self._fitting(rest, number, conditions)
        if len(fitting) == 1:
            self._settle_rest(symbol, number, quotient, rest, fitting[0])

    def _settle_rest(
        self,
        symbol: sympy.Symbol,
        number: int,
        quotient: sympy.Symbol,
        rest: sympy.Symbol,
        only: int,
    ) -> None:
        """``symbol`` is ``number * quotient + only``, which is a condition."""
        if only == 0 and symbol in self._exact:
            size, factor = self._exact[symbol]
            self._multiples[size] = factor * number
            self._exact[quotient] = size, factor * number
            self._meaning[quotient] = FloorDiv(size, factor * number)
        else:
            self._divided.append(sympy.Eq(self._meaning[rest], only))
        self._replace(rest, sympy.Integer(only))
        del self._ranges[rest]
        known = self._ranges[symbol]
        low = -((only - known.lower) // number)
        high = known.upper if known.upper == int_oo else (known.upper - only) // number
        self._ranges[quotient] = ValueRanges(low, high)
        self._given[quotient] = low

    def conditions(self) -> list[Any]:
        """The rests and the ranges as conditions."""
        found = [sympy.Eq(PythonMod(s, n), 0) for s, n in self._multiples.items()]
        found += self._divided
        for symbol, known in self._ranges.items():
            meaning = self._meaning[symbol]
            is_size = meaning == symbol
            if is_size and known.lower == known.upper:
                found.append(sympy.Eq(meaning, known.lower))
                continue
            if known.lower > self._given[symbol]:
                found.append(meaning >= known.lower)
            if is_size and known.upper < int_oo:
                found.append(meaning <= known.upper)
        return found

    def reduced(self, condition: Any) -> Any:
        """``condition`` over the symbols that are left, with divisions resolved as far as possible."""
        one = condition.subs(self._replaced)
        if one.has(FloorDiv, PythonMod):
            one = one.replace(_is_division, self._resolved)
        if one.has(Min, Max):
            one = one.replace(_is_extremum, self._settled_extremum)
        return self._without_factors(_against_zero(one))

    def _new(self, meaning: Any, low: Any, high: Any) -> sympy.Symbol:
        symbol = sympy.Symbol(str(meaning), integer=True, nonnegative=True)
        self._meaning[symbol] = meaning
        self._ranges[symbol] = ValueRanges(low, high)
        self._given[symbol] = low
        return symbol

    def _replace(self, symbol: sympy.Symbol, expression: Any) -> None:
        for known, value in self._replaced.items():
            self._replaced[known] = value.subs(symbol, expression)
        self._replaced[symbol] = expression

    def _fitting(self, rest: sympy.Symbol, number: int, conditions: Sequence[Any]) -> list[int]:
        """The values of ``rest`` for which every condition on it alone may hold."""
        alone = [one for c in conditions if (one := self.reduced(c)).free_symbols == {rest}]
        return [
            value
            for value in range(number)
            if all(self._decide(self.reduced(one.subs(rest, value))) is not False for one in alone)
        ]

    def _resolved(self, division: Any) -> Any:
        if division not in self._known_divisions:
            base, divisor = sympy.expand(division.args[0]), division.args[1]
            by = self._by_number if divisor.is_Integer else _by_expression
            self._known_divisions[division] = by(type(division), base, divisor)
        return self._known_divisions[division]

    def _by_number(self, kind: type, base: Any, divisor: Any) -> Any:
        """The terms that ``divisor`` divides leave the division; so do terms that are smaller than it."""
        whole, rest = sympy.S.Zero, sympy.S.Zero
        for term in sympy.Add.make_args(base):
            factor, symbols = term.as_coeff_Mul()
            if symbols == 1:
                whole, rest = whole + factor // divisor, rest + factor % divisor
            elif factor.is_Integer and factor % divisor == 0:
                whole += factor // divisor * symbols
            else:
                rest += term
        bound = bound_sympy(rest, self._ranges)
        is_small = bound.lower >= 0 and bound.upper < divisor
        if kind is PythonMod:
            return rest if is_small else PythonMod(rest, divisor)
        return whole if is_small else whole + FloorDiv(rest, divisor)

    def _without_factors(self, condition: Any) -> Any:
        """An equation with 0 without factors that are sizes; where one of those is 0 it says more."""
        if not isinstance(condition, sympy.Eq) or condition.rhs != 0:
            return condition
        factors = sympy.Mul.make_args(sympy.factor_terms(condition.lhs))
        kept = [one for one in factors if not one.is_number and one not in self._given_sizes]
        return sympy.Eq(sympy.expand(sympy.Mul(*kept)), 0) if kept else condition

    def _settled_extremum(self, extremum: Any) -> Any:
        """``extremum`` if either of its two arguments may be the result, else that argument."""
        if len(extremum.args) != 2:
            return extremum
        a, b = extremum.args
        is_min = isinstance(extremum, (Min, sympy.Min))
        if self._decide(sympy.Le(a, b)) is True:
            return a if is_min else b
        if self._decide(sympy.Le(b, a)) is True:
            return b if is_min else a
        return extremum

    def _raise_ends(self, reduced: Any) -> None:
        """Leave out the smallest sizes for which the condition cannot hold; an equation needs no ends."""
        for symbol in sorted(reduced.free_symbols, key=str):
            for _ in range(_STEPS):
                known = self._ranges[symbol]
                if known.lower >= known.upper or not self._fails_at(reduced, symbol):
                    break
                self._ranges[symbol] = ValueRanges(known.lower + 1, known.upper)

    def _fails_at(self, reduced: Any, symbol: sympy.Symbol) -> bool:
        """Whether the condition cannot hold at the lower end of ``symbol``, or divides by 0 there."""
        is_equation = isinstance(reduced, sympy.Eq)
        if is_equation and not any(
            symbol in d.args[1].free_symbols for d in reduced.atoms(FloorDiv, PythonMod)
        ):
            return False
        try:
            there = reduced.subs(symbol, self._ranges[symbol].lower)
        except ZeroDivisionError:
            return True
        if there.has(sympy.nan, sympy.zoo):
            return True
        return not is_equation and self._decide(there) is False

    def _decide(self, reduced: Any) -> bool | None:
        reduced = _against_zero(reduced)
        if reduced in (sympy.true, sympy.false):
            return bool(reduced)
        bound = bound_sympy(reduced, self._ranges)
        return bool(bound.lower) if bound.is_singleton() else None


def _against_zero(condition: Any) -> Any:
    """A relation with all of its terms on one side."""
    if not isinstance(condition, sympy.core.relational.Relational) or condition.rhs == 0:
        return condition
    return condition.func(sympy.expand(condition.lhs - condition.rhs), 0)


def _is_division(expression: Any) -> bool:
    return isinstance(expression, (FloorDiv, PythonMod))


def _is_extremum(expression: Any) -> bool:
    return isinstance(expression, (Min, Max))


def _by_expression(kind: type, base: Any, divisor: Any) -> Any:
    """A quotient of polynomials that leaves no rest, as a polynomial."""
    ratio = sympy.cancel(base / divisor)
    factors = ratio.as_coefficients_dict().values() if ratio.is_polynomial() else [sympy.S.Half]
    if any(not one.is_Integer for one in factors):
        return kind(base, divisor)
    return sympy.S.Zero if kind is PythonMod else sympy.expand(ratio)
