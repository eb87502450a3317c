# SPDX-License-Identifier: Apache-2.0
"""Outputs that callers are lent: read where a graph left them, and not written before all have let go.

A forward program lends what a backward program reads; nothing is copied then, and nothing is ever overwritten.
"""

import ctypes
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from fake_device import container, fake, fake_writer, two_step
from programs import Writer

pytestmark = pytest.mark.needs("g++")
N = 100


@pytest.fixture(autouse=True)
def device() -> Any:
    library = fake()
    library.fake_stream(0)
    yield library
    kept.clear()


kept: list[torch.Tensor] = []  # no later input is at the address of an earlier one by chance


def fresh(n: int = N) -> torch.Tensor:
    kept.append(torch.randn(n))
    return kept[-1]


def forward(twice: bool = False) -> Any:
    """x, w -> -(x + w), which is lent, and x + w, which is not; ``twice``: all of them share memory."""
    w = fake_writer()
    x, y = w.input("f32", 1), w.input("f32", 1)
    (n,), one = w.dims(x, 1), w.const(1)
    a, b = w.slot(f"input {x}"), w.slot(f"input {y}")
    total, negated = w.tensor("output", [n]), w.tensor("output", [n])
    w.launch("add", [one, one, one], [a, b, total], [n])
    w.launch("neg", [one, one, one], [total, negated], [n])
    again = w.view(negated, [n], [one], w.const(0))
    w.outputs = [total, negated, again] if twice else [total, negated]
    return engine(w, lent=[1])


def backward() -> Any:
    """saved, gradient -> -(saved + gradient)."""
    return engine(two_step(fake_writer()))


def engine(w: Writer, lent: list[int] | None = None) -> Any:
    made: Any = w.engine(limits={"cuda_graphs": 2}, object=container())
    if lent is not None:
        made.lend(lent)
    return made


def run(engine: Any, *inputs: torch.Tensor) -> list[torch.Tensor]:
    outputs: list[torch.Tensor] | None = engine.try_execute(list(inputs))
    assert outputs is not None, (engine.last_error(), engine.why_unavailable(), engine.stats())
    return outputs


def graphs(engine: Any) -> tuple[int, int]:
    stats = engine.stats()
    assert stats["graph_failures"] == 0, engine.last_error()
    return stats["graph_captures"], stats["graph_replays"]


def test_what_is_lent_is_where_it_was_and_the_rest_is_copied() -> None:
    made, weight = forward(), torch.randn(N)
    places = []
    for _ in range(5):
        x = fresh()
        total, negated = run(made, x, weight)
        assert torch.equal(total, x + weight) and torch.equal(negated, -(x + weight))
        kept.append(total)  # as a user who collects losses
        places.append(negated.data_ptr())  # of the first call, which runs without a graph, too
        del negated
    assert len(set(places)) == 1
    assert len({t.data_ptr() for t in kept}) == len(kept)
    assert graphs(made) == (1, 4)
    assert made.stats()["graph_bytes_copied"] == 4 * 2 * N * 4  # x and the sum


def test_nothing_that_somebody_holds_is_written() -> None:
    made, weight = forward(), torch.randn(N)
    held = []
    for _ in range(12):
        x = fresh()
        held.append((x, run(made, x, weight)[1]))
        held[:] = held[-7:]  # more than there are graphs
        assert all(torch.equal(out, -(x + weight)) for x, out in held)
    held = held[-1:]
    before = graphs(made)[1]
    for _ in range(3):
        x = fresh()
        held = [(x, run(made, x, weight)[1]), held[0]]
        assert all(torch.equal(out, -(x + weight)) for x, out in held)
    assert graphs(made)[1] > before


def test_a_view_holds_what_it_is_of() -> None:
    made, weight = forward(), torch.randn(N)
    run(made, fresh(), weight)
    x = fresh()
    part = run(made, x, weight)[1][3:7].view(2, 2)
    for _ in range(4):
        run(made, fresh(), weight)
    assert torch.equal(part.flatten(), -(x + weight)[3:7])


