# SPDX-License-Identifier: Apache-2.0
"""Instructions that run again and again: the index, slots that change places, and what no loop may do."""

import pytest
import torch
from fake_device import container, fake, fake_writer
from programs import Writer

N = 4


def running_sum(keep: bool = True) -> Writer:
    """The sum of the rows of x; with ``keep``, also a matrix of the sums so far."""
    w = Writer()
    x = w.input("f32", 2)
    rows, columns = w.dims(x, 2)
    one, index = w.const(1), w.reg("index")
    offset = w.reg(f"mul {index} {columns}")
    a, state, new = w.slot(f"input {x}"), w.tensor("arena", [columns]), w.tensor("arena", [columns])
    row = w.view(a, [columns], [one], offset)
    total = w.tensor("output", [columns])
    w.outputs = [total]
    w.call("aten::zero_", f"t:{state}")
    w.loop(rows, index, 2 if keep else 1, [(state, new)])
    w.call("aten::add.out", f"t:{state}", f"t:{row}", "i:1", f"t:{new}")
    if keep:
        every = w.tensor("output", [rows, columns])
        here = w.view(every, [columns], [one], offset)
        w.call("aten::copy_", f"t:{here}", f"t:{new}", "b:0")
        w.outputs = [total, every]
    w.call("aten::neg.out", f"t:{state}", f"t:{total}")
    return w


@pytest.mark.needs("runtime")
@pytest.mark.parametrize("keep", [True, False])
def test_a_running_sum(keep: bool) -> None:
    engine = running_sum(keep).engine()
    for rows in (3, 4, 3, 0, 1, 3, 50, 4):
        x = torch.randn(rows, N)
        found = engine.try_execute([x])
        assert found is not None, engine.last_error()
        torch.testing.assert_close(found[0], -x.sum(0))
        if keep:
            torch.testing.assert_close(found[1], x.cumsum(0))
    texts, seconds = engine.profile([torch.randn(3, N)], 2)
    assert [s > 0 for s in seconds] == [not text.startswith("loop") for text in texts]


@pytest.mark.needs("runtime")
def test_a_loop_in_a_loop() -> None:
    """x[i, j] of all i and j, one after the other, times the number of i and plus the number of j."""
    w = Writer()
    x = w.input("f32", 3)
    a, b, n = w.dims(x, 3)
    one, i, j = w.const(1), w.reg("index"), w.reg("index")
    row = w.reg(f"add {w.reg(f'mul {i} {b}')} {j}")
    given, state, new = w.slot(f"input {x}"), w.tensor("arena", [n]), w.tensor("arena", [n])
    here = w.view(given, [n], [one], w.reg(f"mul {row} {n}"))
    out = w.tensor("output", [n])
    w.call("aten::zero_", f"t:{state}")
    w.loop(a, i, 3, [])
    w.loop(b, j, 1, [(state, new)])
    w.call("aten::add.out", f"t:{here}", f"t:{state}", f"r:{j}", f"t:{new}")
    w.call("aten::add_.Scalar", f"t:{state}", f"r:{i}", "i:1", results=())
    w.call("aten::neg.out", f"t:{state}", f"t:{out}")
    w.outputs = [out]
    engine = w.engine()
    for shape in [(2, 3, N), (3, 2, N), (2, 3, N), (0, 3, N), (2, 0, N)]:
        x = torch.randn(shape)
        state = torch.zeros(N)
        for i in range(shape[0]):
            for j in range(shape[1]):
                state = x[i, j] + j * state
            state = state + i
        found = engine.try_execute([x])
        assert found is not None, engine.last_error()
        torch.testing.assert_close(found[0], -state)


