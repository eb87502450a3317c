# SPDX-License-Identifier: Apache-2.0
"""One peer on one model, in a process of its own: compile, check, time.

    cell = Inference("bert", "inductor", Where("cpu", "float32"), Bounds(threads=1))
    cell.hello()                    # imports and the model are done
    cell.prepare()                  # compiled, checked: compile_s, errors, coverage
    cell.time(0.2)                  # seconds of single calls, by the clock and of the process, per shape
    cell.memory()

Compiling is everything up to and including the first call at each shape. Values are compared with the same weights
in float64 (with eager where float64 cannot run), at inputs of another seed, too.
"""

import copy
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu.device import Where, distance, exact, placed
from zoo.compare import error
from zoo.model import Model, Shape, Tensors, label

from suite import libraries
from suite.entry import Size
from suite.memory import Watch
from suite.peers import INFERENCE, TRAINING, Peer
from suite.registry import ENTRIES
from suite.served import coverage, trained_coverage

WARM = 4  # graphs are captured at a second or third call
SEEDS = (1, 2)
FEW = 64  # numbers of a model's outputs, whose error is chance: those of more inputs count together
MOST_SEEDS = 16
EXACT = 1e-4  # of the largest value: what float32 may differ, as in bench_models.py
GRADIENT = {"float32": 1e-3, "bfloat16": 5e-2}  # of the norm: what gradients of a step may differ


@dataclass(frozen=True)
class Bounds:
    """``memory_mb``: the most that the process and its children may hold; more ends it."""

    threads: int = 1
    memory_mb: int = 4000
    packages: Path | None = None


class Wrong(Exception):
    """The peer's values are not the model's."""


class Cell:
    """What both kinds of cells share: the model at its place."""

    def __init__(self, model: str, peer: str, where: Where, bounds: Bounds) -> None:
        torch.set_num_threads(bounds.threads)
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(bounds.threads)
        libraries.look_in(bounds.packages)
        self._bounds, self._where, self._name = bounds, where, peer
        self._size: Size = "large" if where.is_cuda else "small"
        self._watch, self._first_mb = Watch(bounds.memory_mb), 0.0
        self._model: Model = placed(ENTRIES[model].build(self._size), where)
        self._shapes: Sequence[Shape] = self._model.fixed

    def hello(self) -> list[str]:
        """The shapes."""
        self._where.wait()
        return [label(shape) for shape in self._shapes]

    def _begin(self) -> None:
        """From here on memory counts."""
        self._watch.begin()
        self._forget()

    def _forget(self) -> float:
        """MiB of the device taken at most so far; from now on that counts anew."""
        if not self._where.is_cuda:
            return 0.0
        torch.cuda.synchronize()
        most = torch.cuda.max_memory_reserved() / 2**20
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return most

    def memory(self) -> dict[str, float]:
        """MiB: the most while compiling and since, without what was there before.

        On a GPU also what torch's allocator reserved at most: while compiling and checking, and since.
        """
        found = {"peak_mb": self._watch.peak_mb(), "before_mb": self._watch.before_mb}
        if self._where.is_cuda:
            found["device_mb"] = torch.cuda.max_memory_reserved() / 2**20
            found["device_first_mb"] = self._first_mb
        return found

    def _timed(self, call: Callable[[], Any], seconds: float) -> dict[str, list[float]]:
        """Seconds of single calls, each waited for: by the clock, and of this process's cores."""
        call()
        self._where.wait()
        wall: list[float] = []
        busy: list[float] = []
        while sum(wall) < seconds or len(wall) < 3:
            start, own = time.perf_counter(), time.process_time()
            call()
            self._where.wait()
            wall.append(time.perf_counter() - start)
            busy.append(time.process_time() - own)
        if self._where.is_cuda:
            torch.cuda.empty_cache()  # for the other cells
        return {"wall": wall, "cpu": busy}


