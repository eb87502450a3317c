# SPDX-License-Identifier: Apache-2.0
"""bfloat16 against fp32 and against other engines' bfloat16, side by side as in bench_models.py.

    python benchmarks/bench_bf16.py                                         # MiniLM
    python benchmarks/bench_bf16.py --models bert,vit,resnet50,gpt2_decode --rounds 7 --json out.jsonl
    python benchmarks/bench_bf16.py --zentorch VENV/bin/python              # a peer with another torch

One process per peer, rounds interleaved, medians. With one thread, seconds are the processor's. The last columns are
our own fp32's median and that of the fastest peer in bfloat16 over our faster one (the fp32 model with
``enable_bf16``, or the converted model): above 1, ours is faster. Errors are those of the engines that were timed,
the largest over the shapes, relative to the largest value of eager fp32.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from bench_models import Result, cpu, prepare, print_models, time_in_turns, versions
from models import MODELS
from peers import PEERS
from peers_bf16 import BF16_PEERS
from rich.console import Console
from rich.table import Table
from worker import Worker
from zoo.model import Shape

SHAPES: dict[str, list[Shape]] = {
    "minilm": [(1, 16), (1, 64), (1, 128), (8, 64)],
    "bert": [(1, 16), (1, 128), (8, 64)],
}
"""Of other models, their own."""

OURS = ("blade_bf16", "blade_bf16_model")
KNOWN = {**PEERS, **BF16_PEERS}


def main() -> None:
    args = _arguments()
    print_models(args, lambda model, console: measure(model, args, console), table, json_line)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", default="minilm", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--peers", default=",".join(["blade", *BF16_PEERS]))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.2, help="per peer, shape and round")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write one line per model here")
    parser.add_argument("--zentorch", type=Path, help="the interpreter of zentorch's environment")
    parser.add_argument("--packages", type=Path, help="a folder for what that one lacks")
    args = parser.parse_args()
    args.peers = args.peers.split(",")
    if unknown := set(args.peers) - set(KNOWN):
        parser.error(f"unknown peers: {', '.join(sorted(unknown))}")
    return args


def measure(model: str, args: argparse.Namespace, console: Console) -> list[Result]:
    """Each peer is prepared alone, then all are timed in turns."""
    results = {peer: Result(peer) for peer in args.peers}
    running: list[tuple[Worker, Result]] = []
    for peer, result in results.items():
        python = args.zentorch if peer.startswith("zentorch") else None
        if peer.startswith("zentorch") and python is None:
            result.failed = "skipped: --zentorch names no interpreter"
            continue
        packages = None if python is None else args.packages
        worker = Worker(model, peer, args.threads, SHAPES.get(model), packages, python)
        if prepare(worker, result):
            console.print(f"{model}: {peer} prepared in {result.compile_s:.1f} s", style="dim")
            running.append((worker, result))
    command = "processor_time" if args.threads == 1 else "time"
    time_in_turns(running, args.rounds, args.seconds, command)
    for worker, _ in running:
        worker.close()
    return list(results.values())


def ratios(results: Sequence[Result], shape: str) -> dict[str, float | None]:
    """Our own fp32's median, and that of the fastest other peer, over that of our faster bfloat16."""
    found = {r.peer: r.median_ms(shape) for r in results}
    medians = {peer: ms for peer, ms in found.items() if ms is not None}
    own = min((medians[p] for p in OURS if p in medians), default=None)
    theirs = [ms for peer, ms in medians.items() if not peer.startswith("blade")]
    best = min(theirs, default=None)
    exact = medians.get("blade")
    return {
        "fp32": exact / own if own and exact else None,
        "peer": best / own if own and best else None,
    }


def table(model: str, threads: int, results: Sequence[Result]) -> Table:
    """A row per shape, then the errors."""
    clock = "processor's " if threads == 1 else ""
    made = Table(title=f"{model}, {threads} thread(s), {cpu()}: median of the {clock}ms")
    shown = [r for r in results if r.times]
    for name in ("shape", *(r.peer for r in shown), "own fp32 /", "best peer /"):
        made.add_column(name)
    for shape in dict.fromkeys(shape for r in shown for shape in r.times):
        cells = (f"{r.median_ms(shape):.2f}" for r in shown)
        made.add_row(shape, *cells, *map(_cell, ratios(shown, shape).values()))
    made.add_section()
    made.add_row("largest error", *(f"{max(r.errors.values()):.0e}" for r in shown))
    made.add_row("compile, s", *(f"{r.compile_s:.1f}" for r in shown))
    return made


def _cell(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def json_line(model: str, args: argparse.Namespace, results: Sequence[Result]) -> dict[str, object]:
    shapes = dict.fromkeys(shape for r in results for shape in r.times)
    return {
        "bench": "bf16",
        "model": model,
        "threads": args.threads,
        "cpu": cpu(),
        "torch": torch.__version__,
        "versions": {r.peer: versions(r.peer) for r in results if "zentorch" not in r.peer},
        "command": " ".join(sys.argv),
        "failed": {r.peer: r.failed for r in results if r.failed},
        "compile_s": {r.peer: r.compile_s for r in results},
        "errors": {r.peer: r.errors for r in results},
        "ms": {s: {r.peer: r.median_ms(s) for r in results} for s in shapes},
        "ratios": {s: ratios(results, s) for s in shapes},
    }


if __name__ == "__main__":
    main()
