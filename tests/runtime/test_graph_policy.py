# SPDX-License-Identifier: Apache-2.0
"""Which shapes get a graph, and which launches are told addresses instead of copying: on a fake accelerator."""

from itertools import pairwise

import pytest
import torch
from fake_device import container, counts, fake, fake_writer, two_step
from programs import Writer

pytestmark = pytest.mark.needs("g++")

LARGE = 1 << 20  # floats: to copy them costs more than to tell a launch or two where they are
kept: list[torch.Tensor] = []  # no later tensor is at the address of an earlier one by chance


@pytest.fixture(autouse=True)
def device():
    library = fake()
    library.fake_stream(0)
    yield library
    kept.clear()
    library.fake_moves_launches(True)
    library.fake_takes(1)


def run(engine, *inputs: torch.Tensor) -> list[torch.Tensor]:
    kept.extend(inputs)
    outputs = engine.try_execute(list(inputs))
    assert outputs is not None, (engine.last_error(), engine.why_unavailable(), engine.stats())
    kept.extend(outputs)
    return outputs


def graphs(engine) -> tuple[int, int, int, int]:
    stats = engine.stats()
    names = ("captures", "replays", "failures", "declined")
    return tuple(stats[f"graph_{name}"] for name in names)


def engine_of(w: Writer, **limits: int):
    return w.engine(limits=limits, object=container())


def chain(launches: int, call: bool = False) -> Writer:
    """x negated ``launches`` times, and before by an op where ``call``: the fake device does not record that."""
    w = fake_writer()
    x = w.input("f32", 1)
    (n,), one = w.dims(x, 1), w.const(1)
    values = [w.slot(f"input {x}")]
    values += [w.tensor("arena", [n]) for _ in range(launches - 1 + call)]
    values.append(w.tensor("output", [n]))
    if call:
        w.call("aten::neg.out", f"t:{values[0]}", f"t:{values[1]}")
    for before, after in pairwise(values[call:]):
        w.launch("neg", [one, one, one], [before, after], [n])
    w.outputs = [values[-1]]
    return w


def bytes_and_moves(engine, *inputs: torch.Tensor) -> tuple[int, int]:
    """Of one replay."""
    bytes_copied, moves, replays = counts().bytes_copied, counts().moves, graphs(engine)[1]
    run(engine, *inputs)
    assert graphs(engine)[1] == replays + 1
    return counts().bytes_copied - bytes_copied, counts().moves - moves


@pytest.mark.parametrize("launches", [1, 2, 3])
def test_a_launch_or_two_are_never_captured(launches: int):
    engine = engine_of(chain(launches))
    for n in (5, 5, 5, 7, 7, 7):
        x = torch.randn(n)
        assert torch.equal(run(engine, x)[0], -x if launches % 2 else x)
    assert graphs(engine) == ((2, 4, 0, 0) if launches == 3 else (0, 0, 0, 2))


def test_launches_that_a_shape_skips_do_not_count():
    w = chain(3)
    n = w.registers.index("dim 0 0")
    w.instructions[1] = f"when {w.reg(f'gt {n} {w.const(10)}')} {w.instructions[1]}"
    engine = engine_of(w)
    for n in (5, 5, 5, 20, 20, 20):
        run(engine, torch.randn(n))
    assert graphs(engine) == (1, 2, 0, 1)


def test_always_if_asked():
    engine = engine_of(chain(1), cuda_graphs=2)
    for _ in range(4):
        x = torch.randn(5)
        assert torch.equal(run(engine, x)[0], -x)
    assert graphs(engine) == (1, 3, 0, 0)


def test_a_copy_that_takes_longer_than_launching_is_not_made():
    """Calls read what they read: it has to be copied to where the graph expects it, unless it is there."""
    engine = engine_of(chain(3, call=True))
    for _ in range(4):
        run(engine, torch.randn(100))
    assert graphs(engine) == (1, 3, 0, 0)
    for _ in range(4):
        x = torch.randn(4 * LARGE)
        assert torch.equal(run(engine, x)[0], x)  # launch by launch
    assert graphs(engine) == (1, 3, 0, 1)
    stays = engine_of(chain(3, call=True))
    for _ in range(4):
        run(stays, x)
    assert graphs(stays) == (1, 3, 0, 0)


def test_many_launches_are_worth_a_large_copy():
    engine = engine_of(chain(13, call=True))
    for _ in range(3):
        run(engine, torch.randn(4 * LARGE))
    assert graphs(engine) == (1, 2, 0, 0)
    assert bytes_and_moves(engine, torch.randn(4 * LARGE)) == (
        16 * LARGE,
        1,
    )  # the input; the output


