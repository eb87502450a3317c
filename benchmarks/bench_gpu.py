# SPDX-License-Identifier: Apache-2.0
"""DISC on a GPU against eager, TorchScript and torch.compile: calls, streams, kernels, models, training.

    python benchmarks/bench_gpu.py bert                          # BERT-base, fp16, five shapes
    python benchmarks/bench_gpu.py stream --random 200           # random shapes, compiling included
    python benchmarks/bench_gpu.py kernels                       # GB/s against a device copy
    python benchmarks/bench_gpu.py models --models vit,unet      # each with half of the time
    python benchmarks/bench_gpu.py train --tasks bert_base --batches 1,8,32
    python benchmarks/bench_gpu.py bert --dry-run                # tiny, on the CPU: does the script work?

Every peer lives in a process of its own; they are asked in turns, the device waited for. All of a command
takes about ``--seconds``: a peer that does not compile within what is left of it says so, and the others
go on. Models have random weights; values are compared with the same weights in float64.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from gpu import rounds, tables
from gpu.arguments import arguments
from gpu.remote import Remote
from gpu.rounds import Clock, Runner
from rich.console import Console
from zoo.model import Shape

BERT_SHAPES: tuple[Shape, ...] = ((1, 32), (1, 128), (1, 384), (8, 128), (32, 128))


def main() -> None:
    args = arguments((__doc__ or "").partition("\n")[0])
    console = Console(width=args.width)
    console.print(str(args.facts), markup=False)
    runs = {"bert": bert, "stream": stream, "kernels": kernels, "models": models, "train": train}
    runs[args.what](args, console)


def bert(args: argparse.Namespace, console: Console) -> None:
    shapes = args.shapes or (() if args.tiny else BERT_SHAPES)
    calls(args, console, "bert", shapes, Clock(args.seconds))


def models(args: argparse.Namespace, console: Console) -> None:
    for name in args.models:
        where = replace(args.where, channels_last=name in ("resnet50", "unet"))
        one = argparse.Namespace(**{**vars(args), "where": where})
        calls(one, console, name, args.shapes or (), Clock(args.seconds / len(args.models)))


def calls(
    args: argparse.Namespace,
    console: Console,
    model: str,
    shapes: Sequence[Shape],
    clock: Clock,
) -> None:
    """Calls of every peer at every shape, in turns."""
    runners = _inference(args, model, tuple(shapes), clock, console)
    rounds.prepared(runners, clock, 0.2 * args.seconds, console)
    alive = {peer: one for peer, one in runners.items() if not one.failed}
    for one in alive.values():
        one.answer["work"] = one.ask("work", clock.left())

    def turn(runner: Runner, limit: float) -> None:
        for shape, found in (runner.ask("time", limit, seconds=args.slice) or {}).items():
            runner.answer.setdefault("times", {}).setdefault(shape, []).extend(found)

    done = rounds.in_turns(runners, clock, args.rounds, turn)
    for one in alive.values():
        one.answer["queued"] = one.ask("queued", max(5.0, clock.left()))
        one.answer["memory"] = one.ask("memory", 5.0)
    seen = list(dict.fromkeys(s for one in alive.values() for s in one.answer.get("times") or ()))
    if seen:
        title = f"{model} {args.where.dtype}, {args.facts['device']}, {done} rounds"
        console.print(tables.calls_table(title, runners, seen))
        console.print(tables.device_table(model, runners, seen))
    for peer in filter(runners.__contains__, args.breakdown):
        found = runners[peer].ask("breakdown", max(10.0, clock.left()))
        if found and any(found.values()):
            runners[peer].answer["breakdown"] = found
            console.print(tables.breakdown_table(peer, found))
    tables.remarks(console, runners)
    tables.write(args.json, "calls", model, runners, args.facts, tables.with_medians)
    rounds.close(runners)


def stream(args: argparse.Namespace, console: Console) -> None:
    """One peer after the other: each starts from nothing."""
    clock = Clock(args.seconds)
    runners = _inference(args, args.models[0], (), clock, console)
    asked = {"count": args.random, "seed": args.seed}
    rounds.prepared(runners, clock, 0.0, console, "stream", **asked)
    keys = ("compile_s", "total_s", "slowest_s", "again_s", "error")
    found = [(p, *(r.answer[k] for k in keys)) for p, r in runners.items() if r.answer]
    own = runners["blade"].answer.get("total_s") if "blade" in runners else None
    rows = [(*row, row[2] / own if own else "-") for row in found]
    columns = ("peer", "compile, s", "total, s", "slowest, s", "all again, s", "error", "/ blade")
    title = f"{args.models[0]}: {args.random} random shapes once each, from nothing"
    console.print(tables.plain(title, columns, rows))
    tables.remarks(console, runners)
    tables.write(args.json, "stream", args.models[0], runners, args.facts)
    rounds.close(runners)


def _inference(
    args: argparse.Namespace,
    model: str,
    shapes: tuple[Shape, ...],
    clock: Clock,
    console: Console,
) -> dict[str, Runner]:
    def make(peer: str) -> Remote:
        given = {"model": model, "peer": peer, "where": args.where, "shapes": shapes}
        return Remote("gpu.inference", "Calls", {**given, "tiny": args.tiny})

    return rounds.started(args.peers, make, clock, console)


def kernels(args: argparse.Namespace, console: Console) -> None:
    """Pattern by pattern: every peer compiles it, then all move its bytes in turns."""
    clock = Clock(args.seconds)

    def make(peer: str) -> Remote:
        given = {"peer": peer, "where": args.where, "tiny": args.tiny}
        return Remote("gpu.bandwidth", "Bandwidth", given)

    runners = rounds.started(args.peers, make, clock, console)
    rows: list[tuple[object, ...]] = []
    for number, pattern in enumerate(args.patterns):
        share = clock.left() / (len(args.patterns) - number)
        rows += _pattern(pattern, runners, Clock(share), args)
    alive = list(runners)
    columns = ("pattern and shape", "MB", *(f"{peer} GB/s" for peer in alive))
    console.print(
        tables.plain(
            f"memory-bound kernels, {args.where.dtype}, {args.facts['device']}: GB/s (kernels a call)",
            columns,
            rows,
        )
    )
    tables.remarks(console, runners)
    tables.write(args.json, "kernels", "patterns", runners, args.facts)
    rounds.close(runners)


def _pattern(
    pattern: str, runners: dict[str, Runner], clock: Clock, args: argparse.Namespace
) -> list[tuple[object, ...]]:
    """Rows of the table, one per shape; a peer that cannot do this pattern may do the next one."""
    for runner in runners.values():
        made = runner.ask("attempt", max(5.0, clock.left()), pattern=pattern) or {}
        runner.answer.setdefault("prepared", {})[pattern] = made
        for text in filter(None, (made.get("wrong"), made.get("failed"))):
            runner.answer["wrong"] = "; ".join(filter(None, (runner.answer.get("wrong"), text)))
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}

    def turn(runner: Runner, limit: float) -> None:
        if not runner.answer["prepared"][pattern].get("failed"):
            for shape, one in (runner.ask("time", limit, pattern=pattern) or {}).items():
                found.setdefault(shape, {}).setdefault(runner.peer, []).append(one)

    rounds.in_turns(runners, clock, min(3, args.rounds), turn)
    rows = []
    for shape, by_peer in found.items():
        megabytes = next(iter(by_peer.values()))[0]["bytes"] / 1e6
        cells = [_bandwidth_cell(by_peer.get(peer)) for peer in runners]
        rows.append((f"{pattern} {shape}", f"{megabytes:.2f}", *cells))
        for peer, measured in by_peer.items():
            runners[peer].answer.setdefault("measured", {})[f"{pattern} {shape}"] = measured
    return rows


def _bandwidth_cell(measured: list[dict[str, Any]] | None) -> str:
    """By the device's own clock; without one, of queued calls, marked so."""
    if not measured:
        return "-"
    if measured[0]["us"] is None:
        return (
            f"{statistics.median(m['bytes'] / m['queued_us'] / 1e3 for m in measured):.2f} queued"
        )
    speed = statistics.median(m["bytes"] / m["us"] / 1e3 for m in measured)
    return f"{speed:.0f} ({measured[0]['kernels']:.0f})"


