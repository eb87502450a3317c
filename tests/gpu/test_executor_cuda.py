# SPDX-License-Identifier: Apache-2.0
"""The executor on a CUDA device: programs written by hand, kernels of a few lines, calls of ATen."""

import io
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
if torch.cuda.is_available():
    sys.path.insert(0, str(Path(__file__).parent.parent / "runtime"))
    from cubins import architecture, container
    from programs import Writer

BLOCK = 128


def writer() -> "Writer":
    return Writer(isa=f"cuda {architecture()}")


def vectors(w: "Writer", count: int) -> tuple[list[int], int, list[int]]:
    """Slots of ``count`` float vectors of one size, the register of that size, and a grid over it."""
    inputs = [w.input("f32", 1, "cuda") for _ in range(count)]
    (n,) = w.dims(inputs[0], 1)
    for other in inputs[1:]:
        w.guard(w.reg(f"eq {n} {w.reg(f'dim {other} 0')}"), "equal sizes")
    one, block = w.const(1), w.const(BLOCK)
    blocks = w.reg(f"floordiv {w.reg(f'add {n} {w.const(BLOCK - 1)}')} {block}")
    return [w.slot(f"input {x}") for x in inputs], n, [blocks, one, one]


def two_step() -> "Writer":
    """-(x + y), through the arena."""
    w = writer()
    (a, b), n, grid = vectors(w, 2)
    h, out = w.tensor("arena", [n]), w.tensor("output", [n])
    w.launch("add", grid, [a, b, h], [n])
    w.launch("neg", grid, [h, out], [n])
    w.outputs = [out]
    return w


def plain(w: "Writer", constants=(), **limits: int):
    return w.engine(constants, object=container(), limits={"cuda_graphs": 0, **limits})


def run(engine, *inputs: torch.Tensor) -> list[torch.Tensor]:
    outputs = engine.try_execute(list(inputs))
    assert outputs is not None, (engine.last_error(), engine.why_unavailable(), engine.stats())
    return outputs


def randn(*sizes: int, device: str = "cuda") -> torch.Tensor:
    return torch.randn(*sizes, device=device)


def test_launches_and_the_arena():
    engine = plain(two_step())
    kept = []
    for n in (1, 127, 128, 129, 5000, 0, 3, 1_000_000):
        x, y = randn(n), randn(n)
        kept.append((run(engine, x, y)[0], -(x + y)))
    for got, want in kept:
        assert torch.equal(got, want)


def test_calls_between_launches():
    """mm of cuBLAS into the arena and as a result of its own, a launch before and after."""
    w = writer()
    x = w.input("f32", 2, "cuda")
    rows, columns = w.dims(x, 2)
    one, block = w.const(1), w.const(BLOCK)
    n = w.reg(f"mul {rows} {columns}")
    grid = [w.reg(f"floordiv {w.reg(f'add {n} {w.const(BLOCK - 1)}')} {block}"), one, one]
    a, weight = w.slot(f"input {x}"), w.slot("const 0")
    h, g, out = (w.tensor(kind, [rows, columns]) for kind in ("arena", "arena", "output"))
    result = w.slot(f"dyn f32 2 {rows} {columns} {columns} {one}")
    w.launch("neg", grid, [a, h], [n])
    w.call("aten::mm.out", f"t:{h}", f"t:{weight}", f"t:{g}")
    w.call("aten::mm", f"t:{h}", f"t:{weight}", results=(result,))
    w.launch("add", grid, [g, result, out], [n])
    w.outputs = [out, result]
    weight_tensor = randn(64, 64)
    for graphs in (0, 1):
        engine = w.engine([weight_tensor], object=container(), limits={"cuda_graphs": graphs})
        for k in range(9):
            given = randn((8, 33, 8)[k % 3], 64)
            out, result = run(engine, given)
            torch.testing.assert_close(result, -given @ weight_tensor)
            torch.testing.assert_close(out, 2 * result, rtol=0, atol=0)
        assert engine.stats()["graph_failures"] == 0, engine.last_error()


