# SPDX-License-Identifier: Apache-2.0
"""torch.compile backends side by side: inductor, disc and aot_disc, and eager, in turns.

    python benchmarks/bench_compile.py train --tasks bert_small,unet_small --batches 1,8
    python benchmarks/bench_compile.py train --tasks bert_small --compiled-optimizer
    python benchmarks/bench_compile.py infer --models minilm,resnet50 --random 50

Each peer lives in a process of its own and sleeps while another is timed. "train" counts whole steps (forward,
backward, AdamW; the step of AdamW is eager unless ``--compiled-optimizer``: then each peer compiles its own), and of
these the milliseconds of the optimizer; "infer" calls under no_grad. Compiling is the time until the first step or
call has ended, with empty caches, "optimizer_s" the part of it in the optimizer. The stream of random shapes starts
from nothing as well; its recompilations are counted.
"""

import argparse
import contextlib
import json
import multiprocessing as mp
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from models import MODELS
from rich.console import Console
from rich.table import Table
from training import TASKS
from zoo.compare import error

import blade

PAUSE_S = 0.25  # pools of threads spin this long, at most, after their last work
Step = Callable[[], float]


def main() -> None:
    args = _arguments()
    console = Console(width=140)
    for subject in args.subjects:
        for batch in args.batches if args.what == "train" else [None]:
            results = measure(args, subject, batch)
            console.print(table(args, subject, batch, results))
            if args.json:
                with args.json.open("a") as out:
                    out.write(json.dumps(_line(args, subject, batch, results)) + "\n")


def measure(args: argparse.Namespace, subject: str, batch: int | None) -> dict[str, dict[str, Any]]:
    """Per peer: compile_s, ms per shape or step, and what it answered."""
    results: dict[str, dict[str, Any]] = {}
    alive: dict[str, tuple[Any, Any]] = {}
    context = mp.get_context("spawn")
    for peer in args.peers:
        here, there = context.Pipe()
        process = context.Process(
            target=_serve, args=(there, args, subject, batch, peer), daemon=True
        )
        process.start()
        there.close()
        here.send("prepare")
        try:
            results[peer] = here.recv()
            alive[peer] = (here, process)
        except (EOFError, ConnectionResetError):
            results[peer] = {"failed": "its process died"}
    for turn in range(args.rounds):
        names = list(alive)
        start = turn % max(1, len(names))
        for peer in names[start:] + names[:start]:
            time.sleep(PAUSE_S)
            alive[peer][0].send("time")
            for key, ms in alive[peer][0].recv().items():
                results[peer].setdefault("ms", {}).setdefault(key, []).extend(ms)
    for here, process in alive.values():
        here.close()
        process.join(10)
        process.terminate()
    return results


def table(
    args: argparse.Namespace, subject: str, batch: int | None, results: dict[str, dict[str, Any]]
) -> Table:
    size = "" if batch is None else f", batch {batch}"
    made = Table(title=f"{args.what} {subject}{size}: median ms")
    made.add_column("")
    for peer in results:
        made.add_column(peer, justify="right")
    keys = dict.fromkeys(key for one in results.values() for key in one.get("ms", ()))
    for key in keys:
        cells = [one.get("ms", {}).get(key) for one in results.values()]
        made.add_row(key, *("-" if c is None else f"{statistics.median(c):.2f}" for c in cells))
    for key in (
        "compile_s",
        "optimizer_s",
        "error",
        "stream_s",
        "slowest_s",
        "recompiled",
        "failed",
    ):
        if any(key in one for one in results.values()):
            cells = [one.get(key, "-") for one in results.values()]
            made.add_row(key, *(f"{c:.3g}" if isinstance(c, float) else str(c) for c in cells))
    return made


def _serve(
    pipe: Connection, args: argparse.Namespace, subject: str, batch: int | None, peer: str
) -> None:
    """A peer's process; answers "prepare" once, then "time" until the pipe is closed."""
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    warnings.filterwarnings("ignore")
    cache = tempfile.mkdtemp(prefix="bench")
    os.environ.update(BLADE_CACHE_DIR=cache, TORCHINDUCTOR_CACHE_DIR=cache)
    torch.set_num_threads(args.threads)
    torch._dynamo.config.allow_rnn = True
    made: Any
    if args.what == "train":
        made = _Training(subject, batch or 1, peer, args.compiled_optimizer)
    else:
        made = _Inference(subject, peer, args.random, args.dynamic)
    with contextlib.suppress(EOFError):
        while True:
            pipe.send(getattr(made, pipe.recv())())


def _compiled(model: Any, peer: str, dynamic: bool | None) -> Any:
    if peer == "eager":
        return model
    backend = getattr(blade.dynamo, peer) if peer in ("disc", "aot_disc") else peer
    return torch.compile(model, backend=backend, dynamic=dynamic)


