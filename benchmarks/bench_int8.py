# SPDX-License-Identifier: Apache-2.0
"""int8 against fp32 and against other engines' int8, side by side as in bench_models.py.

    python benchmarks/bench_int8.py                                   # BERT-mini and MiniLM
    python benchmarks/bench_int8.py --models bert_mini --threads 1 --peers torch_dynamic --rounds 5
    python benchmarks/bench_int8.py --packages FOLDER                 # of torchao and nncf

One process per peer, rounds interleaved, medians. The last columns are eager's median, our own fp32's and
that of the fastest int8 peer over ours: above 1, ours is faster. Accuracy is that of the engines that were
timed, at inputs that no peer calibrated on: the relative error of the first output, and of MiniLM the cosine
of the embeddings of sentences.txt to those of fp32 and Spearman's correlation of their similarities. All
peers are given the same samples to calibrate on.
"""

import argparse
import importlib.util
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from bench_models import Result, cpu, prepare, print_models, time_in_turns, versions
from models import MODELS
from peers import PEERS
from peers_int8 import INT8_PEERS
from rich.console import Console
from rich.table import Table
from worker import Worker

OURS = "blade_int8"
SHAPES = [(1, 16), (1, 64), (1, 128), (8, 64)]
EXACT = ["blade", "eager"]
KNOWN = {**PEERS, **INT8_PEERS}


def main() -> None:
    args = _arguments()
    if args.packages:
        sys.path.append(str(args.packages))  # of find_spec, here and in the workers
    print_models(args, lambda model, console: measure(model, args, console), table, json_line)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", default="bert_mini,minilm", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--peers", default=",".join([*EXACT, *INT8_PEERS]))
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=0.2, help="per peer, shape and round")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="write one line per model here")
    parser.add_argument("--packages", type=Path, help="a folder of packages that only peers use")
    parser.add_argument("--jobs", type=int, default=1, help="other peers prepared at a time")
    args = parser.parse_args()
    args.peers = list(dict.fromkeys([*EXACT, *args.peers.split(",")]))
    if unknown := set(args.peers) - set(KNOWN):
        parser.error(f"unknown peers: {', '.join(sorted(unknown))}")
    return args


def measure(model: str, args: argparse.Namespace, console: Console) -> list[Result]:
    """Our own, which measure while they compile, are prepared alone, then the others; then all in turns."""
    results = {peer: Result(peer) for peer in args.peers}
    workers: dict[str, Worker] = {}

    def start(peer: str) -> None:
        result = results[peer]
        if missing := [p for p in KNOWN[peer].packages if not importlib.util.find_spec(p)]:
            result.failed = f"skipped: {', '.join(missing)} not installed"
            return
        worker = Worker(model, peer, args.threads, SHAPES, args.packages)
        if prepare(worker, result):
            console.print(f"{model}: {peer} prepared in {result.compile_s:.1f} s", style="dim")
            workers[peer] = worker

    ours = [p for p in args.peers if "blade" in KNOWN[p].packages]
    for peer in ours:
        start(peer)
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(start, [p for p in args.peers if p not in ours]))
    running = [(workers[peer], results[peer]) for peer in args.peers if peer in workers]
    began = time.perf_counter()
    time_in_turns(running, args.rounds, args.seconds)
    console.print(f"{model}: timed in {time.perf_counter() - began:.1f} s", style="dim")
    for worker, result in running:
        if not result.failed:
            result.quality = worker.ask("quality")
        worker.close()
    return list(results.values())


def table(model: str, threads: int, results: Sequence[Result]) -> Table:
    """A row per shape, then what the same engines cost in accuracy."""
    made = Table(title=f"{model}, {threads} thread(s), {cpu()}: median ms")
    shown = [r for r in results if r.times]
    for name in ("shape", *(r.peer for r in shown), "eager /", "own fp32 /", "best int8 peer /"):
        made.add_column(name)
    for shape in dict.fromkeys(shape for r in shown for shape in r.times):
        cells = (f"{value:.3f}" for value in medians(shown, shape).values())
        made.add_row(shape, *cells, *map(_cell, ratios(shown, shape).values()))
    made.add_section()
    for key in ("relative", "cosine", "spearman"):
        values = [r.quality.get(key) for r in shown]
        if any(v is not None for v in values):
            made.add_row(key, *("-" if v is None else f"{v:.4f}" for v in values))
    made.add_row("int8 layers", *(r.quality.get("layers", "-") for r in shown))
    made.add_row("compile, s", *(f"{r.compile_s:.1f}" for r in shown))
    return made


def medians(results: Sequence[Result], shape: str) -> dict[str, float]:
    """Milliseconds by peer."""
    return {r.peer: r.median_ms(shape) or 0.0 for r in results if r.times}


def ratios(results: Sequence[Result], shape: str) -> dict[str, float | None]:
    """Of eager's time, of our own fp32's and of the fastest int8 peer's over ours."""
    ms = medians(results, shape)
    others = [ms[p] for p in ms if p in INT8_PEERS and p != OURS]
    bases = {"eager": ms.get("eager"), "fp32": ms.get("blade"), "int8": min(others, default=None)}
    ours = ms.get(OURS)
    return {name: base / ours if base and ours else None for name, base in bases.items()}


def json_line(model: str, args: argparse.Namespace, results: Sequence[Result]) -> dict[str, object]:
    shapes = dict.fromkeys(shape for r in results for shape in r.times)
    peers = [
        {
            "peer": r.peer,
            "ms": {shape: round(r.median_ms(shape) or 0.0, 4) for shape in r.times},
            "quality": r.quality,
            "compile_s": round(r.compile_s, 1),
            "versions": versions(r.peer),
            "failed": r.failed,
        }
        for r in results
    ]
    head = {"bench": "int8", "model": model, "threads": args.threads, "cpu": cpu()}
    return {**head, "peers": peers, "ratios": {s: ratios(results, s) for s in shapes}}


def _cell(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


if __name__ == "__main__":
    main()
