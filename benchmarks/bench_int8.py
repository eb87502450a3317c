# SPDX-License-Identifier: Apache-2.0
"""int8 against fp32 and against other engines' int8, side by side as in bench_models.py.

    python benchmarks/bench_int8.py                                   # BERT-mini and MiniLM
    python benchmarks/bench_int8.py --models bert_mini --peers eager,torch_dynamic --rounds 5

One process per peer, rounds interleaved, medians. The last columns are eager's median, our own fp32's and
that of the fastest int8 peer over ours: above 1, ours is faster.
"""

import argparse
import json
from pathlib import Path

import torch
from bench_models import Result, cpu, measure
from models import MODELS
from peers import PEERS
from peers_int8 import INT8_PEERS
from rich.console import Console
from rich.table import Table

OURS = "blade_int8"
SHAPES = [(1, 16), (1, 64), (1, 128), (8, 64)]
EXACT = ["eager", "onnxruntime"]  # and blade, which is measured in any case


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", default="bert_mini,minilm", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--peers", default=",".join([*EXACT, *INT8_PEERS]))
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=0.2, help="per peer, shape and round")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="write one line per model here")
    args = parser.parse_args()
    args.peers, args.shapes, args.random = args.peers.split(","), SHAPES, 0
    if unknown := set(args.peers) - {*PEERS, *INT8_PEERS}:
        parser.error(f"unknown peers: {', '.join(sorted(unknown))}")
    console = Console(width=180)
    lines = []
    for model in args.models.split(","):
        results = measure(model, args, console)
        console.print(table(model, results))
        for result in results:
            if result.failed:
                console.print(f"{result.peer}: {result.failed}", style="yellow", markup=False)
        shown = [{"peer": r.peer, "ms": _medians(r), "failed": r.failed} for r in results]
        lines.append({"bench": "int8", "model": model, "cpu": cpu(), "peers": shown})
    if args.json:
        args.json.write_text("".join(json.dumps(line) + "\n" for line in lines))


def table(model: str, results: list[Result]) -> Table:
    """A row per shape; errors are the largest, relative to the largest value of the output."""
    made = Table(title=f"{model}, {cpu()}: median ms")
    shown = [r for r in results if r.times]
    for name in ("shape", *(r.peer for r in shown), "eager /", "own fp32 /", "best int8 peer /"):
        made.add_column(name)
    for shape in dict.fromkeys(shape for r in shown for shape in r.times):
        ms = {r.peer: r.median_ms(shape) or 0.0 for r in shown}
        ours = ms.get(OURS)
        others = [ms[p] for p in ms if p in INT8_PEERS and p != OURS]
        bases = (ms.get("eager"), ms.get("blade"), min(others, default=None))
        ratios = [f"{base / ours:.2f}" if base and ours else "-" for base in bases]
        made.add_row(shape, *(f"{value:.2f}" for value in ms.values()), *ratios)
    made.add_section()
    made.add_row("error", *(f"{max(r.errors.values()):.0e}" for r in shown))
    made.add_row("compile, s", *(f"{r.compile_s:.1f}" for r in shown))
    return made


def _medians(result: Result) -> dict[str, float]:
    return {shape: round(result.median_ms(shape) or 0.0, 4) for shape in result.times}


if __name__ == "__main__":
    main()