class Inference(Cell):
    def __init__(self, model: str, peer: str, where: Where, bounds: Bounds) -> None:
        super().__init__(model, peer, where, bounds)
        self._peer: Peer = INFERENCE[where.device][peer]
        self._samples = {
            label(s): [self._model.inputs(s, seed) for seed in SEEDS] for s in self._shapes
        }

    @torch.no_grad()
    def prepare(self) -> dict[str, Any]:
        want, own = self._expected()
        self._begin()
        start = time.perf_counter()
        given = [sets[0] for sets in self._samples.values()]
        self._run = self._peer.prepare(self._model, given, self._bounds.threads)
        firsts = {key: self._run(*sets[0]) for key, sets in self._samples.items()}
        self._where.wait()
        seconds = time.perf_counter() - start
        del firsts
        errors = {key: self._off(key, want[key]) for key in self._samples}
        wrong = {
            k: f"{e:.1e} (eager: {own[k]:.1e})"
            for k, e in errors.items()
            if not self._fits(e, own[k])
        }
        found = {"compile_s": round(seconds, 3), "errors": errors, "eager_errors": own}
        want.clear()
        self._first_mb = self._forget()
        return {**found, "wrong": str(wrong) if wrong else "", **coverage(self._run)}

    def _expected(self) -> tuple[dict[str, list[Tensors]], dict[str, float]]:
        """What is right, per shape and seed, and how far eager is from it."""
        self._add_samples()
        want = self._most_exact()
        own = {key: self._farthest(self._model.module, key, want[key]) for key in want}
        return want, own

    def _most_exact(self) -> dict[str, list[Tensors]]:
        """In float64; where that is not for this model, as for grouped products, in float32, or by eager itself."""
        for dtype in (torch.float64, torch.float32):
            try:
                return self._answers(exact(self._model.module, dtype))
            except (RuntimeError, TypeError, ValueError):
                continue
        return self._answers(self._model.module)

    def _add_samples(self) -> None:
        """More inputs where a model returns few numbers: two logits are right or far off by chance."""
        for shape, sets in zip(self._shapes, self._samples.values(), strict=True):
            count = sum(t.numel() for t in self._model.module(*sets[0]) if t.is_floating_point())
            most = min(MOST_SEEDS, -(-FEW // max(count, 1)))
            sets += [self._model.inputs(shape, seed) for seed in range(len(SEEDS) + 1, most + 1)]

    def _answers(self, run: Callable[..., Tensors]) -> dict[str, list[Tensors]]:
        return {key: [run(*one) for one in sets] for key, sets in self._samples.items()}

    def _farthest(self, run: Callable[..., Any], key: str, want: list[Tensors]) -> float:
        """The largest error at the inputs of ``key``; that of all together where outputs are few."""
        sets = self._samples[key]
        if len(sets) == len(SEEDS):
            return max(self._distance(run(*one), w) for one, w in zip(sets, want, strict=True))
        # a later call may overwrite an earlier one's results
        got = [tuple(t.clone() for t in run(*one)) for one in sets]
        if any(
            [t.shape for t in g] != [t.shape for t in w] for g, w in zip(got, want, strict=True)
        ):
            return float("inf")
        together = (tuple(map(torch.stack, zip(*many))) for many in (got, want))
        return self._distance(*together)

    def _distance(self, got: Any, want: Tensors) -> float:
        return distance(got, want) if self._where.is_cuda else error(tuple(got), want)

    def _fits(self, found: float, own: float) -> bool:
        """On a GPU twice as far as eager, as in bench_gpu.py; on a CPU as in bench_models.py."""
        if self._where.is_cuda:
            return found <= 2 * own + (1e-6 if self._where.dtype != "float32" else EXACT)
        return found <= max(self._peer.max_error, 2 * own)

    def _off(self, key: str, want: list[Tensors]) -> float:
        rounds = WARM if self._where.is_cuda else 1
        return max(self._farthest(self._run, key, want) for _ in range(rounds))

    @torch.no_grad()
    def time(self, seconds: float) -> dict[str, dict[str, list[float]]]:
        return {
            key: self._timed(lambda one=sets[0]: self._run(*one), seconds)
            for key, sets in self._samples.items()
        }


class Training(Cell):
    """Whole steps: forward, backward, AdamW. The loss is the outputs' mean square.

    On a GPU forward is under autocast, unless the model is one for float32.
    No dropout, so that peers can be compared: a step's gradients with eager's in float32, those of float32 with
    float64's.
    """

    def __init__(self, model: str, peer: str, where: Where, bounds: Bounds) -> None:
        super().__init__(model, peer, Where(where.device, "float32"), bounds)
        narrow = where.is_cuda and where.dtype != "float32"
        self._dtype = torch.bfloat16 if narrow else torch.float32
        self._shapes = _trained(self._model, self._size)
        self._module = _without_dropout(self._model.module).train()
        self._samples = {label(s): self._model.inputs(s, 1) for s in self._shapes}

    def prepare(self) -> dict[str, Any]:
        weights = self._module.state_dict()
        for name, value in weights.items():
            weights[name] = (
                value.cpu().clone()
            )  # in place: versions of modules lie beside the values
        want = {key: self._reference(key) for key in self._samples}
        own, _ = self._compared(self._module, want, weights)
        self._module.load_state_dict(weights)
        self._optimizer = torch.optim.AdamW(
            [p for p in self._module.parameters() if p.requires_grad], lr=1e-5, fused=True
        )
        self._begin()
        self._run = TRAINING[self._name](self._module)
        errors, seconds = self._compared(self._run, want, weights)
        limit = GRADIENT[str(self._dtype).removeprefix("torch.")]
        wrong = {
            k: f"{e:.1e} (eager: {own[k]:.1e})"
            for k, e in errors.items()
            if not e <= max(limit, 2 * own[k])
        }
        want.clear()
        self._first_mb = self._forget()
        found = {"compile_s": round(seconds, 3), "errors": errors, "eager_errors": own}
        return {**found, "wrong": str(wrong) if wrong else "", **trained_coverage(self._name)}

    def _compared(
        self, run: Any, want: dict[str, list[torch.Tensor]], weights: dict[str, torch.Tensor]
    ) -> tuple[dict[str, float], float]:
        """How far the gradients of ``run`` are from ``want``, per shape; and the seconds of its steps."""
        seconds, errors = 0.0, {}
        for key in self._samples:
            self._module.load_state_dict(weights)
            self._where.wait()
            start = time.perf_counter()
            got = self._gradients(run, key, self._dtype)
            self._where.wait()
            seconds += time.perf_counter() - start
            errors[key] = _apart(got, want[key])
        return errors, seconds

    def _reference(self, key: str) -> list[torch.Tensor]:
        """Eager mode's gradients: in float64 if a step is in float32 and the model allows it, else in float32."""
        if self._dtype == torch.float32:
            wide = copy.deepcopy(self._module).double()
            samples = [t.double() if t.is_floating_point() else t for t in self._samples[key]]
            with suppress(RuntimeError, TypeError, ValueError):  # float32 in the model's own code
                _loss(wide(*samples)).backward()
                return [
                    torch.zeros_like(p) if p.grad is None else p.grad for p in wide.parameters()
                ]
        return self._gradients(self._module, key, torch.float32)

    def _gradients(self, run: Any, key: str, dtype: torch.dtype) -> list[torch.Tensor]:
        self._module.zero_grad(set_to_none=True)
        self._backward(run, key, dtype)
        return [
            torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
            for p in self._module.parameters()
        ]

    def _backward(self, run: Any, key: str, dtype: torch.dtype) -> None:
        if "reduce" in self._name or "max" in self._name:
            torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(self._where.device, dtype, enabled=dtype != torch.float32):
            outputs = run(*self._samples[key])
        _loss(outputs).backward()

    def _step(self, key: str) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        self._backward(self._run, key, self._dtype)
        self._optimizer.step()

    def time(self, seconds: float) -> dict[str, dict[str, list[float]]]:
        return {key: self._timed(lambda one=key: self._step(one), seconds) for key in self._samples}


def _loss(outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of the outputs' mean squares, in float32 at least."""
    wide = (
        o.to(torch.promote_types(o.dtype, torch.float32)) for o in outputs if o.is_floating_point()
    )
    return torch.stack([o.square().mean() for o in wide]).sum()


def _trained(model: Model, size: Size) -> Sequence[Shape]:
    """A small batch, and on a GPU a large one, too; other axes as they are at the largest shape."""
    last = model.fixed[-1]
    if model.axes[0].name != "batch":
        return (last,)
    few, many = (max(2, min(4, last[0])), *last[1:]), last
    return (few,) if size == "small" or few == many else (few, many)


def _without_dropout(module: torch.nn.Module) -> torch.nn.Module:
    """Every rate, of the modules and of the configurations they look at, becomes 0."""
    for one in module.modules():
        kind = type(one).__name__.lower()
        for holder in (one, getattr(one, "config", None)):
            for name, value in list(vars(holder).items()) if hasattr(holder, "__dict__") else ():
                is_rate = name == "p" and ("drop" in kind or "depth" in kind)
                if isinstance(value, float) and (is_rate or "drop" in name):
                    setattr(holder, name, 0.0)
    return module


def _apart(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> float:
    """Of all gradients as one vector, relative."""
    if [g.shape for g in got] != [w.shape for w in want]:
        return float("inf")
    off = sum(float((g.double() - w.double()).norm()) ** 2 for g, w in zip(got, want))
    whole = sum(float(w.double().norm()) ** 2 for w in want)
    found = float((off / max(whole, 1e-60)) ** 0.5)
    return found if found == found else float("inf")


KINDS = {"inference": Inference, "training": Training}
