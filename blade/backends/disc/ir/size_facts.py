# SPDX-License-Identifier: Apache-2.0
"""Reasoning about sizes from the relations that a program relies on.

    facts = SizeRelations([Eq(s2, s0*s1), Eq(Mod(s0, 8), 0), Le(s1, 512)])
    facts.normal(FloorDiv(s2, 4))     # s0*s1/4: equal sizes have equal normal forms
    facts.divides(16, 2 * s0)         # True
    facts.bounds(s1 + 1)              # (1, 513)

Sound, not complete: a "no" means "not shown". Sizes are integers of at least 0; the claim of torch's
symbols to be positive is ignored. In a normal form every term is an integer by the relations, even a
fraction such as ``s0*s1/4``. Nothing is divided by a size, which may be 0.
"""

from collections.abc import Iterable, Iterator, Sequence

import sympy
from torch.utils._sympy.functions import CleanDiv, FloorDiv, Max, Min, Mod, PythonMod
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from blade.backends.disc.ir.graph import plain
from blade.backends.disc.ir.kernel import Dim

_QUOTIENTS = (FloorDiv, CleanDiv)
_REMAINDERS = (Mod, PythonMod, sympy.Mod)
_BOUNDED = (sympy.Add, sympy.Mul, sympy.Pow, FloorDiv, CleanDiv, Mod, PythonMod, Min, Max)


