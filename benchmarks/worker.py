# SPDX-License-Identifier: Apache-2.0
"""One peer in one process, driven over a pipe; between commands it sleeps and nothing of it runs.

Peers bring thread pools that spin after their work and fight over the cores when they share a process,
so each lives alone, and the parent lets one at a time run.

    worker = Worker("minilm", "openvino", threads=2, shapes=[(1, 16), (8, 64)])
    worker.ask("prepare")                   # {"compile_s": 4.1, "errors": {"1x16": 3e-7, ...}}
    worker.ask("time", seconds=0.2)         # {"1x16": [0.0071, ...], "8x64": [...]}
    worker.ask("memory")                    # {"resident_mb": 310.2, "peak_mb": 42.1}
    worker.ask("work")                      # FLOPs and bytes per shape, of the eager model
    worker.ask("quality")                   # what it costs in accuracy, of a peer with int8
"""

import contextlib
import ctypes
import gc
import multiprocessing as mp
import os
import random
import socket
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import avx2
import torch
from embeddings import Batch, agreement, pooled, sentences, tokenized
from floor import Work, count_work
from models import MODELS
from peers import PEERS
from peers_bf16 import BF16_PEERS
from peers_int8 import INT8_PEERS
from zoo.compare import error
from zoo.model import Shape, Tensors, label

UNSEEN = (101, 102, 103)  # seeds of inputs that nobody was given before


class PeerFailed(Exception):
    """The peer raised, gave wrong values, or its process died."""


class Worker:
    """The parent's end; no ``shapes``: the model's own. ``packages``: a folder more to import from.

    ``python``: another interpreter, of a peer that needs another torch.
    """

    def __init__(
        self,
        model: str,
        peer: str,
        threads: int,
        shapes: Sequence[Shape] | None,
        packages: Path | None = None,
        python: Path | None = None,
    ) -> None:
        if python is not None:
            self._pipe, self._process = _foreign(python, (model, peer, threads, shapes, packages))
            return
        context = mp.get_context("spawn")
        self._pipe, child = context.Pipe()
        args = (child, model, peer, threads, shapes, packages)
        self._process = context.Process(target=serve, args=args, daemon=True)
        self._process.start()
        child.close()

    def ask(self, command: str, **kwargs: Any) -> Any:
        """The answer to ``command``; raises ``PeerFailed``."""
        try:
            self._pipe.send((command, kwargs))
            ok, answer = self._pipe.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise PeerFailed(f"process died, exit code {_exit_code(self._process)}") from None
        if not ok:
            raise PeerFailed(answer)
        return answer

    def close(self) -> None:
        """The closed pipe ends the process; one that hangs is stopped."""
        self._pipe.close()
        _exit_code(self._process)
        self._process.terminate()


_FOREIGN = """
import sys
from multiprocessing.connection import Connection
sys.path.insert(0, {folder!r})
from worker import serve
serve(Connection({pipe}), {model!r}, {peer!r}, {threads!r}, {shapes!r}, {packages!r})
"""


def _foreign(python: Path, args: tuple[Any, ...]) -> tuple[Connection, subprocess.Popen[bytes]]:
    """A pipe to ``serve`` in a process of another interpreter, and the process."""
    ours, theirs = socket.socketpair()
    model, peer, threads, shapes, packages = args
    text = _FOREIGN.format(
        folder=str(Path(__file__).parent),
        pipe=theirs.fileno(),
        model=model,
        peer=peer,
        threads=threads,
        shapes=shapes,
        packages=None if packages is None else str(packages),
    )
    away = {n: v for n, v in os.environ.items() if n != "PYTHONPATH"}
    command = [str(python), "-c", text]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=away)
    theirs.close()
    return Connection(ours.detach()), process


def _exit_code(process: Any) -> int | None:
    """Of a process that is about to end, waited for."""
    if isinstance(process, subprocess.Popen):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        return process.returncode
    process.join(10)
    code: int | None = process.exitcode
    return code


def serve(
    pipe: Connection,
    model: str,
    peer: str,
    threads: int,
    shapes: Sequence[Shape] | None,
    packages: Path | str | None,
) -> None:
    if packages is not None:
        sys.path.append(str(packages))  # last: what is installed goes before it
    # Exporters talk on stdout; the parent's table belongs there.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    warnings.filterwarnings("ignore")
    torch.set_num_threads(threads)
    avx2.narrow()
    served = _Served(model, peer, threads, shapes)
    with torch.inference_mode(False), torch.no_grad(), contextlib.suppress(EOFError):
        while True:
            command, kwargs = pipe.recv()
            try:
                answer = getattr(served, command)(**kwargs)
            except Exception as error:  # the peer's: the parent reports it and goes on without it
                pipe.send((False, f"{type(error).__name__}: {str(error)[:300]}"))
            else:
                pipe.send((True, answer))


