# SPDX-License-Identifier: Apache-2.0
"""Whole models against other engines, side by side: rounds interleaved, medians, values checked.

    python benchmarks/bench_models.py --models minilm --peers eager,inductor,onnxruntime
    python benchmarks/bench_models.py --models bert --shapes 1x16,8x64 --rounds 5 --json out.jsonl
    python benchmarks/bench_models.py --random 200          # also a stream of random shapes
    python benchmarks/bench_models.py --peers blade_auto,blade_onnxruntime,blade_openvino

Shapes have a size per axis of the model, batch first; each model has its own. "blade", which is DISC
alone, is always among the peers; blade_NAME is another of its backends alone, blade_auto their choice
by measurement. The ratio is blade's median over that of the fastest other peer at that shape: below
1, blade is faster. The floor is explained in floor.py. Memory is what the peer's process holds after
compiling, its eager model dropped, and the most that calls take on top of it.
"""

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import multiprocessing as mp
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import avx2
import torch
from floor import Machine, Work, floor_s, measure_machine
from models import MODELS
from peers import PEERS
from peers_bf16 import BF16_PEERS
from peers_int8 import INT8_PEERS
from rich.console import Console
from rich.table import Table
from worker import PeerFailed, Worker
from zoo.model import Shape

# OpenMP and other pools spin this long, at most, after their last work.
PAUSE_S = 0.25


@dataclass
class Result:
    """One peer on one model; ``times`` in seconds per shape, all rounds."""

    peer: str
    compile_s: float = 0.0
    errors: dict[str, float] = field(default_factory=dict)
    times: dict[str, list[float]] = field(default_factory=dict)
    stream: dict[str, float] = field(default_factory=dict)
    memory: dict[str, float] = field(default_factory=dict)
    quality: dict[str, Any] = field(default_factory=dict)
    failed: str = ""

    def median_ms(self, shape: str) -> float | None:
        times = self.times.get(shape)
        return statistics.median(times) * 1e3 if times else None


def main() -> None:
    args = _arguments()
    console = Console(width=140)
    if args.json:
        args.json.write_text("")
    machine = _alone(measure_machine, args.threads)
    console.print(machine.how, markup=False)
    for model in args.models:
        floors = _floors(model, args, machine)
        results = measure(model, args, console)
        console.print(times_table(model, results, floors))
        if args.random:
            console.print(stream_table(model, args.random, results))
        for result in filter(lambda r: r.failed, results):
            console.print(f"{result.peer}: {result.failed}", style="yellow", markup=False)
        if args.json:
            with args.json.open("a") as out:
                lines = json_lines(model, args, results, floors, machine)
                out.writelines(json.dumps(line) + "\n" for line in lines)


def print_models(
    args: argparse.Namespace,
    measured: Callable[[str, Console], list[Result]],
    table: Callable[[str, int, Sequence[Result]], Table],
    json_line: Callable[[str, argparse.Namespace, Sequence[Result]], dict[str, Any]],
) -> None:
    """A table for each of ``args.models``, what failed, and a line of JSON."""
    console = Console(width=200)
    if args.json:
        args.json.write_text("")
    for model in args.models.split(","):
        results = measured(model, console)
        console.print(table(model, args.threads, results))
        for result in results:
            if result.failed:
                console.print(f"{result.peer}: {result.failed}", style="yellow", markup=False)
        if args.json:
            with args.json.open("a") as out:
                out.write(json.dumps(json_line(model, args, results)) + "\n")


def _alone(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)`` in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=mp.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def _floors(model: str, args: argparse.Namespace, machine: Machine) -> dict[str, float]:
    """Seconds that each shape takes at least."""
    worker = Worker(model, "eager", args.threads, args.shapes)
    try:
        work: dict[str, Work] = worker.ask("work")
    finally:
        worker.close()
    return {shape: floor_s(one, machine) for shape, one in work.items()}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", type=_list(MODELS), default=["minilm"])
    parser.add_argument(
        "--peers", type=_list(PEERS), default=[p for p in PEERS if not p.startswith("blade_")]
    )
    parser.add_argument("--shapes", type=_shapes, help="instead of the models' own: 1x16,8x64")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=0.2, help="per peer, shape and round")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--random", type=int, default=0, metavar="N", help="stream of N random shapes"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--avx2", action="store_true", help="nothing beyond AVX2, of peers that can be told"
    )
    parser.add_argument("--json", type=Path, help="write one line per peer and shape here")
    args = parser.parse_args()
    if args.avx2:
        avx2.ask()
    return args