class SizeRelations:
    """``relations`` between sizes, and the conclusions that follow from them."""

    def __init__(self, relations: Iterable[sympy.Basic] = ()) -> None:
        parts = [part for relation in relations for part in _parts(relation)]
        self._solved: dict[sympy.Symbol, sympy.Expr] = {}
        self._multiples: list[tuple[sympy.Expr, int]] = []
        self._low: dict[sympy.Symbol, int] = {}
        self._high: dict[sympy.Symbol, int] = {}
        for part in parts:
            self._note_multiple(part)
            self._note_range(part)
        for part in parts:
            if isinstance(part, sympy.Eq):
                self._solve(part)
        self._multiples = [(e.xreplace(self._solved).expand(), n) for e, n in self._multiples]

    # --- queries ---

    def normal(self, dim: Dim) -> Dim:
        """The same size in normal form, equal for all sizes shown to be equal."""
        if isinstance(dim, int):
            return dim
        return plain(sympy.expand(self._rewritten(dim.xreplace(self._solved))))

    def equal(self, a: Dim, b: Dim) -> bool:
        return self.normal(sympy.sympify(a) - b) == 0

    def divides(self, number: int, dim: Dim) -> bool:
        """Whether ``dim`` is shown to be a multiple of ``number``."""
        if isinstance(dim, int):
            return dim % number == 0
        expr = sympy.expand(dim.xreplace(self._solved))
        return _divides(number, self._in_units(expr)) or any(
            known % number == 0 and _is_whole_multiple(expr, base)
            for base, known in self._multiples
        )

    def bounds(self, dim: Dim) -> tuple[int | None, int | None]:
        """The least and the greatest value of ``dim``; ``None`` for no bound."""
        expr = sympy.sympify(dim)
        if not all(isinstance(e, _BOUNDED) or not e.args for e in sympy.preorder_traversal(expr)):
            return None, None
        if expr.has(sympy.Pow) and any(not p.exp.is_nonnegative for p in expr.atoms(sympy.Pow)):
            return None, None
        ranges = {s: self._range(s) for s in expr.free_symbols}
        found = bound_sympy(expr, ranges)
        return _finite(found.lower), _finite(found.upper)

    def implies(self, relation: sympy.Basic) -> bool:
        """Whether ``relation`` follows from these relations."""
        if relation == sympy.true:
            return True
        if isinstance(relation, sympy.And):
            return all(map(self.implies, relation.args))
        multiple = _multiple(relation)
        if multiple is not None and self.divides(multiple[1], multiple[0]):
            return True
        if not isinstance(relation, sympy.core.relational.Relational):
            return False
        low, high = self.bounds(self.normal(relation.lhs - relation.rhs))
        return _holds(relation, low, high)

    # --- adding relations ---

    def _note_multiple(self, relation: sympy.Basic) -> None:
        multiple = _multiple(relation)
        if multiple is not None:
            self._multiples.append(multiple)

    def _note_range(self, relation: sympy.Basic) -> None:
        if not isinstance(relation, (sympy.Ge, sympy.Gt, sympy.Le, sympy.Lt)):
            return
        a, b = relation.lhs, relation.rhs
        if isinstance(relation, (sympy.Le, sympy.Lt)):
            a, b = b, a
        strict = int(isinstance(relation, (sympy.Gt, sympy.Lt)))  # now a >= b + strict
        if isinstance(a, sympy.Symbol) and b.is_Integer:
            self._low[a] = max(self._low.get(a, 0), int(b) + strict)
        if isinstance(b, sympy.Symbol) and a.is_Integer:
            least = int(a) - strict
            self._high[b] = min(self._high.get(b, least), least)

    def _solve(self, relation: sympy.Eq) -> None:
        """Solve an equality for one symbol and substitute it everywhere."""
        difference = sympy.expand((relation.lhs - relation.rhs).xreplace(self._solved))
        symbol = min(
            (s for s in difference.free_symbols if _solution(difference, s) is not None),
            key=lambda s: (_effort(difference, s), [-ord(c) for c in str(s)]),
            default=None,
        )
        if symbol is None:
            return
        solution = _solution(difference, symbol)
        assert solution is not None
        factor, rest = solution.as_coeff_Mul()
        if factor.q != 1:  # a fraction of sizes that is an integer
            self._multiples.append((factor.p * rest, int(factor.q)))
        one = {symbol: solution}
        self._solved = {s: sympy.expand(e.xreplace(one)) for s, e in self._solved.items()} | one

    # --- rewriting and proving ---

    def _rewritten(self, expr: sympy.Expr) -> sympy.Expr:
        """``expr`` with exact quotients as fractions, zero remainders, and decided minima."""
        if not expr.args:
            return expr
        args = [self._rewritten(a) for a in expr.args]
        if isinstance(expr, _QUOTIENTS) and args[1].is_Integer and args[1] > 0:
            terms = sympy.Add.make_args(sympy.expand(args[0]))
            if all(self.divides(int(args[1]), t) for t in terms):
                return sympy.Add(*(t / args[1] for t in terms))
        if isinstance(expr, _REMAINDERS) and self._leaves_nothing(*args):
            return sympy.Integer(0)
        if isinstance(expr, (Min, Max)):
            args = self._undominated(args, greatest=isinstance(expr, Max))
            return args[0] if len(args) == 1 else expr.func(*args)
        return expr if tuple(args) == expr.args else expr.func(*args)

    def _leaves_nothing(self, a: sympy.Expr, b: sympy.Expr) -> bool:
        return bool(b.is_Integer and b > 0) and self.divides(int(b), a)

    def _undominated(self, args: list[sympy.Expr], greatest: bool) -> list[sympy.Expr]:
        kept = list(args)
        for a in args:
            others = [b for b in kept if b is not a]
            if any(self._at_least(*((b, a) if greatest else (a, b))) for b in others):
                kept = others
        return kept

    def _at_least(self, a: sympy.Expr, b: sympy.Expr) -> bool:
        low = self.bounds(sympy.expand(a - b))[0]
        return low is not None and low >= 0

    def _in_units(self, expr: sympy.Expr) -> sympy.Expr:
        """``expr`` with each symbol that is a known multiple written as its number of units."""
        units: dict[sympy.Symbol, int] = {}
        for base, number in self._multiples:
            if isinstance(base, sympy.Symbol):
                units[base] = int(sympy.lcm(units.get(base, 1), number))
        return sympy.expand(expr.xreplace({s: n * s for s, n in units.items()}))

    def _range(self, symbol: sympy.Symbol) -> ValueRanges[sympy.Expr]:
        low, high = self._low.get(symbol, 0), self._high.get(symbol, int_oo)
        # Contradictory relations: no sizes pass the guards, so any answer is right.
        return ValueRanges(low, high) if low <= high else ValueRanges(low, low)


