# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of programs written by hand: captured at the second use of a shape, replayed after it."""

import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
if torch.cuda.is_available():
    from cubins import container
    from cuda_programs import graphed, plain, randn, run, two_step, vectors, writer


def test_a_graph_from_the_second_use_on():
    engine = graphed(two_step())
    kept = []
    for _ in range(6):
        x, y = randn(300), randn(300)
        kept.append((run(engine, x, y)[0], -(x + y)))
    for got, want in kept:  # no later call may have written into them
        assert torch.equal(got, want)
    assert torch.unique(torch.tensor([got.data_ptr() for got, _ in kept])).numel() == 6
    stats = engine.stats()
    assert stats["graph_failures"] == 0, engine.last_error()
    assert stats["graph_captures"] >= 1 and stats["graph_replays"] >= 4


def test_inputs_that_stay_are_read_where_they_are():
    engine = graphed(two_step())
    x, y = randn(300), randn(300)
    for k in range(5):
        x.fill_(k)
        assert torch.equal(run(engine, x, y)[0], -(x + y))
    assert engine.stats()["graph_captures"] == 1
    moved = randn(300)  # demoted: launch by launch now, captured again at the next use
    for _ in range(4):
        assert torch.equal(run(engine, moved, y)[0], -(moved + y))
        moved = randn(300)
    assert engine.stats()["graph_captures"] == 2
    assert engine.stats()["graph_failures"] == 0


