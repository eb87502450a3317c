# SPDX-License-Identifier: Apache-2.0
"""Programs whose sizes depend on elements: late registers, and what is prepared when they are known."""

import pytest
import torch
from programs import Writer
from test_guards import refused

from blade.core.reason import Code

pytestmark = pytest.mark.needs("runtime")

CONTENTS = [
    torch.tensor([1.0, -2.0, 3.0, -4.0]),
    torch.tensor([1.0, 2.0, 3.0, 4.0]),
    -torch.ones(4),
    torch.tensor([-1.0, -1.0, 5.0, -1.0]),
    torch.tensor([-1.0, 7.0, -1.0, -1.0]),
    torch.empty(0),
]


def positive_ones() -> Writer:
    """exp(x[x > 0]) * 2 and its number of elements as a sum of ones, in an arena of that size."""
    w = Writer()
    x = w.input("f32", 1)
    (n,) = w.dims(x, 1)
    one, found = w.const(1), w.reg("late")
    a, mask = w.slot(f"input {x}"), w.tensor("arena", [n], "bool")
    chosen = w.slot(f"dyn f32 1 {found} {one}")
    h = w.tensor("arena", [found])
    y = w.tensor("output", [found])
    total = w.slot("dyn f32 0")
    w.call("aten::gt.Scalar_out", f"t:{a}", "i:0", f"t:{mask}")
    w.call("aten::masked_select", f"t:{a}", f"t:{mask}", results=(chosen,))
    w.call("aten::exp.out", f"t:{chosen}", f"t:{h}")
    w.call("aten::mul.out", f"t:{h}", f"t:{h}", f"t:{y}")
    w.call("aten::sum", f"t:{h}", "n", results=(total,))
    w.outputs = [y, total, chosen]
    return w


def test_sizes_of_a_selection() -> None:
    engine = positive_ones().engine()
    for x in [*CONTENTS, *CONTENTS[:2]]:
        y, total, chosen = engine.try_execute([x])
        kept = x[x > 0]
        torch.testing.assert_close(y, kept.exp() * kept.exp())
        torch.testing.assert_close(total, kept.exp().sum())
        assert torch.equal(chosen, kept)
    assert engine.stats() == {"calls": 8, "engine_runs": 8, "fallbacks": 0}


def test_results_of_earlier_calls_stay() -> None:
    engine = positive_ones().engine()
    kept = [engine.try_execute([x]) for x in CONTENTS]
    for x, (y, total, _) in zip(CONTENTS, kept, strict=True):
        torch.testing.assert_close(y, x[x > 0].exp() ** 2)
        torch.testing.assert_close(total, x[x > 0].exp().sum())


def first_elements() -> Writer:
    """x[:k] as a view of the input, and k ones, for a k that is read from a tensor; k is at most n."""
    w = Writer()
    x, k = w.input("f32", 1), w.input("i64", 0)
    (n,) = w.dims(x, 1)
    zero, one, number = w.const(0), w.const(1), w.reg("late")
    w.guard(w.reg(f"and {w.reg(f'ge {number} {zero}')} {w.reg(f'le {number} {n}')}"), "0 <= k <= n")
    a, b = w.slot(f"input {x}"), w.slot(f"input {k}")
    head = w.view(a, [number], [one], zero)
    y = w.tensor("output", [number])
    ones = w.slot(f"dyn f32 1 {number} {one}")
    w.instructions.append(f"call aten::_local_scalar_dense 1 t:{b} 1 r{number}")
    w.call("aten::neg.out", f"t:{head}", f"t:{y}")
    w.call("aten::ones", f"li:r{number}", "dt:f32", results=(ones,))
    w.outputs = [y, ones]
    return w


def test_a_number_that_is_read() -> None:
    engine, x = first_elements().engine(), torch.randn(5)
    for k in (2, 0, 5, 5, 1):
        y, ones = engine.try_execute([x, torch.tensor(k)])
        assert torch.equal(y, -x[:k]) and torch.equal(ones, torch.ones(k))