def test_streams_and_memory_that_is_handed_back():
    """Each call on the current stream, outputs usable there at once."""
    engine = two_step().engine(object=container())
    streams = [torch.cuda.Stream() for _ in range(3)]
    wrong = 0
    for k in range(60):
        stream = streams[k % 3]
        with torch.cuda.stream(stream):
            x, y = randn(4096 + k % 5), randn(4096 + k % 5)
            wrong += int((run(engine, x, y)[0] != -(x + y)).sum())
    assert wrong == 0


def test_threads_on_streams_of_their_own_and_on_one():
    engine = two_step().engine(object=container())
    shared = torch.cuda.Stream()
    errors: list[object] = []

    def work(seed: int) -> None:
        stream = shared if seed % 2 else torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for k in range(50):
                n = 1000 + (seed + k) % 7
                x, y = randn(n), randn(n)
                if not torch.equal(run(engine, x, y)[0], -(x + y)):
                    errors.append((seed, k))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    stats = engine.stats()
    assert stats["engine_runs"] == 300 and stats["graph_failures"] == 0, engine.last_error()
    assert stats["graph_replays"] > 0


def test_packs_follow_their_constants_on_any_stream():
    w = writer()
    (a,), n, grid = vectors(w, 1)
    out = w.tensor("output", [n])
    w.packs = ["pack double_row f32 20 1 0 4 0"]  # 16 elements from 4 rows, the rest stays zero
    w.launch("add", grid, [a, w.slot("const 1"), out], [n])
    w.outputs = [out]
    weight = randn(4, 4)
    engine = w.engine([weight], object=container())
    zeros = torch.zeros(20, device="cuda")

    def want() -> torch.Tensor:
        return torch.cat([2 * weight.flatten(), zeros[:4]])

    assert torch.equal(run(engine, zeros)[0], want())
    weight.mul_(3)
    assert torch.equal(run(engine, zeros)[0], want())
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        weight.add_(1)
        assert torch.equal(run(engine, zeros)[0], want())
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(run(engine, zeros)[0], want())


def test_inputs_that_are_not_aligned_or_contiguous():
    engine = plain(two_step())
    x, y = randn(513)[1:], randn(1024)[::2]
    assert x.data_ptr() % 16 != 0
    assert torch.equal(run(engine, x, y)[0], -(x + y))


def test_when_decides_per_shape():
    w = writer()
    (a,), n, grid = vectors(w, 1)
    hundred = w.const(100)
    out = w.tensor("output", [n])
    w.launch("neg", grid, [a, out], [n])
    w.when(w.reg(f"gt {n} {hundred}"))
    w.call("aten::relu.out", f"t:{a}", f"t:{out}")
    w.when(w.reg(f"le {n} {hundred}"))
    w.outputs = [out]
    engine = w.engine(object=container())
    for n_now in (5, 500, 5, 500, 5, 500, 100, 101):
        x = randn(n_now)
        assert torch.equal(run(engine, x)[0], -x if n_now > 100 else x.relu())


def test_profile_uses_events():
    texts, seconds = plain(two_step()).profile([randn(1 << 20), randn(1 << 20)], 10)
    assert [text.split()[1] for text in texts] == ["add", "neg"]
    assert all(0 < s < 1 for s in seconds)


# graphs


