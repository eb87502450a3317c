# SPDX-License-Identifier: Apache-2.0
"""One peer on one model, in a process of its own: compile, check, time, count, or answer a stream.

    Calls("bert", "inductor", Where(), ((1, 32), (8, 128)), tiny=False).prepare()

Values are compared with the same weights in float64. A peer may be off by twice what eager is off.
"""

import itertools
import random
import time
from dataclasses import asdict
from typing import Any

import torch
from zoo.model import Shape, Tensors, label

from gpu.device import Where, by_kernel, distance, exact, placed, recorded, traced
from gpu.peers import PEERS, served
from gpu.tiny import model_named

SETS = 3  # inputs per shape, in turns: what comes in is not always at the same address
WARM = 4 * SETS  # graphs are captured at a second or third call
CALLS = 3  # under the profiler


class Calls:
    """The commands; ``shapes`` empty: the model's own."""

    def __init__(
        self, model: str, peer: str, where: Where, shapes: tuple[Shape, ...], tiny: bool
    ) -> None:
        self._where, self._prepare = where, PEERS[peer]
        self._is_static = peer.endswith("static")
        self._model = placed(model_named(model, tiny), where)
        self._shapes = shapes or self._model.fixed
        self._module = self._model.module
        with torch.no_grad():
            self._sets = {
                label(one): [self._model.inputs(one, seed) for seed in range(1, SETS + 1)]
                for one in self._shapes
            }

    def hello(self) -> bool:
        """Imports and the model are done."""
        self._where.wait()
        return True

    @torch.no_grad()
    def prepare(self) -> dict[str, Any]:
        """Compile, and call each shape once, which is when most peers compile; then warm up and check."""
        ideal = exact(self._module)
        want = {key: [ideal(*s) for s in sets] for key, sets in self._sets.items()}
        own = {
            key: max(map(distance, map(self._call_eager, sets), want[key]))
            for key, sets in self._sets.items()
        }
        self._where.wait()
        start = time.perf_counter()
        self._run = self._prepare(self._model, [sets[0] for sets in self._sets.values()])
        for sets in self._sets.values():
            self._run(*sets[0])
        self._where.wait()
        seconds = time.perf_counter() - start
        errors = {key: self._largest_error(sets, want[key]) for key, sets in self._sets.items()}
        wrong = {key: f"{e:.1e}" for key, e in errors.items() if not e <= 2 * own[key] + 1e-6}
        return {
            "compile_s": seconds,
            "errors": errors,
            "eager_errors": own,
            "wrong": f"more than twice eager's error: {wrong}" if wrong else "",
            "served": served(self._run),
        }

    def _call_eager(self, sample: Tensors) -> Tensors:
        return self._module(*sample)

    def _largest_error(self, sets: list[Tensors], want: list[Tensors]) -> float:
        """Also of the calls that capture graphs, and of the first ones of these."""
        found = []
        for k in range(WARM):
            found.append(distance(self._run(*sets[k % SETS]), want[k % SETS]))
        return max(found)

    @torch.no_grad()
    def time(self, seconds: float) -> dict[str, list[float]]:
        """Seconds of single calls, each waited for, at each shape."""
        return {key: self._time_one(sets, seconds) for key, sets in self._sets.items()}

    def _time_one(self, sets: list[Tensors], seconds: float) -> list[float]:
        for sample in sets:
            self._run(*sample)
        self._where.wait()
        times: list[float] = []
        turns = itertools.cycle(sets)
        while sum(times) < seconds or len(times) < 5:
            sample = next(turns)
            start = time.perf_counter()
            self._run(*sample)
            self._where.wait()
            times.append(time.perf_counter() - start)
        return times

    @torch.no_grad()
    def queued(self, calls: int = 30) -> dict[str, float]:
        """Seconds per call when calls are not waited for one by one, at each shape."""
        found = {}
        for key, sets in self._sets.items():
            self._where.wait()
            start = time.perf_counter()
            for k in range(calls):
                self._run(*sets[k % SETS])
            self._where.wait()
            found[key] = (time.perf_counter() - start) / calls
        return found

    @torch.no_grad()
    def work(self) -> dict[str, dict[str, float] | None]:
        """What a call asks of the device, at each shape."""
        found = {}
        for key, sets in self._sets.items():
            made = traced(lambda k, s=sets: self._run(*s[k % SETS]), self._where, CALLS)
            found[key] = None if made is None else asdict(made)
        return found

    @torch.no_grad()
    def breakdown(self) -> dict[str, dict[str, tuple[float, float]]]:
        """The kernels of a call, at each shape: how often, and microseconds in all."""
        found = {}
        for key, sets in self._sets.items():
            events = recorded(lambda k, s=sets: self._run(*s[k % SETS]), self._where, CALLS)
            found[key] = by_kernel(events, CALLS)
        return found

    def memory(self) -> float:
        """MiB that torch's allocator took of the device, at most."""
        return torch.cuda.max_memory_reserved() / 2**20 if self._where.is_cuda else 0.0

    @torch.no_grad()
    def stream(self, count: int, seed: int) -> dict[str, Any]:
        """Compile from one sample, then answer ``count`` random shapes once each; then all once more."""
        rng = random.Random(seed)
        inputs = [self._model.random_inputs(rng) for _ in range(count)]
        first = self._model.inputs(self._model.fixed[0], 0)
        checked = {0: inputs[0], count // 2: inputs[count // 2], count - 1: inputs[-1]}
        ideal = exact(self._module)
        want = {k: ideal(*sample) for k, sample in checked.items()}
        own = max(distance(self._module(*s), want[k]) for k, s in checked.items())
        del ideal
        self._where.wait()
        start = time.perf_counter()
        run = self._prepare(self._model, [first])
        self._where.wait()
        compiled = time.perf_counter() - start
        times, worst = [], 0.0
        for k, sample in enumerate(inputs):
            before = time.perf_counter()
            got = run(*sample)
            self._where.wait()
            times.append(time.perf_counter() - before)
            if k in want:
                worst = max(worst, distance(got, want[k]))
        again = time.perf_counter()
        for sample in inputs:
            run(*sample)
            self._where.wait()
        again = time.perf_counter() - again
        return {
            "compile_s": compiled,
            "total_s": compiled + sum(times),
            "slowest_s": max(times),
            "again_s": again,
            "error": worst,
            "wrong": "" if worst <= 2 * own + 1e-6 else f"error {worst:.1e}, eager {own:.1e}",
            "served": served(run),
        }