def train(args: argparse.Namespace, console: Console) -> None:
    """All peers side by side in turns; ``--alone``: one after the other, where memory is short."""
    for task in args.tasks:
        clock = Clock(args.seconds / len(args.tasks))
        groups = [[peer] for peer in args.peers] if args.alone else [args.peers]
        tried: dict[str, Runner] = {}
        answers: dict[int, dict[str, Runner]] = {batch: {} for batch in args.batches}
        for number, peers in enumerate(groups):
            share = Clock(clock.left() / (len(groups) - number))
            runners = rounds.started(peers, partial(_steps, args, task), share, console)
            for done, batch in enumerate(args.batches):
                later = (
                    len(args.batches) - done - 1
                )  # most of compiling is for the first batch size
                limit = Clock(share.left() * (1 - 0.2 * min(later, 2)))
                answers[batch] |= _train_batch(args, console, batch, runners, limit)
            rounds.close(runners)
            tried |= runners
        for batch, found in answers.items():
            _train_table(args, console, task, batch, found)
            tables.write(
                args.json, "train", f"{task} {batch}", found, args.facts, tables.with_medians
            )
        tables.remarks(console, tried)


def _steps(args: argparse.Namespace, task: str, peer: str) -> Remote:
    given = {"task": task, "peer": peer, "where": args.where, "tiny": args.tiny}
    return Remote("gpu.steps", "Steps", given)


