# SPDX-License-Identifier: Apache-2.0
"""Whatever is shown from facts holds at every size at which the facts hold; and what must be shown is."""

import itertools

import hypothesis.strategies as st
import pytest
import sympy
from disc_programs import S0, S1, S2, add_input, finish, new_builder
from hypothesis import given, settings
from sympy import Eq, Ge, Gt, Le, Lt, Ne
from torch.utils._sympy.functions import FloorDiv, Max, Min, Mod

from blade.backends.disc.ir.kernel import Dim
from blade.backends.disc.ir.size_facts import SizeRelations, minimal
from blade.backends.disc.ir.views import reshape_strides
from blade.backends.disc.passes.normalize_sizes import normalize_sizes

SYMBOLS = (S0, S1, S2)
NUMBERS = st.integers(1, 6)


def value(expr: Dim | sympy.Basic, sizes: dict[sympy.Symbol, int]) -> int:
    return int(sympy.sympify(expr).xreplace({s: sympy.Integer(n) for s, n in sizes.items()}))


@st.composite
def expressions(draw: st.DrawFn) -> sympy.Expr:
    expr: sympy.Expr = draw(st.sampled_from(SYMBOLS))
    for _ in range(draw(st.integers(0, 3))):
        other = draw(st.one_of(st.sampled_from(SYMBOLS), NUMBERS.map(sympy.Integer)))
        kind = draw(st.sampled_from("mul add quotient rest min max".split()))
        if kind in ("mul", "add"):
            expr = expr * other if kind == "mul" else expr + other
        elif kind in ("quotient", "rest"):
            expr = (FloorDiv if kind == "quotient" else Mod)(expr, sympy.Integer(draw(NUMBERS)))
        else:
            expr = (Min if kind == "min" else Max)(expr, other)
    return expr


@st.composite
def relations(draw: st.DrawFn) -> sympy.Basic:
    a, b = draw(expressions()), draw(expressions())
    symbol, number = draw(st.sampled_from(SYMBOLS)), draw(NUMBERS)
    kind = draw(st.sampled_from("multiple range product equal".split()))
    if kind == "multiple":
        return Eq(Mod(draw(st.sampled_from((symbol, a))), number), 0)
    if kind == "range":
        return draw(st.sampled_from((Ge, Gt, Le, Lt)))(symbol, number, evaluate=False)
    if kind == "product":
        x, y, z = draw(st.permutations(SYMBOLS))
        return Eq(number * x, draw(NUMBERS) * y * z)
    return Eq(a, b)


def grids(facts: list[sympy.Basic]) -> list[dict[sympy.Symbol, int]]:
    """Some sizes, 0 and 1 among them, at which all of ``facts`` hold."""
    sizes = (dict(zip(SYMBOLS, s)) for s in itertools.product((0, 1, 2, 4, 6), repeat=3))
    return [s for s in sizes if all(f.xreplace(s) == sympy.true for f in facts)]


@given(st.lists(relations(), max_size=3), expressions(), expressions(), relations(), NUMBERS)
@settings(max_examples=60, deadline=None)
def test_what_is_shown_holds(
    given_facts: list[sympy.Basic],
    a: sympy.Expr,
    b: sympy.Expr,
    relation: sympy.Basic,
    number: int,
) -> None:
    facts = SizeRelations(given_facts)
    normal, shown_equal = facts.normal(a), facts.equal(a, b)
    low, high = facts.bounds(a)
    divides, implied = facts.divides(number, a), facts.implies(relation)
    for sizes in grids(given_facts):
        exact = value(a, sizes)
        assert value(normal, sizes) == exact, (given_facts, a, normal, sizes)
        assert low is None or low <= exact
        assert high is None or exact <= high
        assert not divides or exact % number == 0, (given_facts, a, number, sizes)
        assert not shown_equal or exact == value(b, sizes), (given_facts, a, b, sizes)
        assert not implied or relation.xreplace(sizes) == sympy.true, (relation, sizes)


@pytest.mark.parametrize(
    ("given_facts", "a", "b"),
    [
        ([Eq(S2, S0 * S1)], S2 * 4, 4 * S0 * S1),
        ([Eq(64 * S2, S0 * S1)], FloorDiv(S0 * S1, 64), S2),
        ([Eq(Mod(S0, 7), 0)], 7 * FloorDiv(S0, 7), S0),
        ([Eq(Mod(S0, 8), 0)], Mod(S0 * S1, 4), 0),
        ([Le(S0, 512, evaluate=False)], Min(S0, sympy.Integer(512)), S0),
        ([], Min(S0, S0 + S1), S0),
        ([Ge(S0, 3, evaluate=False)], Max(S0, sympy.Integer(2)), S0),
    ],
)
def test_what_must_be_shown(given_facts: list[sympy.Basic], a: Dim, b: Dim) -> None:
    assert SizeRelations(given_facts).equal(a, b)
    assert not SizeRelations().equal(a, b) or not given_facts


def test_multiples_and_ranges() -> None:
    facts = SizeRelations(
        [Eq(Mod(S0, 8), 0), Le(S1, 512, evaluate=False), Ge(S1, 2, evaluate=False)]
    )
    assert facts.divides(16, 2 * S0)
    assert facts.divides(8, S0 * S1 + 24)
    assert not facts.divides(8, S0 + S1)
    assert facts.bounds(3 * S1 + 1) == (7, 1537)
    assert facts.bounds(S0) == (0, None)


def test_facts_that_others_imply_are_left_out() -> None:
    one, two = (Ge(S0, n, evaluate=False) for n in (1, 2))
    eight, four = (Eq(Mod(S1, n), 0) for n in (8, 4))
    assert minimal([one, two, four, eight, Ne(S0, 0)]) == [two, eight]
    assert minimal([two]) == [two]


def test_facts_make_shapes_equal_and_keep_their_guards() -> None:
    """A window partition: s0 / 7 windows of 7 are s0 again, and the view needs no copy."""
    b = new_builder()
    x = add_input(b, (S0, S1))
    b.require(Eq(Mod(S0, 7), 0))
    windows = b.reshape(x, (FloorDiv(S0, 7), 7, S1))
    back = b.reshape(b.pointwise("neg", windows), (7 * FloorDiv(S0, 7), S1))
    graph = normalize_sizes(finish(b, b.pointwise("add", back, b.broadcast(x, back.shape))))
    assert [str(f.relation) for f in graph.facts] == ["Eq(Mod(s0, 7), 0)"]
    assert graph.outputs[0].shape == x.shape
    windows = next(v for v in graph.values if v.op == "reshape")
    assert reshape_strides(x.shape, (S1, 1), windows.shape) is not None