def _list(known: dict[str, Any]) -> Any:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"unknown: {unknown}; known: {', '.join(known)}")
        return names

    return parse


def _shapes(text: str) -> list[Shape]:
    shapes = []
    for item in text.split(","):
        sizes = item.split("x")
        if not all(size.isdecimal() for size in sizes):
            raise argparse.ArgumentTypeError(f"{item!r} is not like 8x64")
        shapes.append(tuple(map(int, sizes)))
    return shapes


def measure(model: str, args: argparse.Namespace, console: Console) -> list[Result]:
    """Prepare the peers one after the other, then time them in turns, starting with another each round."""
    known = {**PEERS, **INT8_PEERS}
    wanted = list(dict.fromkeys(["blade", *args.peers]))
    results, running = [], []
    for peer in wanted:
        result = Result(peer)
        results.append(result)
        if missing := [p for p in known[peer].packages if not importlib.util.find_spec(p)]:
            result.failed = f"skipped: {', '.join(missing)} not installed"
            continue
        console.print(f"{model}: preparing {peer}", style="dim")
        if args.random:
            _ask_alone(model, result, args)
        worker = Worker(model, peer, args.threads, args.shapes)
        if prepare(worker, result):
            running.append((worker, result))
    time_in_turns(running, args.rounds, args.seconds)
    for worker, result in running:
        if not result.failed:
            result.memory = worker.ask("memory")
        worker.close()
    return results


def prepare(worker: Worker, result: Result) -> bool:
    """Whether the peer is ready to be timed; one that fails is closed."""
    try:
        answer = worker.ask("prepare")
    except PeerFailed as error:
        result.failed = str(error)
        worker.close()
        return False
    result.compile_s, result.errors = answer["compile_s"], answer["errors"]
    return True


def time_in_turns(
    running: Sequence[tuple[Worker, Result]], rounds: int, seconds: float, command: str = "time"
) -> None:
    """Rounds of all peers, each of which starts with another one. ``command`` asks for times of a clock."""
    for number in range(rounds):
        start = number % max(1, len(running))
        for worker, result in [*running[start:], *running[:start]]:
            time_round(worker, result, seconds, command)


def time_round(worker: Worker, result: Result, seconds: float, command: str = "time") -> None:
    """One round of all shapes, after a pause; a peer that fails is out."""
    if result.failed:
        return
    time.sleep(PAUSE_S)
    try:
        for shape, times in worker.ask(command, seconds=seconds).items():
            result.times.setdefault(shape, []).extend(times)
    except PeerFailed as error:
        result.failed, result.times = str(error), {}


def _ask_alone(model: str, result: Result, args: argparse.Namespace) -> None:
    """The stream starts from nothing, so it gets a process of its own."""
    worker = Worker(model, result.peer, args.threads, [])
    try:
        result.stream = worker.ask("stream", count=args.random, seed=args.seed)
    except PeerFailed as error:
        result.failed = str(error)
    worker.close()


def ratio(results: list[Result], shape: str) -> float | None:
    """blade's (DISC's) median over the best other peer's."""
    medians = {r.peer: r.median_ms(shape) for r in results}
    own = medians.get("blade")
    others = [ms for peer, ms in medians.items() if ms and not peer.startswith("blade")]
    return own / min(others) if own and others else None


def auto_ratio(results: list[Result], shape: str) -> float | None:
    """The automatic choice's median over that of the best backend alone: 1 is what is wanted."""
    medians = {r.peer: r.median_ms(shape) for r in results if r.peer.startswith("blade")}
    own = medians.pop("blade_auto", None)
    alone = [ms for peer, ms in medians.items() if ms and peer != "blade_untimed"]
    return own / min(alone) if own and alone else None