def _train_batch(
    args: argparse.Namespace,
    console: Console,
    batch: int,
    runners: dict[str, Runner],
    clock: Clock,
) -> dict[str, Runner]:
    """``runners`` with what they did at this batch size."""
    reserve = min(0.25 * clock.left(), 30.0)
    rounds.prepared(runners, clock, reserve, console, batch=batch)
    times: dict[str, list[float]] = {}

    def turn(runner: Runner, limit: float) -> None:
        found = runner.ask("time", limit, batch=batch, seconds=5 * args.slice) or []
        times.setdefault(runner.peer, []).extend(found)

    rounds.in_turns(runners, clock, args.rounds, turn)
    for runner in runners.values():
        runner.answer["work"] = runner.ask("work", max(5.0, clock.left()), batch=batch)
        runner.answer["memory"] = runner.ask("memory", 5.0)
        runner.answer["times"] = {f"batch {batch}": times.get(runner.peer, [])}
    return {peer: replace(one, answer=dict(one.answer)) for peer, one in runners.items()}


def _train_table(
    args: argparse.Namespace, console: Console, task: str, batch: int, found: dict[str, Runner]
) -> None:
    eager = found["eager"].answer.get("losses") if "eager" in found else None
    rows = []
    for peer, one in found.items():
        times = one.answer["times"][f"batch {batch}"]
        if not times:
            continue
        ms = statistics.median(times) * 1e3
        work, losses = one.answer["work"], one.answer["losses"]
        apart = max(abs(a - b) for a, b in zip(losses, eager)) if eager else float("nan")
        counted = (f"{work['kernels']:.0f}", f"{work['host_calls']:.0f}") if work else ("-", "-")
        row = (peer, 1e3 / ms, ms, one.answer["compile_s"], *counted, losses[0], losses[-1], apart)
        rows.append((*row, one.answer["start_mib"] or "-", one.answer["memory"] or "-"))
    columns = (
        "peer,steps/s,ms,warm-up s,kernels,host calls,loss 1,loss 20,from eager,MiB at first,MiB"
    )
    title = f"training {task}, batch {batch}, autocast {args.where.dtype}, {args.facts['device']}"
    console.print(tables.plain(title, columns.split(","), rows))


if __name__ == "__main__":
    sys.exit(main())