@pytest.mark.parametrize("k", [-1, 6, 2**62, -(2**63)])
def test_a_guard_on_a_number_that_is_read(k: int) -> None:
    engine, x = first_elements().engine(), torch.randn(5)
    assert refused(engine, [x, torch.tensor(k)]) == Code.GUARD_SHAPE.value
    y, _ = engine.try_execute([x, torch.tensor(3)])
    assert torch.equal(y, -x[:3])


def test_two_selections_one_after_the_other() -> None:
    """y = x[x > 0]; z = y[y > 1]: each has memory of its own, and the second may stay the same alone."""
    w = Writer()
    x = w.input("f32", 1)
    (n,) = w.dims(x, 1)
    one, first, second = w.const(1), w.reg("late"), w.reg("late")
    both = w.reg(f"add {first} {second}")
    a, mask = w.slot(f"input {x}"), w.tensor("arena", [n], "bool")
    y, mask2 = w.slot(f"dyn f32 1 {first} {one}"), w.tensor("arena", [first], "bool")
    z = w.slot(f"dyn f32 1 {second} {one}")
    joined = w.tensor("output", [both])
    w.call("aten::gt.Scalar_out", f"t:{a}", "i:0", f"t:{mask}")
    w.call("aten::masked_select", f"t:{a}", f"t:{mask}", results=(y,))
    w.call("aten::gt.Scalar_out", f"t:{y}", "i:1", f"t:{mask2}")
    w.call("aten::masked_select", f"t:{y}", f"t:{mask2}", results=(z,))
    w.call("aten::cat.out", f"lt:{y},{z}", "i:0", f"t:{joined}")
    w.outputs = [joined]
    engine = w.engine()
    for values in ([0.5, 2.0, 3.0], [0.5, 0.5, 3.0], [2.0, 3.0, -1.0], [-1.0] * 3, [2.0, 3.0, 0.1]):
        given = torch.tensor(values)
        kept = given[given > 0]
        (got,) = engine.try_execute([given])
        assert torch.equal(got, torch.cat([kept, kept[kept > 1]])), values


def lines(*edits: tuple[str, str]) -> str:
    text = positive_ones().text()
    for before, after in edits:
        assert before in text
        text = text.replace(before, after)
    return text


@pytest.mark.parametrize(
    ("edits", "why"),
    [
        ([("slot 2 dyn f32 1 2 1", "slot 2 dyn f32 1 0 1")], "before a call makes it known"),
        ([("slot 1 arena bool 1 0", "slot 1 arena bool 1 2")], "before a call makes it known"),
        ([("call aten::masked_select", "when 1 call aten::masked_select")], "runs always"),
        ([("t:2 t:3 0", "t:2 t:3 1 r0")], "late register"),
        ([("t:2 t:3 0", "t:2 t:3 1 r2")], "second value"),
    ],
)
def test_a_program_that_uses_a_size_too_early(edits, why) -> None:
    from blade.runtime.engine import make_engine

    engine = make_engine("e", "disc", lines(*edits), b"")
    assert why in engine.why_unavailable()


def test_another_size_than_the_first_result_had_raises() -> None:
    """Two selections that a program believes to be equally large."""
    w = Writer()
    x, other = w.input("f32", 1), w.input("f32", 1)
    one, found = w.const(1), w.reg("late")
    a, b = w.slot(f"input {x}"), w.slot(f"input {other}")
    first, second = (w.slot(f"dyn i64 2 {found} {one} {one} {one}") for _ in range(2))
    w.call("aten::nonzero", f"t:{a}", results=(first,))
    w.call("aten::nonzero", f"t:{b}", results=(second,))
    w.outputs = [first, second]
    engine = w.engine()
    y, z = engine.try_execute([torch.ones(3), torch.tensor([1.0, 0, 1, 1])])
    assert y.tolist() == [[0], [1], [2]] and z.tolist() == [[0], [2], [3]]
    assert engine.try_execute([torch.ones(3), torch.ones(2)]) is None
    assert engine.stats()[Code.ENGINE_RAISED.value] == 1