def test_launches_read_and_write_large_memory_where_it_is():
    engine = engine_of(chain(4))
    calls = []
    for _ in range(5):
        x = torch.randn(LARGE)
        calls.append((x, run(engine, x)[0]))
    assert graphs(engine) == (1, 4, 0, 0)
    assert all(torch.equal(out, x) for x, out in calls)
    assert len({out.data_ptr() for _, out in calls}) == 5
    assert bytes_and_moves(engine, torch.randn(LARGE)) == (0, 2)  # the first launch and the last
    again = torch.randn(LARGE)
    run(engine, again)
    assert bytes_and_moves(engine, again) == (0, 1)  # the last
    assert bytes_and_moves(engine_with_small_ones(), torch.randn(100)) == (800, 0)


def engine_with_small_ones():
    engine = engine_of(chain(4))
    for _ in range(3):
        run(engine, torch.randn(100))
    return engine


def test_one_that_stayed_and_moves_later_is_not_captured_again():
    engine = engine_of(chain(4))
    x = torch.randn(LARGE)
    for _ in range(3):
        run(engine, x)
    for _ in range(3):
        moved = torch.randn(LARGE)
        assert torch.equal(run(engine, moved)[0], moved)
    assert graphs(engine) == (1, 5, 0, 0)


def test_large_and_small_and_parts_of_both():
    """Of x, large, and y, small: -x, a part of that, -(x + y) of what y has, by launches of several pointers."""
    w = fake_writer()
    x, y = w.input("f32", 1), w.input("f32", 1)
    (n,), (m,), one, zero = w.dims(x, 1), w.dims(y, 1), w.const(1), w.const(0)
    a, b = w.slot(f"input {x}"), w.slot(f"input {y}")
    negated, total = w.tensor("output", [n]), w.tensor("output", [m])
    h, part = w.tensor("arena", [m]), w.view(a, [m], [one], one)
    w.launch("neg", [one, one, one], [a, negated], [n])
    w.launch("add", [one, one, one], [part, b, h], [m])
    w.launch("neg", [one, one, one], [h, total], [m])
    w.outputs = [negated, w.view(negated, [m], [one], zero), total]
    engine = engine_of(w, cuda_graphs=2)
    calls = []
    for _ in range(5):
        given = torch.randn(2 * LARGE), torch.randn(50)
        calls.append((given, run(engine, *given)))
    assert graphs(engine) == (1, 4, 0, 0)
    for (x, y), (negated, part, total) in calls:
        assert torch.equal(negated, -x) and torch.equal(part, negated[:50])
        assert part.data_ptr() == negated.data_ptr()
        assert torch.equal(total, -(x[1:51] + y))
    assert bytes_and_moves(engine, torch.randn(2 * LARGE), torch.randn(50)) == (400, 2)


def test_an_input_that_is_updated_is_written_where_it_is():
    """x += y, then y's negation into x, by launches alone."""
    w = fake_writer()
    x, y = w.input("f32", 1), w.input("f32", 1)
    (n,), one = w.dims(x, 1), w.const(1)
    a, b, target = w.slot(f"input {x}"), w.slot(f"input {y}"), w.slot(f"update {x}")
    h, k = w.tensor("arena", [n]), w.tensor("arena", [n])
    w.launch("neg", [one, one, one], [b, h], [n])
    w.launch("neg", [one, one, one], [h, k], [n])
    w.launch("add", [one, one, one], [a, k, target], [n])
    engine = engine_of(w)
    y = torch.randn(2 * LARGE)
    for _ in range(5):
        x = torch.randn(2 * LARGE)
        want = x + y
        assert run(engine, x, y) == []
        assert torch.equal(x, want)
    assert graphs(engine) == (1, 4, 0, 0)
    assert bytes_and_moves(engine, torch.randn(2 * LARGE), y) == (0, 1)


def test_a_plain_run_between_replays_changes_nothing():
    engine = engine_of(chain(4))
    for k in range(6):
        x = torch.randn(LARGE)
        assert torch.equal(run(engine, x)[0], x)
        if k > 2:
            engine.profile([torch.randn(LARGE)], 2)
    assert graphs(engine)[0] == 1


def test_outputs_of_the_graph_itself_are_not_moved():
    engine = engine_of(chain(4), reuse_output_buffers=1)
    outputs = []
    for _ in range(4):
        x = torch.randn(LARGE)
        outputs.append(run(engine, x)[0])
        assert torch.equal(outputs[-1], x)
    assert outputs[2].data_ptr() == outputs[3].data_ptr()
    assert bytes_and_moves(engine, torch.randn(LARGE)) == (0, 1)


