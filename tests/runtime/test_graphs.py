# SPDX-License-Identifier: Apache-2.0
"""Which calls of a shape are captured and replayed, and where inputs and outputs are then: on a fake accelerator.

The programs are so short that they would be run launch by launch: graphs are asked for.
"""

import gc
import threading

import pytest
import torch
from fake_device import container, counts, fake, fake_writer, two_step

pytestmark = pytest.mark.needs("g++")


@pytest.fixture(autouse=True, params=[True, False], ids=["copies within", "copies beside"])
def device(request: pytest.FixtureRequest):
    library = fake()
    library.fake_stream(0)
    library.fake_records_copies(request.param)
    yield library
    kept.clear()
    library.fake_records_copies(True)
    library.fake_busy(False)


# Inputs of the test so far: no later one is at the address of an earlier one by chance.
kept: list[torch.Tensor] = []


def run(engine, *inputs: torch.Tensor) -> list[torch.Tensor]:
    kept.extend(inputs)
    outputs = engine.try_execute(list(inputs))
    assert outputs is not None, (engine.last_error(), engine.why_unavailable(), engine.stats())
    return outputs


def make(w=None, constants=(), **limits: int):
    limits = {"cuda_graphs": 2, **limits}
    return (w or two_step(fake_writer())).engine(constants, limits=limits, object=container())


def graphs(engine) -> tuple[int, int, int]:
    stats = engine.stats()
    return stats["graph_captures"], stats["graph_replays"], stats["graph_failures"]


