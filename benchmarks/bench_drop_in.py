# SPDX-License-Identifier: Apache-2.0
"""Whole programs before and after a line such as ``pipe.model = blade.accelerate(pipe.model)``, and torch.compile.

    python benchmarks/bench_drop_in.py                                  # all programs, all ways: a table in Markdown
    python benchmarks/bench_drop_in.py fill-mask DiTPipeline --first 20 --rounds 5

Each way has a process of its own, and one of them is active at a time. It makes the program's first calls from the
start, compilation included, with empty caches; drop-ins optimize in the background meanwhile. Then the ways make call
after call in turns (median). torch.compile compiles the same module's ``forward``, with ``dynamic=True``. Outputs are
compared with eager's: *equal*, or the largest difference as a part of the largest value.
"""

import argparse
import io
import multiprocessing as mp
import os
import statistics
import sys
import tempfile
import time
import warnings
from multiprocessing.connection import Connection
from typing import Any

import torch
from drop_in.program import SMALL, TINY, Different, difference
from drop_in.table import PROGRAMS

import blade

WAYS = ("eager", "blade", "torch.compile")
SCALES = {"small": SMALL, "tiny": TINY}
ANSWER_S = 1200.0  # s; what takes longer is ended


class Way:
    """A program in a process of its own."""

    def __init__(self, name: str, way: str, scale: str, threads: int) -> None:
        context = mp.get_context("spawn")
        self._pipe, child = context.Pipe()
        args = (child, name, way, scale, threads)
        self._process = context.Process(target=_serve, args=args, daemon=True)
        self._process.start()
        child.close()

    def ask(self, what: str, number: int = 0) -> Any:
        """The answer; raises ``RuntimeError`` where the process failed, ended or took too long."""
        try:
            self._pipe.send((what, number))
            if not self._pipe.poll(ANSWER_S):
                raise RuntimeError(f"no answer in {ANSWER_S:.0f} s")
            answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise RuntimeError("the process ended") from error
        if isinstance(answer, Exception):
            raise RuntimeError(f"{type(answer).__name__}: {answer}")
        return answer

    def end(self) -> None:
        self._process.kill()
        self._process.join()


def _serve(pipe: Connection, name: str, way: str, scale: str, threads: int) -> None:
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")
    sys.stdout = sys.stderr = io.StringIO()
    with tempfile.TemporaryDirectory() as caches:
        os.environ["BLADE_CACHE_DIR"] = os.path.join(caches, "blade")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(caches, "inductor")
        torch.manual_seed(0)
        program = PROGRAMS[name].make(SCALES[scale])
        modules: list[Any] = []
        while True:
            what, number = pipe.recv()
            try:
                start = time.perf_counter()
                output: Any = None
                if what == "first":
                    modules = _changed(program, way)
                    for k in range(number):
                        program.run(k)
                elif what == "wait":
                    output = [_ready(module) for module in modules if way == "blade"]
                else:
                    output = program.run(number)
                pipe.send((time.perf_counter() - start, output))
            except Exception as error:
                pipe.send(RuntimeError(f"{type(error).__name__}: {str(error)[:300]}"))


def _changed(program: Any, way: str) -> list[Any]:
    if way == "blade":
        return program.change(blade.accelerate)  # type: ignore[no-any-return]
    if way == "torch.compile":
        return program.change(_compiled)  # type: ignore[no-any-return]
    return []


def _compiled(module: Any) -> Any:
    module.forward = torch.compile(module.forward, dynamic=True)
    return module


def _ready(module: Any) -> dict[str, Any]:
    blade.wait(module)
    return {**blade.stats(module), "reasons": [str(r) for r in blade.report(module).reasons[:5]]}


def _measure(name: str, given: argparse.Namespace) -> str:
    ways = given.ways.split(",")
    first: dict[str, float] = {}
    failed: dict[str, str] = {}
    running: dict[str, Way] = {}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    errors = dict.fromkeys(ways, 0.0)
    left = 0
    try:
        for way in ways:
            running[way] = Way(name, way, given.scale, given.threads)
            try:
                first[way], _ = running[way].ask("first", given.first)
                _, counts = running[way].ask("wait")
                left += sum(one["original"]["calls"] for one in counts)
                if given.verbose:
                    print(f"# {name}, {way}: first {first[way]:.1f} s {counts}", file=sys.stderr)
            except RuntimeError as error:
                failed[way] = str(error)
                running.pop(way).end()
        for k in range(given.rounds):
            outputs = {}
            for way in (*list(running)[k % len(running) :], *list(running)[: k % len(running)]):
                took, outputs[way] = running[way].ask("run", k)
                seconds[way].append(took)
            for way, output in outputs.items():
                try:
                    errors[way] = max(errors[way], difference(output, outputs["eager"]))
                except Different as error:
                    failed[way] = f"other output: {error}"
        _, counts = running["blade"].ask("wait") if "blade" in running else (0.0, [])
        left = sum(one["original"]["calls"] for one in counts) - left
    finally:
        for one in running.values():
            one.end()
    return _row(name, ways, seconds, first, errors, failed, left)


def _row(
    name: str,
    ways: list[str],
    seconds: dict[str, list[float]],
    first: dict[str, float],
    errors: dict[str, float],
    failed: dict[str, str],
    left: int,
) -> str:
    def error(way: str) -> str:
        return failed.get(way, "equal" if errors[way] == 0 else f"{errors[way]:.0e}")

    def middle(way: str) -> str:
        return f"{statistics.median(seconds[way]) * 1e3:.1f}" if seconds[way] else "-"

    cells = [name, "1", *(error(way) for way in ways if way != "eager"), str(left)]
    cells += [middle(way) for way in ways]
    cells += [f"{first[way]:.1f}" if way in first else "-" for way in ways]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("programs", nargs="*", default=list(PROGRAMS))
    parser.add_argument("--rounds", type=int, default=15, help="calls of each way in turns")
    parser.add_argument("--first", type=int, default=100, help="calls from the start")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of each way")
    parser.add_argument("--scale", choices=SCALES, default="small")
    parser.add_argument("--verbose", action="store_true", help="counters of drop-ins, on stderr")
    given = parser.parse_args()
    ways = given.ways.split(",")
    titles = ["program", "lines changed", *(f"{w}: outputs" for w in ways if w != "eager")]
    titles += ["calls left to the model", *(f"{way}, ms" for way in ways)]
    titles += [f"first {given.first}, s: {way}" for way in ways]
    print("| " + " | ".join(titles) + " |\n|" + "---|" * len(titles), flush=True)
    for name in given.programs:
        print(_measure(name, given), flush=True)


if __name__ == "__main__":
    main()