def test_a_driver_that_keeps_launches_as_they_are(device):
    device.fake_moves_launches(False)
    engine = engine_of(chain(12))
    for _ in range(5):
        x = torch.randn(LARGE)
        assert torch.equal(run(engine, x)[0], x)
    assert graphs(engine) == (1, 3, 1, 0)
    assert "cannot be changed" in engine.last_error()
    assert bytes_and_moves(engine, torch.randn(LARGE)) == (8 * LARGE, 0)


def test_what_was_declined_is_forgotten_with_the_counts():
    engine = engine_of(two_step(fake_writer()))
    for _ in range(3):
        run(engine, torch.randn(5), torch.randn(5))
    assert graphs(engine) == (0, 0, 0, 1)
    engine.renew()
    assert graphs(engine) == (0, 0, 0, 0)


WHOLE = 32 << 20  # floats: a graph of a chain would keep two buffers of 128 MiB


def check_whole(engine, value: float) -> None:
    x = torch.full((WHOLE,), float(value))
    (out,) = engine.try_execute([x])
    assert torch.equal(out, x)


def test_work_that_hides_its_launches_keeps_no_memory():
    engine = engine_of(chain(4))
    small = torch.randn(100)
    for _ in range(3):
        run(engine, small)
    assert graphs(engine) == (1, 2, 0, 0)
    kept_bytes = engine.stats()["arena_bytes"] + engine.stats()["graph_bytes"]
    for i in range(4):
        check_whole(engine, i)
    assert graphs(engine) == (1, 2, 0, 1)
    assert engine.stats()["arena_bytes"] + engine.stats()["graph_bytes"] == kept_bytes < 1 << 20
    assert torch.equal(run(engine, small)[0], small)  # the graph's memory is where it was
    assert graphs(engine) == (1, 3, 0, 1)


def test_launches_that_take_longer_than_their_work_get_a_graph(device):
    device.fake_takes(0)
    engine = engine_of(chain(4))
    for i, captures in enumerate((0, 0, 0, 1, 1)):
        check_whole(engine, i)
        assert graphs(engine)[0] == captures
    assert graphs(engine) == (1, 2, 0, 0)
    assert engine.stats()["arena_bytes"] >= 8 * WHOLE


def test_what_is_trimmed_is_made_again():
    engine = engine_of(chain(12))
    engine.lend([0])
    x, other, kept = torch.randn(1000), torch.randn(1000), ("arena_bytes", "lent_bytes")
    for _ in range(3):
        (held,) = engine.try_execute([x])
        assert torch.equal(held, x)
        held = None  # the next call writes there
    assert graphs(engine) == (1, 2, 0, 0)
    (held,) = engine.try_execute([x])
    assert all(engine.stats()[name] > 0 for name in kept)
    engine.trim()
    assert all(engine.stats()[name] == 0 for name in kept)
    for _ in range(3):
        assert torch.equal(engine.try_execute([other])[0], other)
    assert graphs(engine) == (2, 5, 0, 0)
    assert torch.equal(held, x)  # lent memory lives as long as somebody holds it


def test_large_shapes_get_a_graph_at_once_if_asked():
    engine = engine_of(chain(4), cuda_graphs=2)
    for i in range(3):
        check_whole(engine, i)
    assert graphs(engine) == (1, 2, 0, 0)


def test_a_large_shape_that_lends_lends_nothing_without_a_graph():
    """What it returns is the caller's own memory, which is free when the caller lets go of it."""
    engine = engine_of(chain(4))
    engine.lend([0])
    outputs = [engine.try_execute([torch.full((WHOLE,), float(i))])[0] for i in range(3)]
    assert engine.stats()["lent_bytes"] == 0
    assert all(torch.equal(out, torch.full((WHOLE,), float(i))) for i, out in enumerate(outputs))


def test_large_inputs_that_move_are_not_copied_into_a_graph():
    """A graph that kept a copy of what a call reads would keep as much as the caller."""
    engine = engine_of(chain(13, call=True))
    inputs = [torch.full((WHOLE // 2,), float(i)) for i in range(3)]
    for x in inputs:
        assert torch.equal(engine.try_execute([x])[0], x)
    assert graphs(engine) == (0, 0, 0, 0)
    stays = inputs[0]
    for _ in range(6):  # it is looked at again, less often
        assert torch.equal(engine.try_execute([stays])[0], stays)
    assert graphs(engine)[:2] == (1, 4)