class _Served:
    """The commands, in the worker process."""

    def __init__(self, model: str, peer: str, threads: int, shapes: Sequence[Shape] | None) -> None:
        self._before = _memory_mb("VmRSS")
        self._model = MODELS[model]()
        self._name, self._peer = model, {**PEERS, **INT8_PEERS, **BF16_PEERS}[peer]
        self._threads = threads
        shapes = self._model.fixed if shapes is None else shapes
        self._samples = {label(one): self._model.inputs(one, 1) for one in shapes}

    def prepare(self) -> dict[str, Any]:
        """Compile, and call each shape once, which is when some peers compile; then check values."""
        expected = {key: self._model.module(*sample) for key, sample in self._samples.items()}
        start = perf_counter()
        self._run = self._peer.prepare(self._model, list(self._samples.values()), self._threads)
        first = {key: self._run(*sample) for key, sample in self._samples.items()}
        seconds = perf_counter() - start
        for sample in self._samples.values():
            for _ in range(3):
                self._run(*sample)
        again = {key: self._run(*sample) for key, sample in self._samples.items()}
        errors = {
            key: max(error(first[key], want), error(again[key], want))
            for key, want in expected.items()
        }
        if max(errors.values()) > self._peer.max_error:
            raise PeerFailed(f"wrong values: {errors}")
        return {"compile_s": seconds, "errors": errors}

    def time(self, seconds: float) -> dict[str, list[float]]:
        """Seconds of single calls at each shape, for about ``seconds`` per shape, warmed up first."""
        return {key: self._time_one(sample, seconds) for key, sample in self._samples.items()}

    def processor_time(self, seconds: float) -> dict[str, list[float]]:
        """``time`` in seconds of the processor, which a busy neighbour does not lengthen: for one thread."""
        clock = process_time
        return {
            key: self._time_one(sample, seconds, clock) for key, sample in self._samples.items()
        }

    def _time_one(
        self, sample: Tensors, seconds: float, clock: Callable[[], float] = perf_counter
    ) -> list[float]:
        for _ in range(2):
            self._run(*sample)
        times: list[float] = []
        while sum(times) < seconds or len(times) < 3:
            start = clock()
            self._run(*sample)
            times.append(clock() - start)
        return times

    def stream(self, count: int, seed: int) -> dict[str, float]:
        """Compile from one sample, then answer ``count`` random shapes once each."""
        rng = random.Random(seed)
        inputs = [self._model.random_inputs(rng) for _ in range(count)]
        first = self._model.inputs(self._model.fixed[0], 0)
        start = perf_counter()
        run = self._peer.prepare(self._model, [first], self._threads)
        compiled = perf_counter()
        slowest, worst = 0.0, 0.0
        for sample in inputs:
            before = perf_counter()
            got = run(*sample)
            slowest = max(slowest, perf_counter() - before)
            if sample is inputs[0] or sample is inputs[-1]:
                worst = max(worst, error(got, self._model.module(*sample)))
        total = perf_counter() - start
        if worst > self._peer.max_error:
            raise PeerFailed(f"wrong values in the stream: {worst:.1e}")
        return {"compile_s": compiled - start, "total_s": total, "slowest_call_s": slowest}

    def work(self) -> dict[str, Work]:
        """What one call has to do, per shape."""
        module = self._model.module
        return {key: count_work(module, sample) for key, sample in self._samples.items()}

    def quality(self) -> dict[str, Any]:
        """How far the first output is from eager's at other inputs, and of MiniLM sentences' embeddings.

        Of blade's own modules also how many layers are in int8, and how.
        """
        found = {"relative": max(self._relative(seed) for seed in UNSEEN)}
        if self._name == "minilm":
            batches = tokenized(sentences())
            found |= agreement(self._embedded(self._run, batches), self._embedded(None, batches))
        if "blade" in self._peer.packages:
            import blade

            every = [p.precision for c in blade.report(self._run).clusters for p in c.precision]
            kinds = Counter(every)
            return {**found, "layers": ", ".join(f"{n} {kind}" for kind, n in kinds.items())}
        return found

    def _relative(self, seed: int) -> float:
        inputs = self._model.inputs(self._model.fixed[-1], seed)
        got, want = self._run(*inputs)[0].double(), self._model.module(*inputs)[0].double()
        return float((got - want).norm() / want.norm())

    def _embedded(self, run: Any, batches: Sequence[Batch]) -> torch.Tensor:
        """By ``run``, or by the model itself."""
        made = []
        for batch in batches:
            ids, mask = batch["input_ids"], batch["attention_mask"]
            states = (run or self._model.module)(ids, mask, torch.zeros_like(ids))[0]
            made.append(pooled(torch.as_tensor(states), mask))
        return torch.cat(made)

    def memory(self) -> dict[str, float]:
        """MiB that compiling and the weights left in this process, and what calls need on top of it.

        Ends the process's use: the eager model is dropped, which only its own peer keeps.
        """
        run, samples = self._run, list(self._samples.values())
        started = self._before
        self.__dict__.clear()
        _settle()
        resident = _memory_mb("VmRSS")
        for sample in samples:
            run(*sample)
        return {"resident_mb": resident - started, "peak_mb": _memory_mb("VmHWM") - resident}


def _memory_mb(field: str) -> float:
    """VmRSS (now) or VmHWM (the most so far) of this process, MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field + ":"))


def _settle() -> None:
    """Give back what is free, and forget the most so far."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