def test_a_graph_from_the_second_use_on():
    engine = two_step().engine(object=container())
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
    engine = two_step().engine(object=container())
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
    engine = two_step().engine(object=container(), limits={"max_graphs": 3, "max_shapes": 8})
    for k in range(120):
        n = 64 + 16 * ((k // 4) % 12)
        x, y = randn(n), randn(n)
        assert torch.equal(run(engine, x, y)[0], -(x + y))
    stats = engine.stats()
    assert stats["graph_failures"] == 0 and stats["graph_replays"] > 0


def test_an_arena_that_grows_under_graphs():
    engine = two_step().engine(object=container())
    for n in (10, 10, 10, 100_000, 10, 10, 10, 100_000, 100_000, 100_000, 10):
        x, y = randn(n), randn(n)
        assert torch.equal(run(engine, x, y)[0], -(x + y))


def test_outputs_of_the_graph_itself_if_asked():
    engine = two_step().engine(object=container(), limits={"reuse_output_buffers": 1})
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
    engine = w.engine(object=container())
    for _ in range(4):
        x = randn(300).abs() + 1
        got, index = run(engine, x)
        assert torch.equal(got, -x) and torch.equal(index.flatten(), torch.arange(300).cuda())
    stats = engine.stats()
    assert stats["graph_failures"] == 1 and stats["graph_captures"] == 0
    assert "no graph was captured" in engine.last_error()
    assert torch.cuda.current_stream().query() in (True, False)  # no error was left behind
    torch.cuda.synchronize()
    run(two_step().engine(object=container()), randn(5), randn(5))


def test_inside_a_capture_of_the_caller():
    engine = two_step().engine(object=container())
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


def test_off():
    engine = plain(two_step())
    x, y = randn(300), randn(300)
    for _ in range(4):
        run(engine, x, y)
    stats = engine.stats()
    assert stats["graph_captures"] == stats["graph_replays"] == 0


def test_memory_does_not_grow():
    engine = two_step().engine(object=container(), limits={"max_graphs": 4, "max_shapes": 8})

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


# what goes to the original


def test_other_devices_are_refused():
    w = writer()
    (a,), n, grid = vectors(w, 1)
    out = w.tensor("output", [n])
    w.launch("add", grid, [a, w.slot("const 0"), out], [n])
    w.outputs = [out]
    engine = w.engine([randn(4)], object=container())
    assert torch.equal(
        run(engine, torch.zeros(4, device="cuda"))[0].sign().abs(), torch.ones(4).cuda()
    )
    assert engine.try_execute([torch.zeros(4)]) is None
    assert engine.stats()["guard_device"] == 1
    if torch.cuda.device_count() > 1:
        assert engine.try_execute([torch.zeros(4, device="cuda:1")]) is None
        assert engine.stats()["guard_device"] == 2


def test_an_engine_without_constants_runs_on_every_device():
    engine = two_step().engine(object=container())
    for index in range(torch.cuda.device_count()):
        for _ in range(4):
            x, y = (randn(300, device=f"cuda:{index}") for _ in range(2))
            (out,) = run(engine, x, y)
            assert out.device == x.device and torch.equal(out, -(x + y))
    if torch.cuda.device_count() > 1:
        assert engine.try_execute([randn(3), randn(3, device="cuda:1")]) is None
        assert engine.stats()["guard_device"] == 1


def test_another_architecture():
    w = two_step()
    w.isa = "cuda sm_19"
    w.slot("const 0")
    engine = w.engine([randn(3)], object=container("sm_19"))
    assert engine.try_execute([randn(3), randn(3)]) is None
    assert engine.stats()["device_mismatch"] == 1
    assert f"cuda:0 is {architecture()}" in engine.why_unavailable()


def test_code_that_is_no_cubin_is_refused():
    good = container()
    index = good.index(b"\x7fELF")
    engine = two_step().engine([], object=good[:index] + bytes(len(good) - index))
    assert engine.try_execute([randn(3), randn(3)]) is None
    assert "CUDA_ERROR" in engine.last_error()
    assert torch.equal(randn(3).zero_().cpu(), torch.zeros(3))  # and the context is as it was


class Holder(nn.Module):
    def __init__(self, engine, weight: torch.Tensor) -> None:
        super().__init__()
        self.engine = engine
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outs = self.engine.try_execute([x])
        if outs is None:
            return x + self.weight
        return outs[0]


def test_saved_and_loaded_here_and_on_the_cpu():
    w = writer()
    (a,), n, grid = vectors(w, 1)
    out = w.tensor("output", [n])
    w.launch("add", grid, [a, w.slot("const 0"), out], [n])
    w.outputs = [out]
    module = Holder(None, randn(300))
    module.engine = w.engine([module.weight], object=container())
    file = io.BytesIO()
    torch.jit.script(module.eval()).save(file)
    for place in (None, "cuda", "cpu"):
        file.seek(0)
        loaded = torch.jit.load(file, map_location=place)
        for _ in range(4):
            x = randn(300, device=place or "cuda")
            assert torch.equal(loaded(x), x + loaded.weight)
        if place == "cpu":
            assert "device" in loaded.engine.why_unavailable()
            assert loaded.engine.stats()["engine_runs"] == 0
        else:
            assert loaded.engine.stats()["engine_runs"] == 4
            before = loaded.weight.clone()
            loaded.weight.fill_(1.0)  # the weights are shared, in graphs, too
            assert torch.equal(loaded(x), x + 1) and not torch.equal(before, loaded.weight)