def test_a_storage_that_python_has_seen_comes_back() -> None:
    made, weight = forward(), torch.randn(N)
    for step in range(6):
        negated = run(made, fresh(), weight)[1]
        assert negated.untyped_storage().nbytes() >= negated.nbytes
        storage = negated.untyped_storage()
        del negated, storage
        assert graphs(made) == (min(step, 1), step)


def test_a_storage_holds_what_it_is_of() -> None:
    made, weight = forward(), torch.randn(N)
    run(made, fresh(), weight)
    x = fresh()
    negated = run(made, x, weight)[1]
    storage, first = negated.untyped_storage(), negated.storage_offset()
    del negated
    for _ in range(4):
        run(made, fresh(), weight)
    assert torch.equal(torch.empty(0).set_(storage, first, (N,)), -(x + weight))


def test_memory_shared_with_what_is_not_lent_is_copied() -> None:
    made, weight = forward(twice=True), torch.randn(N)
    held = []
    for _ in range(5):
        x = fresh()
        held.append((x, run(made, x, weight)))
    assert graphs(made) == (1, 4)
    for x, (_, negated, again) in held:
        assert torch.equal(negated, -(x + weight)) and torch.equal(again, negated)
        assert again.data_ptr() == negated.data_ptr()


def test_backward_reads_where_forward_wrote() -> None:
    first, second, weight = forward(), backward(), torch.randn(N)
    for _ in range(6):
        x, gradient = fresh(), fresh()
        saved = run(first, x, weight)[1]
        (out,) = run(second, saved, gradient)
        assert torch.equal(out, x + weight - gradient)
        del saved
    assert graphs(first) == (1, 5) and graphs(second) == (1, 5)
    assert second.stats()["graph_bytes_copied"] == 5 * 2 * N * 4  # the gradients, in and out


@pytest.mark.parametrize("count", [2, 3])
def test_several_forwards_before_their_backwards(count: int) -> None:
    first, second, weight = forward(), backward(), torch.randn(N)
    for _ in range(8):
        given = [fresh() for _ in range(count)]
        saved = [run(first, x, weight)[1] for x in given]
        while saved:
            gradient, x = fresh(), given.pop()
            (out,) = run(second, saved.pop(), gradient)
            assert torch.equal(out, x + weight - gradient)
    before = graphs(first)[1], graphs(second)[1]
    saved = [run(first, fresh(), weight)[1] for _ in range(count)]
    while saved:
        run(second, saved.pop(), fresh())
    assert graphs(first)[1] == before[0] + count and graphs(second)[1] == before[1] + count


def test_shapes_share_what_they_lend() -> None:
    made, weights = forward(), {n: torch.randn(n) for n in (7, 100, 1000)}
    places: dict[int, set[int]] = {n: set() for n in weights}
    for step in range(8):
        for n, weight in weights.items():
            x = fresh(n)
            out = run(made, x, weight)[1]
            assert torch.equal(out, -(x + weight))
            if step > 4:
                places[n].add(out.data_ptr())
            del out
    assert len(set.union(*places.values())) == 1


def test_one_shape_while_another_is_out() -> None:
    made, small, large = forward(), torch.randn(7), torch.randn(1000)
    for _ in range(3):
        run(made, fresh(7), small)
    x = fresh(7)
    held = run(made, x, small)[1]
    for _ in range(4):
        y = fresh(1000)
        assert torch.equal(run(made, y, large)[1], -(y + large))
    assert torch.equal(held, -(x + small))


def test_in_place_on_what_was_lent_is_seen_by_autograd_in_this_call_alone() -> None:
    made, weight = forward(), torch.randn(N)
    run(made, fresh(), weight)
    out = run(made, fresh(), weight)[1]
    out.add_(1)
    version = out._version
    del out
    assert run(made, fresh(), weight)[1]._version < version


def test_an_output_that_is_not_there() -> None:
    with pytest.raises(RuntimeError, match="there is no output 2 to lend, but 2"):
        forward().lend([2])


