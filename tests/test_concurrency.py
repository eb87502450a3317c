# SPDX-License-Identifier: Apache-2.0
"""One optimized module, many callers: the answers are those of calling alone, and memory stays bounded."""

import random
import resource
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from fake_backends import Fake, registered
from torch import nn

import blade

pytestmark = pytest.mark.needs("runtime")

THREADS = 200
CALLS = 100_000
MIB = 1 << 20


class Attention(nn.Module):
    """A small real block: products, a softmax, a layer norm, sizes in the arithmetic, two outputs."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.norm = nn.LayerNorm(width)
        self.out = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        batch, length, width = x.shape
        split = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5).softmax(-1)
        mixed = (weights @ v).transpose(1, 2).reshape(batch, length, width)
        hidden = self.norm(x + mixed)
        return self.norm(hidden + self.out(hidden)), weights.amax(-1)


def block() -> nn.Module:
    return Attention().eval()


def sample(batch: int, length: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(100 * batch + length)
    return torch.randn(batch, length, 16, generator=rng)


SHAPES = [(batch, length) for batch in (1, 2, 3, 5) for length in (1, 2, 3, 7, 8, 13)]


@pytest.fixture(scope="module", params=["disc", "fake"])
def optimized(request: pytest.FixtureRequest) -> Iterator[torch.jit.ScriptModule]:
    """Served by native code, and by a Python function (with a guard that turns odd batches away)."""
    if request.param == "disc":
        pytest.importorskip("torch_mlir")
    with registered(Fake(even_only=True)):
        config = blade.Config(optimization_pipeline=request.param, timing=False, strict=True)
        yield blade.optimize(block(), sample(2, 8), config)


def at_once(work: Callable[[int], float], threads: int) -> list[float]:
    """``work(i)`` on that many threads, none of which starts before all are there."""
    barrier = threading.Barrier(threads)

    def start(i: int) -> float:
        barrier.wait(60)
        return work(i)

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(start, range(threads)))


def test_two_hundred_threads_with_their_own_shapes(optimized: torch.jit.ScriptModule) -> None:
    inputs = {shape: sample(*shape) for shape in SHAPES}
    with torch.no_grad():
        alone = {shape: optimized(x) for shape, x in inputs.items()}
    blade.rearm(optimized)
    before = [dict(s) for s in blade.stats(optimized).values()]

    def work(thread: int) -> float:
        rng = random.Random(thread)
        worst = 0.0
        with torch.no_grad():
            for _ in range(10):
                shape = rng.choice(SHAPES)
                for got, want in zip(optimized(inputs[shape]), alone[shape], strict=True):
                    assert got.shape == want.shape
                    worst = max(worst, float((got - want).abs().max()))
        return worst

    # Not bit for bit: libraries split a product by what the machine is doing at the moment.
    assert max(at_once(work, THREADS)) < 1e-5
    after = blade.stats(optimized).values()
    for old, new in zip(before, after, strict=True):
        assert new["calls"] - old["calls"] == 10 * THREADS
        assert new.get("engine_raised", 0) == new.get("circuit_open", 0) == 0


def test_an_optimize_while_others_call(optimized: torch.jit.ScriptModule) -> None:
    """``optimize`` holds nothing that calls need, and two of them do not disturb each other."""
    x = sample(2, 8)
    with torch.no_grad():
        want = optimized(x)[0]

    def work(thread: int) -> float:
        if thread < 2:
            model = nn.Sequential(nn.Linear(16, 8), nn.GELU(), nn.Softmax(-1)).eval()
            made = blade.optimize(
                model, x, blade.Config(optimization_pipeline="other", timing=False)
            )
            with torch.no_grad():
                return float((made(x) - model(x)).abs().max())
        with torch.no_grad():
            return max(float((optimized(x)[0] - want).abs().max()) for _ in range(50))

    with registered(Fake("other")):
        assert max(at_once(work, 6)) < 1e-5


class Small(nn.Module):
    """Cheap, so that what is measured is blade."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x * 2 + 1).tanh() - x.amax(-1, keepdim=True)).relu()


@pytest.mark.needs("torch_mlir")
def test_memory_is_bounded_over_calls_of_many_shapes() -> None:
    config = blade.Config(optimization_pipeline="DISC", timing=False, strict=True)
    optimized = blade.optimize(Small().eval(), torch.randn(4, 8), config)
    # more shapes than an engine keeps plans of, and some that repeat at once
    data = torch.randn(40 * 40)
    shapes = [(rows, columns) for rows in range(1, 41) for columns in range(1, 41)]
    rng = random.Random(0)

    def call(times: int) -> None:
        for _ in range(times):
            rows, columns = rng.choice(shapes)
            optimized(data[: rows * columns].view(rows, columns))

    with torch.no_grad():
        call(CALLS // 5)
        before = _resident()
        call(CALLS - CALLS // 5)
        grown = _resident() - before
    assert grown < 8 * MIB, f"{grown / MIB:.1f} MiB"
    [stats] = blade.stats(optimized).values()
    assert stats == {"calls": CALLS, "engine_runs": CALLS, "fallbacks": 0}


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