def test_many_shapes_and_few_graphs():
    engine = graphed(two_step(), max_graphs=3, max_shapes=8)
    for k in range(120):
        n = 64 + 16 * ((k // 4) % 12)
        x, y = randn(n), randn(n)
        assert torch.equal(run(engine, x, y)[0], -(x + y))
    stats = engine.stats()
    assert stats["graph_failures"] == 0 and stats["graph_replays"] > 0


def test_an_arena_that_grows_under_graphs():
    engine = graphed(two_step())
    for n in (10, 10, 10, 100_000, 10, 10, 10, 100_000, 100_000, 100_000, 10):
        x, y = randn(n), randn(n)
        assert torch.equal(run(engine, x, y)[0], -(x + y))


def test_outputs_of_the_graph_itself_if_asked():
    engine = graphed(two_step(), reuse_output_buffers=1)
    outputs = []
    for _ in range(5):
        x, y = randn(300), randn(300)
        outputs.append(run(engine, x, y)[0])
        assert torch.equal(outputs[-1], -(x + y))
    assert len({out.data_ptr() for out in outputs[2:]}) == 1
    state = randn(300)
    for _ in range(5):  # an output that comes back as an input
        want = -(state + y)
        state = run(engine, state, y)[0]
        assert torch.equal(state, want)


def test_what_cannot_be_captured_runs_launch_by_launch():
    """nonzero's size has to be known on the CPU: a capture forbids it."""
    w = writer()
    (a,), n, grid = vectors(w, 1)
    one = w.const(1)
    out, where = w.tensor("output", [n]), w.slot(f"dyn i64 2 {n} {one} {one} {one}")
    w.call("aten::nonzero", f"t:{a}", results=(where,))
    w.launch("neg", grid, [a, out], [n])
    w.outputs = [out, where]
    engine = graphed(w)
    for _ in range(4):
        x = randn(300).abs() + 1
        got, index = run(engine, x)
        assert torch.equal(got, -x) and torch.equal(index.flatten(), torch.arange(300).cuda())
    stats = engine.stats()
    assert stats["graph_failures"] == 1 and stats["graph_captures"] == 0
    assert "no graph was captured" in engine.last_error()
    assert torch.cuda.current_stream().query() in (True, False)  # no error was left behind
    torch.cuda.synchronize()
    run(graphed(two_step()), randn(5), randn(5))


def test_inside_a_capture_of_the_caller():
    engine = graphed(two_step())
    x, y = randn(300), randn(300)
    for _ in range(3):
        run(engine, x, y)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (out,) = run(engine, x, y)
    for _ in range(3):
        x.normal_()
        other = run(engine, randn(300), randn(300))[0]  # must not disturb what was recorded
        graph.replay()
        assert torch.equal(out, -(x + y))
    assert other.shape == (300,)


def test_kernels_that_start_early_wait_for_each_other():
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("no programmatic dependent launch before sm_90")
    w = writer()
    (a,), n, grid = vectors(w, 1)
    values = [a, *(w.tensor("arena", [n]) for _ in range(40)), w.tensor("output", [n])]
    for before, after in pairwise(values):
        w.launch("neg_early", grid, [before, after], [n])
    w.outputs = [values[-1]]
    engine = graphed(w)
    for _ in range(20):
        x = randn(1 << 20)
        assert torch.equal(run(engine, x)[0], -x)
    assert engine.stats()["graph_replays"] >= 18


def test_no_other_thread_is_disturbed_and_none_disturbs():
    """What launches alone is put together node by node. A wait for the device ends a capture, and raises."""
    w = writer()
    (a,), n, grid = vectors(w, 1)
    values = [a, *(w.tensor("arena", [n]) for _ in range(60)), w.tensor("output", [n])]
    for before, after in pairwise(values):
        w.launch("neg", grid, [before, after], [n])
    w.outputs = [values[-1]]
    engine = graphed(w)
    errors: list[Exception] = []
    waits, done = [0], threading.Event()

    def wait() -> None:
        try:
            while not done.is_set():
                torch.ones(10, device="cuda").add_(1)
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
                waits[0] += 1
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        for size in range(100, 130):
            for _ in range(3):
                x = randn(size)
                assert torch.equal(run(engine, x)[0], -x)
    finally:
        done.set()
        thread.join()
    assert not errors and waits[0] > 0
    stats = engine.stats()
    assert stats["graph_failures"] == 0, engine.last_error()
    assert stats["graph_captures"] == 30


@pytest.mark.parametrize("n", [1 << 16, (1 << 22) + 3])
@pytest.mark.parametrize("kernel", ["neg", "neg_early"])
def test_launches_are_told_where_large_inputs_and_outputs_are(n: int, kernel: str):
    """Small ones are copied. Results of earlier calls stay as they are."""
    if kernel == "neg_early" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("no programmatic dependent launch before sm_90")
    w = writer()
    (a, b), size, grid = vectors(w, 2)
    values = [w.tensor("arena", [size]) for _ in range(5)]
    out, other = w.tensor("output", [size]), w.tensor("output", [size])
    w.launch("add", grid, [a, b, values[0]], [size])
    for before, after in pairwise([*values, out]):
        w.launch(kernel, grid, [before, after], [size])
    w.launch("add", grid, [out, b, other], [size])
    w.outputs = [out, other]
    engine = w.engine(object=container())
    stays, calls = randn(n), []
    for k in range(8):
        x, y = randn(n), stays if k < 5 else randn(n)
        calls.append((x, y, *run(engine, x, y)))
    for x, y, out, other in calls:
        torch.testing.assert_close(out, -(x + y), rtol=0, atol=0)
        torch.testing.assert_close(other, out + y, rtol=0, atol=0)
    stats = engine.stats()
    assert stats["graph_failures"] == 0, engine.last_error()
    assert stats["graph_captures"] >= 1 and stats["graph_replays"] >= 6


def test_many_outputs_and_inputs_of_odd_sizes():
    """More copies than one launch takes; sizes that are no multiples of 16 bytes; addresses that are none either."""
    w = writer()
    inputs, n, grid = vectors(w, 150)
    outputs = [w.tensor("output", [n]) for _ in inputs]
    for a, out in zip(inputs, outputs, strict=True):
        w.call("aten::neg.out", f"t:{a}", f"t:{out}")
    w.launch("neg", grid, [inputs[0], outputs[0]], [n])
    w.outputs = outputs
    engine = graphed(w)
    for k in range(5):
        given = [randn(37 + k)[k:] for _ in inputs]
        assert all(torch.equal(got, -x) for got, x in zip(run(engine, *given), given, strict=True))
    stats = engine.stats()
    assert stats["graph_failures"] == 0, engine.last_error()
    assert stats["graph_captures"] >= 1  # aligned copies of inputs may be where earlier ones were


def test_a_process_that_ends_with_graphs_ends():
    """Engines, graphs and events that live until the interpreter goes, and in static storage of TorchScript."""
    code = """
import sys
sys.path[:0] = sys.argv[1:]
import torch
from cuda_programs import graphed, randn, run, two_step
engine = graphed(two_step())
for _ in range(4):
    run(engine, randn(300), randn(300))
assert engine.stats()["graph_replays"] > 0
sys.kept = engine
"""
    folders = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "runtime")]
    done = subprocess.run(
        [sys.executable, "-c", code, *folders], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr


def test_off():
    engine = plain(two_step())
    x, y = randn(300), randn(300)
    for _ in range(4):
        run(engine, x, y)
    stats = engine.stats()
    assert stats["graph_captures"] == stats["graph_replays"] == 0


def test_memory_does_not_grow():
    engine = graphed(two_step(), max_graphs=4, max_shapes=8)

    def calls() -> None:
        for k in range(100):
            n = 1000 + 64 * (k * 7 % 20)
            for _ in range(3):
                run(engine, randn(n), randn(n))

    calls()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    calls()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + (1 << 20)