@pytest.fixture
def op(device: Any) -> Iterator[None]:
    """``blade_test::neg`` enqueues what computes its result.

    What is recorded is in memory of a pool: what was let go of is taken first.
    """
    free: list[Any] = []

    def neg(x: torch.Tensor) -> torch.Tensor:
        is_recorded = device.fake_is_recording()
        block = free.pop() if free and is_recorded else np.empty(N, np.float32)
        view = block[:]
        if is_recorded:
            weakref.finalize(view, free.append, block)
        made = torch.from_numpy(view)
        device.fake_neg(
            ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(made.data_ptr()), ctypes.c_int64(N)
        )
        return made

    with torch.library._scoped_library("blade_test", "DEF") as library:
        library.define("neg(Tensor x) -> Tensor")
        library.impl("neg", neg, "CPU")
        yield


def saving(lent: bool = True) -> Any:
    """x -> -x of a call, lent, and -(-x + x), which is not; ``lent=False``: -(-x), by a call whose result is let go."""
    w = fake_writer()
    x = w.input("f32", 1)
    (n,), one = w.dims(x, 1), w.const(1)
    a, made = w.slot(f"input {x}"), w.slot(f"dyn f32 1 {n} {one}")
    w.call("blade_test::neg", f"t:{a}", results=(made,))
    out = w.tensor("output", [n])
    if not lent:
        w.launch("neg", [one, one, one], [made, out], [n])
        w.outputs = [out]
        return engine(w)
    total = w.tensor("arena", [n])
    w.launch("add", [one, one, one], [made, a, total], [n])
    w.launch("neg", [one, one, one], [total, out], [n])
    w.outputs = [out, made]
    return engine(w, lent=[1])


@pytest.mark.usefixtures("op")
def test_a_graph_recorded_before_does_not_run_while_a_result_of_a_call_is_read() -> None:
    """What it had let go of may be where the result lies: a teacher that is called between forward and backward."""
    teacher, student = saving(lent=False), saving()
    for _ in range(3):
        x = fresh()
        assert torch.equal(run(teacher, x)[0], x)
    for _ in range(3):
        run(student, fresh())
    assert graphs(teacher) == (1, 2) and graphs(student)[0] == 1
    for step in range(12):
        x, y = fresh(), fresh()
        [_, saved] = run(student, x)
        assert torch.equal(run(teacher, y)[0], y)
        assert torch.equal(saved, -x), step
        del saved
    captures, replays = graphs(teacher)
    assert captures == 2 and replays > 6  # recorded again, and then launched again
    assert graphs(student)[0] == 1


@pytest.mark.usefixtures("op")
def test_the_graph_recorded_first_takes_the_first_of_two_calls() -> None:
    """Two answers are read at a time: neither keeps the other's graph from being launched."""
    made = saving()
    for step in range(10):
        x, y = fresh(), fresh()
        [_, first] = run(made, x)
        [_, second] = run(made, y)
        assert torch.equal(first, -x) and torch.equal(second, -y), step
        del first, second
    captures, replays = graphs(made)
    assert captures == 2 and replays >= 14


@pytest.mark.usefixtures("op")
def test_buffers_of_the_graph_itself_are_not_written_by_others() -> None:
    teacher = saving(lent=False)
    w = fake_writer()
    x = w.input("f32", 1)
    (n,), one = w.dims(x, 1), w.const(1)
    made = w.slot(f"dyn f32 1 {n} {one}")
    w.call("blade_test::neg", f"t:{w.slot(f'input {x}')}", results=(made,))
    w.outputs = [made]
    reusing: Any = w.engine(
        limits={"cuda_graphs": 2, "reuse_output_buffers": 1}, object=container()
    )
    for _ in range(3):
        run(teacher, fresh())
    for _ in range(8):
        x_, y = fresh(), fresh()
        [out] = run(reusing, x_)
        assert torch.equal(run(teacher, y)[0], y)
        assert torch.equal(out, -x_)
    assert graphs(teacher)[0] == 2
