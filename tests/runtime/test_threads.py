# SPDX-License-Identifier: Apache-2.0
"""One engine, many threads, many shapes."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from programs import Writer
from torch import nn


def two_layers() -> Writer:
    """tanh(relu(x @ A) @ B): arena, dyn results, constants."""
    w = Writer()
    x = w.input("f32", 2)
    rows, _ = w.dims(x, 2)
    n, one = w.const(32), w.const(1)
    h = w.tensor("arena", [rows, n])
    z = w.slot(f"dyn f32 2 {rows} {n} {n} {one}")
    y = w.tensor("output", [rows, n])
    w.call("aten::mm.out", f"t:{w.slot(f'input {x}')}", f"t:{w.slot('const 0')}", f"t:{h}")
    w.call("aten::relu_", f"t:{h}")
    w.call("aten::mm", f"t:{h}", f"t:{w.slot('const 1')}", results=(z,))
    w.call("aten::tanh.out", f"t:{z}", f"t:{y}")
    w.outputs = [y]
    return w


class Module(nn.Module):
    def __init__(self, engine) -> None:
        super().__init__()
        self.engine = engine

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outs = self.engine.try_execute([x])
        if outs is None:
            return torch.zeros(0)
        return outs[0]


def test_fifty_threads_with_their_own_shapes():
    weights = [torch.randn(16, 32) / 4, torch.randn(32, 32) / 6]
    engine = two_layers().engine(weights)
    module = torch.jit.script(Module(engine))
    start = threading.Barrier(50)

    def work(thread: int) -> float:
        rng = torch.Generator().manual_seed(thread)
        start.wait()
        worst = 0.0
        for step in range(20):
            x = torch.randn(1 + (thread * 7 + step) % 23, 16, generator=rng)
            want = torch.tanh(torch.relu(x @ weights[0]) @ weights[1])
            worst = max(worst, (module(x) - want).abs().max().item())
        return worst

    with ThreadPoolExecutor(50) as pool:
        assert max(pool.map(work, range(50))) < 1e-5
    assert engine.stats() == {"calls": 1000, "engine_runs": 1000, "fallbacks": 0}


def test_python_runs_while_the_engine_computes():
    """The GIL is free: a Python thread counts on during one long call."""
    w = Writer()
    x = w.input("f32", 2)
    sizes = w.dims(x, 2)
    a, y = w.slot(f"input {x}"), w.tensor("output", sizes)
    for _ in range(20):
        w.call("aten::mm.out", f"t:{a}", f"t:{a}", f"t:{y}")
    w.outputs = [y]
    module = torch.jit.script(Module(w.engine()))
    x = torch.zeros(700, 700)
    ticks, done = [], threading.Event()

    def tick() -> None:
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    ticker = threading.Thread(target=tick)
    ticker.start()
    begin = time.perf_counter()
    module(x)
    end = time.perf_counter()
    done.set()
    ticker.join()
    assert sum(begin < t < end for t in ticks) >= 3