@pytest.mark.needs("runtime")
def test_a_view_of_what_each_iteration_makes_anew() -> None:
    w = Writer()
    x = w.input("f32", 2)
    rows, columns = w.dims(x, 2)
    one, index = w.const(1), w.reg("index")
    offset = w.reg(f"mul {index} {columns}")
    a, made = w.slot(f"input {x}"), w.slot(f"dyn f32 2 {rows} {columns} {columns} {one}")
    row, out = w.view(made, [columns], [one], offset), w.tensor("output", [columns])
    w.call("aten::zero_", f"t:{out}")
    w.loop(rows, index, 2, [])
    w.call("aten::neg", f"t:{a}", results=(made,))
    w.call("aten::add_.Tensor", f"t:{out}", f"t:{row}", "i:1")
    w.outputs = [out]
    engine = w.engine()
    for n in (3, 3, 0, 5):
        x = torch.randn(n, N)
        found = engine.try_execute([x])
        assert found is not None, engine.last_error()
        torch.testing.assert_close(found[0], -x.sum(0))


@pytest.mark.needs("runtime")
def test_a_view_that_leaves_its_base_raises_before_it_is_read() -> None:
    w = running_sum()
    w.registers[0] = "const 5"  # runs, whatever there is
    engine = w.engine()
    assert engine.try_execute([torch.randn(5, N)]) is not None
    assert engine.try_execute([torch.randn(4, N)]) is None
    assert "a view outside its base" in engine.last_error()


def broken(change: str) -> str:
    """``running_sum`` with something that no program may ask for."""
    w = running_sum()
    at = next(k for k, line in enumerate(w.instructions) if line.startswith("loop"))
    words = w.instructions[at].split()
    rows, index, offset = 0, 3, 4
    if change == "a body behind the end":
        words[3] = "9"
    elif change == "an index that is none":
        words[2] = str(rows)
    elif change == "slots of different sizes":
        words[6] = str(w.tensor("arena", [rows]))
    elif change == "an input that is exchanged":
        words[6] = "0"
    elif change == "a number of iterations that changes":
        words[1] = str(offset)
    elif change == "a size that changes":
        w.tensor("arena", [offset])
    elif change == "a guard that changes":
        w.guard(index, "index")
    elif change == "a view used outside":
        w.instructions.append(w.instructions[-1].replace("t:1 ", "t:3 "))
    elif change == "an index of no loop":
        w.reg("index")
    elif change == "an index of two loops":
        w.loop(rows, index, 1, [])
        w.call("aten::zero_", "t:4")
    elif change == "a result used after the loop":
        made = w.slot(f"dyn f32 1 1 {w.const(1)}")
        w.instructions.insert(at + 1, f"call aten::neg 1 t:2 1 {made}")
        words[3] = "3"
        w.call("aten::neg.out", f"t:{made}", "t:4")
    elif change == "an input written in a loop":
        into = w.slot("update 0")
        w.instructions.insert(at + 1, f"call aten::copy_ 3 t:{into} t:2 b:0 0")
        words[3] = "3"
    elif change == "an extent that changes":
        w.instructions.insert(at + 1, f"kernel k {offset} {rows} {rows} 0 0")
        words[3] = "3"
    w.instructions[at] = " ".join(words)
    return w.text()


@pytest.mark.needs("runtime")
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("a body behind the end", "has no body of that length"),
        ("an index that is none", "is no index"),
        ("slots of different sizes", "exchanges slots of different sizes"),
        ("an input that is exchanged", "only an arena slot of its own"),
        ("a number of iterations that changes", "a number of iterations depends on the index"),
        ("a size that changes", "a size depends on the index"),
        ("a guard that changes", "a guard depends on the index"),
        ("a view used outside", "uses the index of a loop that it is not in"),
        ("an index of no loop", "is the index of no loop"),
        ("an index of two loops", "is the index of two loops"),
        ("a result used after the loop", "is used after the loop that makes it"),
        ("an input written in a loop", "may fail after it wrote an input"),
        ("an extent that changes", "an extent depends on the index"),
    ],
)
def test_what_no_loop_may_do(change: str, why: str) -> None:
    w = Writer()
    w.text = lambda version=1: broken(change)  # type: ignore[method-assign]
    engine = w.engine()
    assert engine.try_execute([torch.randn(3, N)]) is None
    assert why in engine.why_unavailable()


