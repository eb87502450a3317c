# SPDX-License-Identifier: Apache-2.0
"""How models get in: paths, guards, share of ops and of time in engines, calls served, speed beside peers.

    python benchmarks/bench_capture.py [MODEL ...] [--peers torchscript,inductor] [--json FILE] [--list]
    python benchmarks/bench_capture.py --device cuda --scale 2 --jobs 8     # the vision models, on a GPU

Every model runs in a process of its own. It is optimized at one sample and called at ten others, at sizes and
contents that were not sampled. Each answer is compared with the original's: ``engine`` (a path answered),
``python`` (the original did), ``raised`` or ``WRONG``; ``error`` is the largest difference, as a part of the
largest value. Speeds are medians of interleaved rounds over the sample and all calls, each waited for, as ratios
to eager; peers that raise have none. With ``--jobs`` several models are made ready at once; each is timed while
the others rest. Without TF32. Needs torchvision for its models.
"""

import argparse
import json
import multiprocessing
import signal
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from queue import Empty
from typing import Any

import torch
from capture.models import MODELS, VISION, Call, Case
from rich.console import Console
from rich.table import Table
from torch.utils import _pytree as pytree

import blade

PEERS = ("torchscript", "inductor", "reduce-overhead")
COLUMNS = (
    "capture_s seconds paths guards ops_share engine python raised wrong error eager_ms "
    "blade torchscript inductor reduce-overhead"
)
TOLERANCES = {torch.float32: 1e-3, torch.float16: 2e-2}


def main() -> None:
    args = _arguments()
    names = args.models or list(MODELS if args.device == "cpu" else VISION)
    if args.list:
        print("\n".join(names))
        return
    rows = []
    for begin in range(0, len(names), args.jobs):
        for row in _together(names[begin : begin + args.jobs], args):
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
    parser.add_argument("--peers", default=",".join(PEERS[:2]), help=f"of {','.join(PEERS)}")
    parser.add_argument("--json", help="append a line per model to this file")
    parser.add_argument("--limit", type=float, default=600, help="seconds for a model (600)")
    parser.add_argument("--peer-limit", type=float, default=300, help="seconds to warm a peer up")
    parser.add_argument("--seconds", type=float, default=20, help="of timing per model (20)")
    parser.add_argument("--jobs", type=int, default=1, help="models that are made ready at once")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16"])
    parser.add_argument("--scale", type=int, default=1, help="of the images of vision models")
    parser.add_argument("--list", action="store_true", help="print the names of the models")
    return parser.parse_args()


class _Worker:
    """The process of one model, and its row so far."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        context = multiprocessing.get_context("spawn")
        self.queue: Any = context.Queue()
        self.go = context.Event()
        self.process = context.Process(target=_work, args=(name, args, self.queue, self.go))
        self.process.start()
        self.row: dict[str, Any] = {"model": name}
        self.end = time.monotonic() + args.limit

    def wait(self, key: str) -> None:
        """Until the row has ``key``, or the process has ended or run out of time."""
        while key not in self.row and "done" not in self.row:
            is_over = not self.process.is_alive()
            try:
                self.row |= self.queue.get(timeout=1)
                continue
            except Empty:
                pass
            if is_over:
                return
            if time.monotonic() > self.end:
                self.row["ended"] = "out of time"
                self.process.kill()
                return

    def finish(self) -> dict[str, Any]:
        self.go.set()
        self.wait("done")
        self.process.join()
        if self.process.exitcode and "ended" not in self.row:
            self.row["ended"] = f"exit code {self.process.exitcode}"
        return {k: v for k, v in self.row.items() if k not in ("ready", "done")}


def _together(names: Sequence[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of ``names``; nothing is timed before all are ready."""
    workers = [_Worker(name, args) for name in names]
    for worker in workers:
        worker.wait("ready")
    return [worker.finish() for worker in workers]