def minimal(relations: Sequence[sympy.Basic]) -> list[sympy.Basic]:
    """``relations`` without those that the others imply."""
    kept = list(relations)
    for relation in relations:
        symbols = relation.free_symbols
        rest = [r for r in kept if r is not relation]
        if SizeRelations(r for r in rest if symbols & r.free_symbols).implies(relation):
            kept = rest
    return kept


def _parts(relation: sympy.Basic) -> Iterator[sympy.Basic]:
    if isinstance(relation, sympy.And):
        for part in relation.args:
            yield from _parts(part)
    else:
        yield relation


def _multiple(relation: sympy.Basic) -> tuple[sympy.Expr, int] | None:
    """(e, n) if ``relation`` is e mod n == 0."""
    if not isinstance(relation, sympy.Eq):
        return None
    for a, b in (relation.args, relation.args[::-1]):
        if b == 0 and isinstance(a, _REMAINDERS) and a.args[1].is_Integer and a.args[1] > 0:
            return sympy.expand(a.args[0]), int(a.args[1])
    return None


def _solution(difference: sympy.Expr, symbol: sympy.Symbol) -> sympy.Expr | None:
    """``symbol`` from ``difference == 0``, as a polynomial with positive coefficients or one fraction."""
    if any(f.args and not isinstance(f, _POLYNOMIAL) for f in sympy.preorder_traversal(difference)):
        return None
    if difference.is_polynomial(symbol) and sympy.degree(difference, symbol) == 1:
        factor, rest = difference.coeff(symbol, 1), difference.coeff(symbol, 0)
        if rest == 0 or not factor.is_number:
            return None
        solution = sympy.expand(-rest / factor)
        terms = sympy.Add.make_args(solution)
        if all(t.as_coeff_Mul()[0] > 0 for t in terms) and (factor in (1, -1) or len(terms) == 1):
            return solution
    return None


_POLYNOMIAL = (sympy.Add, sympy.Mul, sympy.Pow)


def _effort(difference: sympy.Expr, symbol: sympy.Symbol) -> int:
    factor = difference.coeff(symbol, 1)
    return 0 if factor in (1, -1) else 1


def _divides(number: int, expr: sympy.Expr) -> bool:
    """Whether ``number`` divides every term at all sizes."""
    for term in sympy.Add.make_args(expr):
        factor, rest = term.as_coeff_Mul()
        whole = not rest.has(sympy.Pow) or all(p.exp.is_positive for p in rest.atoms(sympy.Pow))
        if not (factor.is_Integer and int(factor) % number == 0 and whole):
            return False
    return True


def _is_whole_multiple(expr: sympy.Expr, base: sympy.Expr) -> bool:
    ratio = sympy.cancel(expr / base)
    return bool(ratio.is_polynomial()) and _divides(1, sympy.expand(ratio))


def _holds(relation: sympy.Basic, low: int | None, high: int | None) -> bool:
    """Whether ``difference relation 0`` holds for every difference in [low, high]."""
    if isinstance(relation, sympy.Ge):
        return low is not None and low >= 0
    if isinstance(relation, sympy.Gt):
        return low is not None and low > 0
    if isinstance(relation, sympy.Le):
        return high is not None and high <= 0
    if isinstance(relation, sympy.Lt):
        return high is not None and high < 0
    if isinstance(relation, sympy.Ne):
        return (low is not None and low > 0) or (high is not None and high < 0)
    return isinstance(relation, sympy.Eq) and low == 0 and high == 0


def _finite(number: sympy.Basic) -> int | None:
    return int(number) if number.is_Integer else None
