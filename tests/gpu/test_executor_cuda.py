# SPDX-License-Identifier: Apache-2.0
"""The executor on a CUDA device: programs written by hand, kernels of a few lines, calls of ATen."""

import io
import threading

import pytest
import torch
from torch import nn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
if torch.cuda.is_available():
    from cubins import architecture, container
    from cuda_programs import BLOCK, graphed, plain, randn, run, two_step, vectors, writer


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
    for graphs in (0, 1, 2):
        engine = w.engine([weight_tensor], object=container(), limits={"cuda_graphs": graphs})
        for k in range(9):
            given = randn((8, 33, 8)[k % 3], 64)
            out, result = run(engine, given)
            torch.testing.assert_close(result, -given @ weight_tensor)
            torch.testing.assert_close(out, 2 * result, rtol=0, atol=0)
        assert engine.stats()["graph_failures"] == 0, engine.last_error()


def test_streams_and_memory_that_is_handed_back():
    """Each call on the current stream, outputs usable there at once."""
    engine = graphed(two_step())
    streams = [torch.cuda.Stream() for _ in range(3)]
    wrong = 0
    for k in range(60):
        stream = streams[k % 3]
        with torch.cuda.stream(stream):
            x, y = randn(4096 + k % 5), randn(4096 + k % 5)
            wrong += int((run(engine, x, y)[0] != -(x + y)).sum())
    assert wrong == 0


def test_threads_on_streams_of_their_own_and_on_one():
    engine = graphed(two_step())
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
    torch.jit.save(torch.jit.script(module.eval()), file)
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