def check(engine, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    (out,) = run(engine, x, y)
    assert torch.equal(out, -(x + y))
    return out


def test_first_use_plain_second_captured_then_replayed():
    engine = make()
    seen = []
    for n in (5, 5, 5, 7, 7, 5):
        check(engine, torch.randn(n), torch.randn(n))
        seen.append(graphs(engine)[:2])
    assert seen == [(0, 0), (1, 1), (1, 2), (1, 2), (2, 3), (2, 4)]


def test_off():
    engine = make(cuda_graphs=0)
    for _ in range(4):
        check(engine, torch.randn(3), torch.randn(3))
    assert graphs(engine) == (0, 0, 0)


def test_no_call_writes_into_what_an_earlier_one_returned():
    engine = make()
    calls = []
    for _ in range(6):
        x, y = torch.randn(100), torch.randn(100)
        calls.append((x, y, check(engine, x, y)))
    assert all(torch.equal(out, -(x + y)) for x, y, out in calls)
    assert len({out.data_ptr() for _, _, out in calls}) == 6


def test_inputs_that_stay_are_not_copied():
    engine = make()
    x, y = torch.randn(100), torch.randn(100)
    check(engine, x, y)
    before = counts().bytes_copied
    for k in range(3):
        x.fill_(k)
        check(engine, x, y)
    assert counts().bytes_copied == before + 3 * 400  # the outputs alone
    assert graphs(engine) == (1, 3, 0)


def test_inputs_that_move_are_copied_and_no_others():
    engine = make()
    y = torch.randn(100)
    check(engine, torch.randn(100), y)
    check(engine, torch.randn(100), y)
    before = counts().bytes_copied
    for _ in range(3):
        check(engine, torch.randn(100), y)
    assert counts().bytes_copied == before + 3 * 800  # x and the output
    assert graphs(engine) == (1, 4, 0)


def test_an_input_that_moves_later_is_demoted():
    engine = make()
    x, y = torch.randn(100), torch.randn(100)
    for _ in range(3):
        check(engine, x, y)
    assert graphs(engine) == (1, 2, 0)
    moved = [torch.randn(100) for _ in range(3)]
    check(engine, moved[0], y)  # launch by launch
    assert graphs(engine) == (1, 2, 0)
    check(engine, moved[1], y)  # captured again, with a copy
    check(engine, moved[2], y)
    check(engine, x, y)
    assert graphs(engine) == (2, 5, 0)


def test_the_least_recently_used_graph_goes_and_comes_back_later():
    engine = make(max_graphs=2)
    base = counts().graphs

    def use(n: int, times: int) -> None:
        for _ in range(times):
            check(engine, torch.randn(n), torch.randn(n))

    use(1, 2)
    use(2, 2)
    use(1, 1)
    assert counts().graphs == base + 2
    use(3, 2)  # in place of 2's
    assert counts().graphs == base + 2
    replays = graphs(engine)[1]
    use(1, 1)
    assert graphs(engine)[1] == replays + 1
    captures = graphs(engine)[0]
    use(2, 3)
    assert graphs(engine)[0] == captures  # four uses now
    use(2, 1)
    assert graphs(engine)[0] == captures + 1


def test_graphs_go_with_their_engine():
    base = counts().graphs
    engine = make()
    for _ in range(3):
        check(engine, torch.randn(9), torch.randn(9))
    assert counts().graphs == base + 1
    del engine
    gc.collect()
    assert counts().graphs == base


def test_shapes_beyond_their_limit_take_their_graphs_along():
    engine = make(max_shapes=2)
    base = counts().graphs
    for n in (1, 1, 2, 2, 3, 3, 4, 4):
        check(engine, torch.randn(n), torch.randn(n))
    assert counts().graphs == base + 2


def test_an_arena_that_moves_drops_graphs():
    engine = make()
    for n in (10, 10, 10_000, 10, 10, 10_000, 10_000, 10, 10, 20_000, 20_000, 10, 10):
        check(engine, torch.randn(n), torch.randn(n))
    assert graphs(engine)[2] == 0


def test_weights_that_move_drop_graphs():
    w = fake_writer()
    x = w.input("f32", 1)
    (n,), one = w.dims(x, 1), w.const(1)
    out = w.tensor("output", [n])
    w.launch("add", [one, one, one], [w.slot(f"input {x}"), w.slot("const 0"), out], [n])
    w.outputs = [out]
    weight = torch.randn(64)
    engine = make(w, [weight])
    given = torch.randn(64)
    for _ in range(3):
        assert torch.equal(run(engine, given)[0], given + weight)
    weight.share_memory_()
    weight.mul_(2)
    for _ in range(3):
        assert torch.equal(run(engine, given)[0], given + weight)
    assert graphs(engine)[0] == 2


def test_a_capture_that_fails_is_counted_once():
    w = fake_writer()
    x = w.input("f32", 1)
    (n,), one = w.dims(x, 1), w.const(1)
    out = w.tensor("output", [n])
    w.launch("fail_in_capture", [one, one, one], [w.slot(f"input {x}"), out], [n])
    w.outputs = [out]
    engine = make(w)
    for _ in range(5):
        given = torch.randn(9)
        assert torch.equal(run(engine, given)[0], -given)
    assert graphs(engine) == (0, 0, 1)
    assert "not permitted while capturing" in engine.last_error()
    for _ in range(3):
        run(engine, torch.randn(8))  # another shape tries for itself
    assert graphs(engine) == (0, 0, 2)
    engine.renew()
    assert graphs(engine) == (0, 0, 0) and engine.last_error() == ""


def test_what_calls_nothing_is_told_to_the_recorder():
    """Then nothing need be captured, and no other thread is disturbed. What counts are the calls of a shape."""
    w = fake_writer()
    x = w.input("f32", 1)
    (n,), one, three = w.dims(x, 1), w.const(1), w.const(3)
    a, h, out = w.slot(f"input {x}"), w.tensor("arena", [n]), w.tensor("output", [n])
    w.launch("neg", [one, one, one], [a, h], [n])
    w.call("aten::neg.out", f"t:{h}", f"t:{h}")
    w.when(w.reg(f"gt {n} {three}"))
    w.launch("neg", [one, one, one], [h, out], [n])
    w.outputs = [out]
    engine = make(w)
    for size, told in ((3, 1), (4, 0)):
        before = counts().told
        run(engine, given := torch.randn(size))
        run(engine, given)
        assert counts().told - before == told
    assert graphs(engine) == (2, 2, 0)
    given = torch.randn(3)
    assert torch.equal(run(engine, given)[0], given)


def test_a_shape_waits_while_another_thread_captures(device):
    engine = make()
    x, y = torch.randn(4), torch.randn(4)
    device.fake_busy(True)
    for _ in range(3):
        check(engine, x, y)
    assert graphs(engine) == (0, 0, 0)
    device.fake_busy(False)
    check(engine, x, y)
    assert graphs(engine) == (1, 1, 0)


def test_streams_have_graphs_of_their_own(device):
    engine = make()
    x, y = torch.randn(4), torch.randn(4)
    for stream in (0, 64, 0, 64, 0, 64):
        device.fake_stream(stream)
        check(engine, x, y)
    assert graphs(engine) == (2, 4, 0)


def test_outputs_of_the_graph_itself_if_asked():
    engine = make(reuse_output_buffers=1)
    y = torch.randn(100)
    outputs = [check(engine, torch.randn(100), y) for _ in range(4)]
    assert outputs[2].data_ptr() == outputs[3].data_ptr() != outputs[0].data_ptr()
    assert torch.equal(outputs[2], outputs[3])
    state = torch.randn(100)
    for _ in range(5):  # what comes back as an input is about to be overwritten
        want = -(state + y)
        (state,) = run(engine, state, y)
        assert torch.equal(state, want)


def every_kind_of_output():
    """An output, a view of it, an input, a view of it, an arena slot, a constant."""
    w = fake_writer()
    x = w.input("f32", 1)
    (n,), zero, one = w.dims(x, 1), w.const(0), w.const(1)
    less = w.reg(f"sub {n} {one}")
    a, weight = w.slot(f"input {x}"), w.slot("const 0")
    h, out = w.tensor("arena", [n]), w.tensor("output", [n])
    w.launch("neg", [one, one, one], [a, h], [n])
    w.launch("add", [one, one, one], [a, weight, out], [n])
    parts = [w.view(of, [less], [one], one) for of in (out, a)]
    w.outputs = [out, parts[0], a, parts[1], h, weight, w.view(weight, [n], [one], zero)]
    return w


def test_every_kind_of_output():
    weight = torch.randn(50)
    engine = make(every_kind_of_output(), [weight])
    calls = []
    for _ in range(5):
        x = torch.randn(50)
        outputs = run(engine, x)
        calls.append((x, outputs, [x + weight, (x + weight)[1:], x, x[1:], -x, weight, weight]))
        assert outputs[2] is x or outputs[2].data_ptr() == x.data_ptr()
        assert outputs[3].data_ptr() == x.data_ptr() + 4
        assert outputs[1].data_ptr() == outputs[0].data_ptr() + 4
        assert outputs[5].data_ptr() == weight.data_ptr()
    for _, outputs, want in calls:
        assert all(torch.equal(got, other) for got, other in zip(outputs, want, strict=True))
    assert graphs(engine) == (1, 4, 0)


def test_an_input_that_is_updated_gets_back_what_was_written():
    """x += y, where x moves from call to call."""
    w = fake_writer()
    x, y = w.input("f32", 1), w.input("f32", 1)
    (n,), one = w.dims(x, 1), w.const(1)
    a, b, target = w.slot(f"input {x}"), w.slot(f"input {y}"), w.slot(f"update {x}")
    w.launch("add", [one, one, one], [a, b, target], [n])
    engine = make(w)
    given = [torch.randn(64) for _ in range(6)]
    addend = torch.randn(64)
    for x in [*given, given[-1], given[-1]]:
        want, version = x + addend, x._version
        assert run(engine, x, addend) == []
        assert torch.equal(x, want) and x._version == version + 1
    assert graphs(engine) == (1, 7, 0)


def test_memory_of_the_cpu_is_not_captured():
    """Only where the accelerator has another kind of memory; here it is all one, so a written input stands for it."""
    w = fake_writer()
    x = w.input("f32", 1)
    (n,), one = w.dims(x, 1), w.const(1)
    a, out = w.slot(f"input {x}"), w.tensor("output", [n])
    w.call("aten::neg_", f"t:{a}", results=(w.slot(f"dyn f32 1 {n} {one}"),))
    w.launch("neg", [one, one, one], [a, out], [n])
    w.outputs = [out]
    engine = make(w)
    for _ in range(4):
        x = torch.randn(5)
        want = x.clone()
        assert torch.equal(run(engine, x)[0], want) and torch.equal(x, -want)
    assert graphs(engine) == (0, 0, 0)


def test_threads_share_an_engine():
    """The fake records in a global: one thread at a time may be on the device, as the lock here sees to."""
    engine, lock = make(max_graphs=2), threading.Lock()
    errors: list[int] = []

    def work(seed: int) -> None:
        for k in range(40):
            n = 1 + (seed + k) % 4
            x, y = torch.randn(n), torch.randn(n)
            with lock:
                out = run(engine, x, y)[0]
            if not torch.equal(out, -(x + y)):
                errors.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