class _Training:
    """Steps on one batch; the losses of the first ones are compared with eager's by whoever reads them."""

    def __init__(self, task: str, batch: int, peer: str, compiled_optimizer: bool) -> None:
        torch.manual_seed(0)
        made = TASKS[task]()
        self._run = _compiled(made.model, peer, None)
        self._batch = made.batch(batch, torch.Generator().manual_seed(1))
        self._optimizer = torch.optim.AdamW(made.model.parameters(), lr=1e-4)
        own = self._optimizer.step
        self._update = _compiled(own, peer, None) if compiled_optimizer else own
        self._updating: list[float] = []  # seconds of each update

    def _step(self) -> float:
        loss = self._run(**self._batch)
        self._optimizer.zero_grad()
        loss.backward()
        start = time.perf_counter()
        self._update()
        self._updating.append(time.perf_counter() - start)
        return float(loss.detach())

    def prepare(self) -> dict[str, Any]:
        torch.manual_seed(2)
        start = time.perf_counter()
        losses = [self._step()]
        seconds = time.perf_counter() - start
        losses += [self._step() for _ in range(4)]
        return {"compile_s": seconds, "optimizer_s": self._updating[0], "losses": losses}

    def time(self) -> dict[str, list[float]]:
        self._updating.clear()
        steps = _times(self._step, 0.5)
        return {"step": steps, "optimizer": [1e3 * s for s in self._updating[1:]]}


class _Inference:
    """Calls at the model's own shapes, and a stream of random ones."""

    def __init__(self, name: str, peer: str, count: int, dynamic: bool | None) -> None:
        self._model = MODELS[name]()
        self._peer, self._count, self._dynamic = peer, count, dynamic
        self._samples = {str(s): self._model.inputs(s, 1) for s in self._model.fixed}

    def prepare(self) -> dict[str, Any]:
        with torch.no_grad():
            found = self._stream() if self._count else {}
            torch._dynamo.reset()
            self._run = _compiled(self._model.module, self._peer, self._dynamic)
            worst, start = 0.0, time.perf_counter()
            for sample in self._samples.values():
                self._run(*sample)
            seconds = time.perf_counter() - start
            for sample in self._samples.values():
                worst = max(worst, error(self._run(*sample), self._model.module(*sample)))
        return {"compile_s": seconds, "error": worst, **found}

    def _stream(self) -> dict[str, Any]:
        rng = random.Random(0)
        inputs = [self._model.random_inputs(rng) for _ in range(self._count)]
        torch._dynamo.utils.counters.clear()
        run = _compiled(self._model.module, self._peer, self._dynamic)
        slowest, begin = 0.0, time.perf_counter()
        for sample in inputs:
            start = time.perf_counter()
            run(*sample)
            slowest = max(slowest, time.perf_counter() - start)
        graphs = torch._dynamo.utils.counters["stats"].get("unique_graphs", 0)
        return {
            "stream_s": time.perf_counter() - begin,
            "slowest_s": slowest,
            "recompiled": max(0, graphs - 1),
        }

    def time(self) -> dict[str, list[float]]:
        with torch.no_grad():
            return {
                key: _times(lambda s=sample: self._run(*s), 0.2)  # type: ignore[misc]
                for key, sample in self._samples.items()
            }


def _times(call: Callable[[], Any], seconds: float) -> list[float]:
    call()
    found: list[float] = []
    while sum(found) < seconds * 1e3 or len(found) < 3:
        start = time.perf_counter()
        call()
        found.append((time.perf_counter() - start) * 1e3)
    return found


def _line(
    args: argparse.Namespace, subject: str, batch: int | None, results: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    return {
        "bench": f"compile {args.what}",
        "subject": subject,
        "batch": batch,
        "threads": args.threads,
        "torch": torch.__version__,
        "compiled_optimizer": args.compiled_optimizer,
        "results": {
            peer: {k: v for k, v in one.items() if k != "ms"}
            | {"ms": {k: statistics.median(v) for k, v in one.get("ms", {}).items()}}
            for peer, one in results.items()
        },
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=["train", "infer"])
    parser.add_argument("--tasks", default="bert_small,unet_small")
    parser.add_argument("--models", default="minilm,resnet50")
    parser.add_argument("--peers", help="default: eager,inductor, and disc or aot_disc")
    parser.add_argument("--batches", type=lambda s: list(map(int, s.split(","))), default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--random", type=int, default=0, metavar="N")
    parser.add_argument("--dynamic", action="store_true", default=None)
    parser.add_argument("--compiled-optimizer", action="store_true", help="of each peer's own")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    own = "aot_disc" if args.what == "train" else "disc"
    args.peers = (args.peers or f"eager,inductor,{own}").split(",")
    args.subjects = (args.tasks if args.what == "train" else args.models).split(",")
    return args


if __name__ == "__main__":
    main()