@pytest.mark.needs("runtime")
def test_loops_are_not_nested_without_end() -> None:
    w = Writer()
    x = w.input("f32", 1)
    (n,) = w.dims(x, 1)
    out = w.tensor("output", [n])
    depth = 17
    for k in range(depth):
        w.loop(n, w.reg("index"), depth - k, [])
    w.call("aten::zero_", f"t:{out}")
    w.outputs = [out]
    engine = w.engine()
    assert engine.try_execute([torch.randn(1)]) is None
    assert "nested too deep" in engine.why_unavailable()


def with_selection(late: str = "") -> Writer:
    """The sum s of the rows of x, and s[s > 0] twice; ``late``: where else the number of these is used."""
    w = running_sum(keep=False)
    rows, columns, one = 0, 1, 2
    found = w.reg("late")
    [total] = w.outputs
    mask = w.tensor("arena", [columns], "bool")
    chosen = w.slot(f"dyn f32 1 {found} {one}")
    twice = w.tensor("output", [found])
    if late == "made in a body":
        w.loop(rows, w.reg("index"), 3, [])
    w.call("aten::gt.Scalar_out", f"t:{total}", "i:0", f"t:{mask}")
    w.call("aten::masked_select", f"t:{total}", f"t:{mask}", results=(chosen,))
    if late == "a trip count":
        w.loop(found, w.reg("index"), 1, [])
    elif late == "used in a body":
        w.loop(rows, w.reg("index"), 1, [])
    elif late == "exchanged":
        pair = w.tensor("arena", [found]), w.tensor("arena", [found])
        w.loop(rows, w.reg("index"), 1, [pair])
        w.call("aten::mul.out", *(f"t:{slot}" for slot in (pair[0], pair[0], pair[1])))
    elif late == "an offset":
        w.view(total, [one], [one], w.reg(f"mul {w.registers.index('index')} {found}"))
    w.call("aten::mul.Scalar_out", f"t:{chosen}", "i:2", f"t:{twice}")
    w.outputs = [total, twice]
    return w


@pytest.mark.needs("runtime")
def test_a_loop_and_behind_it_a_late_size() -> None:
    engine = with_selection().engine()
    for rows in (3, 3, 0, 2, 1, 1, 50, 3):
        x = torch.randn(rows, N)
        found = engine.try_execute([x])
        assert found is not None, engine.last_error()
        total = -x.sum(0)
        torch.testing.assert_close(found[0], total)
        torch.testing.assert_close(found[1], 2 * total[total > 0])


@pytest.mark.needs("runtime")
@pytest.mark.parametrize(
    "late", ["made in a body", "used in a body", "a trip count", "exchanged", "an offset"]
)
def test_no_late_size_in_a_loop(late: str) -> None:
    engine = with_selection(late).engine()
    assert engine.try_execute([torch.randn(3, N)]) is None
    assert "a size in a loop depends on elements" in engine.why_unavailable()


def alternating() -> Writer:
    """-x if the length of y is odd, else x: launches over two slots in turns."""
    w = fake_writer()
    x, y = w.input("f32", 1), w.input("f32", 1)
    (n,), (m,), one = w.dims(x, 1), w.dims(y, 1), w.const(1)
    index = w.reg("index")
    a, state, new, out = (
        w.slot(f"input {x}"),
        *(w.tensor("arena", [n]) for _ in range(2)),
        w.tensor("output", [n]),
    )
    grid = [one, one, one]
    w.launch("neg", grid, [a, state], [n])
    w.loop(m, index, 1, [(state, new)])
    w.launch("neg", grid, [state, new], [n])
    w.launch("neg", grid, [state, out], [n])
    w.outputs = [out]
    return w


@pytest.mark.needs("g++")
@pytest.mark.parametrize("graphs", [0, 2])
def test_launches_in_a_loop_are_captured_one_by_one(graphs: int) -> None:
    fake().fake_stream(0)
    engine = alternating().engine(limits={"cuda_graphs": graphs}, object=container())
    for length in (3, 3, 3, 2, 2, 2, 3, 0, 0, 0):
        x = torch.randn(5)
        [found] = engine.try_execute([x, torch.empty(length)])
        assert torch.equal(found, -x if length % 2 else x)
    assert engine.stats().get("graph_replays", 0) == (7 if graphs else 0)
    assert engine.stats().get("graph_failures", 0) == 0