def _work(name: str, args: argparse.Namespace, queue: Any, go: Any) -> None:
    warnings.simplefilter("ignore")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        made = VISION[name](args.scale) if name in VISION else MODELS[name]()
        case = made.to(torch.device(args.device), getattr(torch, args.dtype))
        with torch.no_grad():
            eager = [case.model(*call) for call in case.calls]
        begin = time.perf_counter()
        optimized = blade.optimize(case.model, case.inputs(case.sample), blade.Config())
        report = blade.report(optimized)
        queue.put({"seconds": time.perf_counter() - begin, **_facts(report)})
        queue.put(_served(case, optimized, eager, TOLERANCES[getattr(torch, args.dtype)]))
        ways, failed = _ready(case, optimized, args.peers.split(","), args.peer_limit)
        queue.put({"failed": failed, "ready": True})
        go.wait()
        queue.put(_speeds(case, ways, args.seconds))
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


def _served(
    case: Case, optimized: Any, expected: Sequence[Any], tolerance: float
) -> dict[str, Any]:
    found: dict[str, Any] = {"engine": 0, "python": 0, "raised": 0, "wrong": 0, "error": 0.0}
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
        apart = _difference(got, want)
        if apart > tolerance:
            found["wrong"] += 1
            texts.append(f"off by {apart:.2g} at {[tuple(x.shape) for x in call]}")
            continue
        found["python" if after > before else "engine"] += 1
        found["error"] = max(found["error"], apart)
    return {**found, "texts": texts[:2]}


def _difference(got: Any, want: Any) -> float:
    """The largest difference, as a part of the largest value; infinite where shapes differ."""
    largest = 0.0
    for a, b in zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True):
        if not isinstance(b, torch.Tensor):
            continue
        if a.shape != b.shape or not torch.equal(a.isfinite(), b.isfinite()):
            return float("inf")
        kept = b.isfinite()
        a, b = a[kept].double(), b[kept].double()
        if b.numel():
            largest = max(largest, float((a - b).abs().max() / b.abs().max().clamp(min=1e-12)))
    return largest


def _ready(
    case: Case, optimized: Any, peers: Sequence[str], limit: float
) -> tuple[dict[str, Callable[..., Any]], dict[str, str]]:
    """Everybody that answers all calls, twice; and why the others do not."""
    ways: dict[str, Callable[..., Any]] = {"eager": case.model, "blade": optimized}
    if "torchscript" in peers:
        ways |= _torchscript(case)
    for name, mode in (("inductor", None), ("reduce-overhead", "reduce-overhead")):
        if name in peers:
            ways[name] = torch.compile(case.model, dynamic=True, mode=mode)
    failed = {}
    for name, way in list(ways.items()):
        if (why := _why_not_ready(way, case, limit)) is not None:
            failed[name] = why
            del ways[name]
    return ways, failed


def _why_not_ready(way: Callable[..., Any], case: Case, limit: float) -> str | None:
    """An alarm ends a compilation, too, so that one peer costs no other its times; some compilers swallow it."""
    late = f"not ready after {limit:.0f} s"
    end = time.monotonic() + limit

    def too_late(*_: object) -> None:
        raise TimeoutError(late)

    signal.signal(signal.SIGALRM, too_late)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        with torch.no_grad():
            for call in 2 * [case.sample, *case.calls]:
                way(*call)
                if time.monotonic() > end:
                    return late
            if case.sample[0].is_cuda:
                torch.cuda.synchronize()
    except Exception as error:  # a peer's, whatever it is
        return f"{type(error).__name__}: {str(error)[:200]}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return None


def _speeds(case: Case, ways: dict[str, Callable[..., Any]], seconds: float) -> dict[str, Any]:
    calls = [case.sample, *case.calls]
    times: dict[str, list[float]] = {name: [] for name in ways}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end and len(times["eager"]) < 30:
        for name, way in ways.items():
            times[name].append(_round(way, calls))
    middle = {name: statistics.median(several) for name, several in times.items()}
    speeds: dict[str, Any] = {
        name: middle["eager"] / one for name, one in middle.items() if name != "eager"
    }
    return {**speeds, "eager_ms": 1e3 * middle["eager"] / len(calls), "rounds": len(times["eager"])}


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
            if call[0].is_cuda:
                torch.cuda.synchronize()
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
        return f"{value:.2f}" if value > 0.01 or value == 0 else f"{value:.0e}"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


if __name__ == "__main__":
    sys.exit(main())
