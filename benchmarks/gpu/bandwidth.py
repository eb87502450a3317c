# SPDX-License-Identifier: Apache-2.0
"""How fast one peer moves a pattern's bytes, in a process of its own.

    bandwidth = Bandwidth("inductor", Where())
    bandwidth.attempt(pattern="layer_norm")          # every shape: checked
    bandwidth.time(pattern="layer_norm")             # {"8x128x768": {"us": ..., "kernels": 1, ...}}

Bytes: every input read once, every result written once. Time: that in which the device is busy, launches
aside. Buffers rotate, so that nothing is found in the L2 cache; results are kept as long.
"""

import itertools
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from zoo.model import Axis, Model, Shape, Tensors, label

from gpu.device import Where, distance, exact, traced
from gpu.patterns import PATTERNS
from gpu.peers import PEERS, served

FLUSH = 256 * 2**20  # bytes of buffers to rotate through: a few times the largest L2 cache
MOST_SETS = 48
CALLS = 64


class Bandwidth:
    """``peer`` "copy" reads and writes the same number of bytes with a plain device copy."""

    def __init__(self, peer: str, where: Where, tiny: bool) -> None:
        self._peer, self._where, self._tiny = peer, where, tiny
        self._runs: dict[str, Any] = {}

    def hello(self) -> bool:
        self._where.place(torch.ones(4))
        self._where.wait()
        return True

    def _shapes(self, pattern: str) -> tuple[Shape, ...]:
        made = PATTERNS[pattern]
        return ((1, 2, *made.small[0][2:]),) if self._tiny else (*made.small, *made.large)

    def attempt(self, pattern: str) -> dict[str, Any]:
        """``prepare``; a peer that raises says so under "failed", and may do well with the next pattern."""
        try:
            return {} if self._peer == "copy" else self.prepare(pattern)
        except Exception as error:
            return {"failed": f"{pattern}: {type(error).__name__}: {str(error)[:300]}"}

    @torch.no_grad()
    def prepare(self, pattern: str) -> dict[str, Any]:
        """Compile, and check every shape."""
        made = PATTERNS[pattern]
        torch.manual_seed(0)
        module = made.module().eval().to(self._where.device, getattr(torch, self._where.dtype))
        rng = torch.Generator().manual_seed(1)

        def inputs(shape: Shape, seed: int) -> Tensors:
            rng.manual_seed(seed)
            return tuple(map(self._where.place, made.inputs(shape, rng)))

        shapes = self._shapes(pattern)
        model = Model(module, (), tuple(Axis("", 1, s) for s in shapes[0]), shapes, inputs)
        ideal = exact(module)
        start = time.perf_counter()
        run = self._runs[pattern] = PEERS[self._peer](model, [inputs(shapes[0], 1)])
        run(*inputs(shapes[0], 1))
        self._where.wait()
        seconds = time.perf_counter() - start
        wrong, errors = [], {}
        for shape in shapes:
            given = inputs(shape, 2)
            want = ideal(*given)
            own = distance(module(*given), want)
            errors[label(shape)] = found = distance(run(*given), want)
            if not found <= 2 * own + 1e-6:
                wrong.append(f"{pattern} {label(shape)}: {found:.1e}, eager {own:.1e}")
        return {
            "compile_s": seconds,
            "errors": errors,
            "wrong": "; ".join(wrong),
            "served": served(run),
        }

    @torch.no_grad()
    def time(self, pattern: str) -> dict[str, dict[str, float | None]]:
        """Per shape: bytes, microseconds and kernels on the device, and microseconds of queued calls."""
        return {label(s): self._time_one(pattern, s) for s in self._shapes(pattern)}

    def _time_one(self, pattern: str, shape: Shape) -> dict[str, float | None]:
        made, rng = PATTERNS[pattern], torch.Generator().manual_seed(1)
        first = tuple(map(self._where.place, made.inputs(shape, rng)))
        moved = (
            sum(t.nbytes for t in first) + first[0].nbytes
        )  # results are as large as the first input
        count = 3 if self._tiny else max(3, min(MOST_SETS, FLUSH // moved + 1))
        calls = (
            self._copies(moved, count)
            if self._peer == "copy"
            else self._calls(pattern, first, count)
        )
        turns = itertools.cycle(calls)
        for _ in range(count):
            next(turns)()
        self._where.wait()
        number = 3 if self._tiny else CALLS
        start = time.perf_counter()
        for _ in range(number):
            next(turns)()
        self._where.wait()
        queued = (time.perf_counter() - start) / number
        work = traced(lambda k: next(turns)(), self._where, number)
        return {
            "bytes": float(moved),
            "queued_us": queued * 1e6,
            "us": None if work is None else work.device_us,
            "kernels": None if work is None else work.kernels + work.copies,
        }

    def _copies(self, moved: int, count: int) -> list[Callable[[], Any]]:
        """Of half as many bytes each: they are read, and written."""
        shape, device = (moved // 8,), self._where.device
        pairs = [
            (torch.empty(shape, device=device), torch.randn(shape, device=device))
            for _ in range(count)
        ]
        return [partial(into.copy_, out_of) for into, out_of in pairs]

    def _calls(self, pattern: str, inputs: Tensors, count: int) -> list[Callable[[], Any]]:
        """Each on memory of its own; the last ``count`` results are alive."""
        run = self._runs[pattern]
        kept: deque[Any] = deque(maxlen=count)
        sets = [tuple(t.clone() for t in inputs) for _ in range(count)]

        def call(given: Tensors) -> None:
            kept.append(run(*given))

        return [partial(call, given) for given in sets]
