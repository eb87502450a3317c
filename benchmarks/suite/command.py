# SPDX-License-Identifier: Apache-2.0
"""The command line: which cells, for how long, where the lines go."""

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import time
from pathlib import Path
from typing import Any

import torch
from bench_models import cpu

from suite import libraries
from suite.cells import Bounds
from suite.entry import FAMILIES, Entry
from suite.lines import Lines
from suite.peers import INFERENCE, PEERS, TRAINING, packages
from suite.registry import ENTRIES
from suite.run import Limits, Work, run
from suite.summary import summary

_LIBRARIES = "torch blade transformers timm torchvision diffusers torch_geometric triton onnxruntime openvino".split()


def main(given: list[str] | None = None) -> None:
    args = _arguments(given)
    libraries.look_in(args.packages)
    if args.list:
        for one in ENTRIES.values():
            print(f"{one.name:22} {one.family:12} {', '.join(one.missing()) or 'can be built'}")
        return
    lines = Lines(args.out)
    if not args.summary:
        missing = _measure(args, lines)
        for name, what in missing.items():
            print(f"{name}: skipped: {', '.join(what)} not installed")
    print(summary(lines.found(), args.device))


def _measure(args: argparse.Namespace, lines: Lines) -> dict[str, list[str]]:
    """Run what is not in the lines yet; the models whose library is missing."""
    chosen = _chosen(args)
    missing = {one.name: one.missing() for one in chosen if one.missing()}
    bounds = Bounds(args.threads, args.memory_mb, args.packages)
    limits = Limits(
        args.minutes * 60 if args.minutes else None,
        args.cell_s,
        args.seconds,
        args.rounds,
        args.jobs,
        args.again,
    )
    facts = _facts(args)
    works = []
    for name in missing:
        lines.skipped(facts, name, missing[name])
    for mode in args.modes:
        peers = _present(args, mode)
        for one in chosen:
            if one.name not in missing and (mode == "inference" or one.trained):
                works.append(Work(one.name, mode, tuple(peers)))
    if args.device == "cuda":  # the most telling of all modes first
        works.sort(key=lambda work: ENTRIES[work.model].rank)
    started = time.monotonic()
    run(works, args.device, args.dtype, bounds, limits, lines, facts)
    print(f"{time.monotonic() - started:.0f} s")
    return missing


def _present(args: argparse.Namespace, mode: str) -> list[str]:
    """The peers whose packages are there; others are said to be missing."""
    known = INFERENCE[args.device] if mode == "inference" else TRAINING
    found = []
    for peer in args.peers or PEERS[args.device, mode]:
        if peer not in known:
            print(f"{mode}: no peer is called {peer}; there are {', '.join(known)}")
            continue
        gone = [p for p in packages(args.device, mode, peer) if importlib.util.find_spec(p) is None]
        if gone:
            print(f"{mode}: {peer} left out: {', '.join(gone)} not installed")
        else:
            found.append(peer)
    return found


def _chosen(args: argparse.Namespace) -> list[Entry]:
    names = args.models or list(ENTRIES)
    found = [ENTRIES[name] for name in names if ENTRIES[name].family in args.families]
    if args.models:
        return found
    # Of each family in turns: a run that is cut short has seen something of all of them.
    ranked: list[Entry] = []
    for rank in sorted({one.rank for one in found}):
        queues = [[e for e in found if e.rank == rank and e.family == f] for f in args.families]
        while any(queues):
            ranked += [queue.pop(0) for queue in queues if queue]
    return ranked


def _facts(args: argparse.Namespace) -> dict[str, Any]:
    versions = {}
    for name in _LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    device = torch.cuda.get_device_name() if args.device == "cuda" else cpu()
    return {
        "device": args.device,
        "on": device,
        "dtype": args.dtype,
        "threads": args.threads,
        "python": platform.python_version(),
        "versions": versions,
        "cores": os.cpu_count(),
    }


def _arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.suite")
    parser.add_argument(
        "--out", type=Path, required=True, help="lines of JSON; what is in it is not run again"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--modes", type=_names(["inference", "training"]), default=["inference"])
    parser.add_argument("--families", type=_names(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--models", type=_names(ENTRIES), help="in this order; else all")
    parser.add_argument(
        "--peers", type=lambda text: tuple(text.split(",")), help="else all that are installed"
    )
    parser.add_argument(
        "--minutes", type=float, help="for all of it; what there is no time for waits"
    )
    parser.add_argument(
        "--cell-s", type=float, default=240.0, help="to build and compile one cell, at most"
    )
    parser.add_argument("--memory-mb", type=int, default=0, help="of one cell, at most")
    parser.add_argument("--seconds", type=float, default=0.15, help="of calls per shape and round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--threads", type=int, help="of a cell: 1 on a CPU; 3 beside a GPU, to compile"
    )
    parser.add_argument(
        "--jobs", type=int, help="cells that compile side by side: 1 on a CPU, 6 on a GPU"
    )
    parser.add_argument(
        "--dtype", help="float32 on a CPU, float16 on a GPU; training uses autocast"
    )
    parser.add_argument("--packages", type=Path, help="a folder more to import from")
    parser.add_argument("--again", action="store_true", help="run failed cells again")
    parser.add_argument("--summary", action="store_true", help="run nothing, show what there is")
    parser.add_argument("--list", action="store_true", help="the models")
    args = parser.parse_args(given)
    cuda = args.device == "cuda"
    args.threads = args.threads or (3 if cuda else 1)
    args.jobs = args.jobs or (6 if cuda else 1)
    args.dtype = args.dtype or ("float16" if cuda else "float32")
    args.memory_mb = args.memory_mb or (24_000 if cuda else 3000)
    if args.packages:
        args.packages = args.packages.resolve()
    return args


def _names(known: Any) -> Any:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"unknown: {unknown}; known: {', '.join(known)}")
        return names

    return parse