def times_table(model: str, results: list[Result], floors: dict[str, float]) -> Table:
    table = Table(title=f"{model}, fp32, {cpu()}: median ms")
    table.add_column("shape")
    shown = [r for r in results if r.times]
    for result in shown:
        table.add_column(result.peer, justify="right")
    for column in ("blade / best peer", "floor", "blade / floor", "auto / best alone"):
        table.add_column(column, justify="right")
    for shape in dict.fromkeys(shape for r in shown for shape in r.times):
        cells = [f"{r.median_ms(shape):.2f}" for r in shown]
        value, auto = ratio(results, shape), auto_ratio(results, shape)
        own, floor = shown[0].median_ms(shape), 1e3 * floors[shape]
        above = f"{own / floor:.2f}" if own and shown[0].peer == "blade" else "-"
        ours = "-" if value is None else f"{value:.2f}"
        chosen = "-" if auto is None else f"{auto:.2f}"
        table.add_row(shape, *cells, ours, f"{floor:.2f}", above, chosen)
    table.add_section()
    table.add_row("compile, s", *(f"{r.compile_s:.1f}" for r in shown))
    table.add_row("largest error", *(f"{max(r.errors.values()):.0e}" for r in shown))
    for key, title in (("resident_mb", "resident, MiB"), ("peak_mb", "peak of calls, MiB")):
        table.add_row(title, *(f"{r.memory.get(key, float('nan')):.0f}" for r in shown))
    return table


def stream_table(model: str, count: int, results: list[Result]) -> Table:
    table = Table(title=f"{model}: {count} random shapes once each, from nothing")
    for column in ("peer", "compile, s", "total, s", "slowest call, s"):
        table.add_column(column, justify="left" if column == "peer" else "right")
    for result in results:
        if result.stream:
            table.add_row(result.peer, *(f"{value:.2f}" for value in result.stream.values()))
    return table


def json_lines(
    model: str,
    args: argparse.Namespace,
    results: list[Result],
    floors: dict[str, float],
    machine: Machine,
) -> list[dict[str, Any]]:
    """One line per peer and shape; a failed peer has one line that says why."""
    lines = []
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    for result in results:
        common = {
            "bench": "models",
            "model": model,
            "peer": result.peer,
            "time": now,
            "cpu": cpu(),
            "threads": args.threads,
            "python": platform.python_version(),
            "versions": versions(result.peer),
            "failed": result.failed or None,
            "compile_s": round(result.compile_s, 3),
            "stream": result.stream or None,
            "memory": result.memory or None,
            "machine": asdict(machine),
        }
        lines += [
            {
                **common,
                "shape": shape,
                "calls": len(times),
                "rounds": args.rounds,
                "ms_median": round(statistics.median(times) * 1e3, 4),
                "ms_min": round(min(times) * 1e3, 4),
                "ms_p90": round(sorted(times)[int(0.9 * (len(times) - 1))] * 1e3, 4),
                "error": result.errors[shape],
                "ms_floor": round(floors[shape] * 1e3, 4),
                "ratio_to_best_peer": ratio(results, shape) if result.peer == "blade" else None,
                "auto_to_best_alone": auto_ratio(results, shape)
                if result.peer == "blade_auto"
                else None,
            }
            for shape, times in result.times.items()
        ] or [common]
    return lines


def versions(peer: str) -> dict[str, str]:
    """Of the packages that it is made of."""
    found = {}
    for package in {**PEERS, **INT8_PEERS, **BF16_PEERS}[peer].packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "unknown"
    return found


def cpu() -> str:
    """The CPU's name and widest vectors, as Linux tells them."""
    path = Path("/proc/cpuinfo")
    info = path.read_text() if path.exists() else ""
    fields = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
    named = {key.strip(): value.strip() for key, value in fields.items()}
    flags = named.get("flags", "").split()
    widest = next((f for f in ("amx_tile", "avx512f", "avx2") if f in flags), platform.machine())
    return f"{named.get('model name', platform.processor() or 'unknown CPU')} ({widest})"


if __name__ == "__main__":
    main()
