# SPDX-License-Identifier: Apache-2.0
"""How models get in: paths, guards, share of ops and of time in engines, calls served, speed beside peers.

    python benchmarks/bench_capture.py [MODEL ...] [--peers torchscript,inductor] [--json FILE] [--list]

Every model runs in a process of its own. It is optimized at one sample and called at ten others, at sizes and
contents that were not sampled. Each answer is compared with the original's: ``engine`` (a path answered),
``python`` (the original did), ``raised`` or ``WRONG``. Speeds are medians of interleaved rounds over the sample
and all calls, as ratios to eager; peers that raise have none. Needs torchvision for its models.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from queue import Empty
from typing import Any

import torch
from capture.models import MODELS, Call, Case
from rich.console import Console
from rich.table import Table
from torch.utils import _pytree as pytree

import blade

PEERS = ("torchscript", "inductor")
COLUMNS = (
    "capture_s seconds paths guards ops_share engine python raised wrong blade torchscript inductor"
)


def main() -> None:
    args = _arguments()
    if args.list:
        print("\n".join(MODELS))
        return
    rows = []
    for name in args.models or MODELS:
        row = _alone(name, args.peers.split(","), args.limit)
        rows.append(row)
        print(json.dumps(row), flush=True)
        if args.json:
            with open(args.json, "a") as file:
                print(json.dumps(row), file=file)
    _show(rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--json", help="append a line per model to this file")
    parser.add_argument("--limit", type=float, default=600, help="seconds for one model (600)")
    parser.add_argument("--list", action="store_true", help="print the names of the models")
    return parser.parse_args()


def _alone(name: str, peers: Sequence[str], limit: float) -> dict[str, Any]:
    """The row of ``name``, from a fresh process; what ended it, if it did not."""
    context = multiprocessing.get_context("spawn")
    queue: Any = context.Queue()
    process = context.Process(target=_work, args=(name, peers, queue))
    process.start()
    row: dict[str, Any] = {"model": name}
    end = time.monotonic() + limit
    while time.monotonic() < end:
        try:
            row |= queue.get(timeout=1)
        except Empty:
            if not process.is_alive():
                break
        if "done" in row:
            break
    if "done" not in row and process.is_alive():
        row["ended"] = f"stopped after {limit:.0f} s"
        process.kill()
    process.join()
    if process.exitcode and "ended" not in row:
        row["ended"] = f"exit code {process.exitcode}"
    return row


def _work(name: str, peers: Sequence[str], queue: Any) -> None:
    warnings.simplefilter("ignore")
    try:
        case = MODELS[name]()
        with torch.no_grad():
            eager = [case.model(*call) for call in case.calls]
        begin = time.perf_counter()
        optimized = blade.optimize(case.model, case.inputs(case.sample), blade.Config())
        report = blade.report(optimized)
        queue.put({"seconds": time.perf_counter() - begin, **_facts(report)})
        queue.put(_served(case, optimized, eager))
        queue.put(_speeds(case, optimized, peers))
    except blade.InputError as error:
        queue.put({"refused": str(error)[:600]})
    except Exception as error:  # the benchmark's own process; the row says what it was
        queue.put(
            {
                "crashed": f"{type(error).__name__}: {str(error)[:600]}",
                "trace": traceback.format_exc()[-900:],
            }
        )
    queue.put({"done": True})


def _facts(report: Any) -> dict[str, Any]:
    inside = sum(sum(one.ops.values()) for one in report.clusters if one.backend != "torchscript")
    outside = sum(report.outside.values())
    outside += sum(sum(one.ops.values()) for one in report.clusters if one.backend == "torchscript")
    return {
        "capture_s": report.seconds.get("capture"),
        "paths": len(report.paths),
        "guards": [len(one) for one in report.paths],
        "clusters": len(report.clusters),
        "ops_share": inside / max(1, inside + outside),
        "outside": dict(sorted(report.outside.items(), key=lambda item: -item[1])[:6]),
        "reasons": [f"{one.code.value}: {one.detail[:160]}" for one in report.reasons][:6],
    }


def _served(case: Case, optimized: Any, expected: Sequence[Any]) -> dict[str, Any]:
    found = {"engine": 0, "python": 0, "raised": 0, "wrong": 0}
    texts = []
    for call, want in zip(case.calls, expected, strict=True):
        before = blade.stats(optimized).get("original", {}).get("calls", 0)
        try:
            with torch.no_grad():
                got = optimized(*call)
        except RuntimeError as error:
            found["raised"] += 1
            texts.append(str(error)[-200:])
            continue
        after = blade.stats(optimized).get("original", {}).get("calls", 0)
        right = _is_right(got, want)
        found["wrong" if not right else "python" if after > before else "engine"] += 1
    return {**found, "texts": texts[:2]}


def _is_right(got: Any, want: Any) -> bool:
    pairs = zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True)
    return all(
        a.shape == b.shape
        and torch.allclose(
            a.double(),
            b.double(),
            rtol=1e-3,
            atol=1e-3 * float(b.double().abs().max() if b.numel() else 0),
        )
        for a, b in pairs
        if isinstance(b, torch.Tensor)
    )


def _speeds(case: Case, optimized: Any, peers: Sequence[str]) -> dict[str, Any]:
    ways: dict[str, Callable[..., Any]] = {"eager": case.model, "blade": optimized}
    if "torchscript" in peers:
        ways |= _torchscript(case)
    if "inductor" in peers:
        ways["inductor"] = torch.compile(case.model, dynamic=True)
    calls = [case.sample, *case.calls]
    failed = {}
    for name, way in list(ways.items()):
        try:
            with torch.no_grad():
                for _ in range(2):
                    for call in calls:
                        way(*call)
        except Exception as error:  # a peer's, whatever it is
            failed[name] = f"{type(error).__name__}: {str(error)[:200]}"
            del ways[name]
    times: dict[str, list[float]] = {name: [] for name in ways}
    end = time.perf_counter() + 20
    while time.perf_counter() < end and len(times["eager"]) < 30:
        for name, way in ways.items():
            times[name].append(_round(way, calls))
    middle = {name: statistics.median(several) for name, several in times.items()}
    speeds: dict[str, Any] = {
        name: middle["eager"] / one for name, one in middle.items() if name != "eager"
    }
    return {**speeds, "eager_ms": 1e3 * middle["eager"] / len(calls), "failed": failed}


def _torchscript(case: Case) -> dict[str, Callable[..., Any]]:
    """A frozen trace at the sample: fast, and right where it happens to be."""
    try:
        with torch.no_grad():
            return {
                "torchscript": torch.jit.freeze(
                    torch.jit.trace(case.model, case.sample, strict=False, check_trace=False)
                )
            }
    except Exception:  # it cannot be traced
        return {}


def _round(way: Callable[..., Any], calls: Sequence[Call]) -> float:
    begin = time.perf_counter()
    with torch.no_grad():
        for call in calls:
            way(*call)
    return time.perf_counter() - begin


def _show(rows: Sequence[dict[str, Any]]) -> None:
    table = Table("model", *COLUMNS.split(), "note")
    for row in rows:
        cells = [_cell(row.get(column)) for column in COLUMNS.split()]
        note = row.get("refused") or row.get("crashed") or row.get("ended") or ""
        table.add_row(row["model"], *cells, note[:60])
    Console(width=200).print(table)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.2f}"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


if __name__ == "__main__":
    sys.exit(main())
