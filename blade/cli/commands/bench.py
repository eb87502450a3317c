# SPDX-License-Identifier: Apache-2.0
"""``python -m blade bench OUT.pt``: compare the optimized file with its own original, and with peers."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from blade.cli.shared import peers
from blade.cli.shared.bench_samples import BenchSample, given, parse_shapes, remembered
from blade.cli.shared.bench_text import render
from blade.cli.shared.files import (
    read_model,
    read_report,
    read_samples,
    read_torchscript,
)
from blade.cli.shared.latency import latencies, throughput
from blade.cli.shared.options import (
    Commands,
    UsageError,
    add_command,
    add_inputs,
    add_pickle,
)
from blade.cli.shared.progress_bar import progress_bar
from blade.cli.shared.result import CommandResult, ExitCode
from blade.core.progress import announce
from blade.core.reason import Reason
from blade.errors import InputError
from blade.report import ENGINES, KernelTime, Timing, rearm, shape_text, stats
from blade.report.interval import speed_interval
from blade.timing.decision import MIN_ROUNDS
from blade.timing.interleaved import measure
from blade.timing.neighbours import NEIGHBOURS

if TYPE_CHECKING:
    from blade.runtime import Engine

TEXT = """Time an optimized file against its own original, the two in turns; medians of rounds.

The original is the same file with its engines switched off. Samples are those of --inputs; without it,
random ones of the sizes, types and ranges of values that the file remembers from `optimize`, or of --shape
and --batch. With --original MODEL.pt the libraries that are installed and can run that model are measured,
too. Rounds that other processes disturb do not count. With --require the exit code is 0 if the interval of
the speed-up lies above RATIO, 1 if below, and 5 if it includes RATIO: too noisy to tell.
The code in the file runs: give it only files that you trust."""

SECONDS = 0.5
WINDOWS_S = 2.0


def add(commands: Commands, shared: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser = add_command(commands, shared, "bench", TEXT)
    parser.add_argument("file", metavar="OUT.pt", help="a file that optimize wrote")
    add_inputs(parser, required=False)
    parser.add_argument(
        "--shape",
        metavar="NAME=8x128",
        nargs="+",
        action="extend",
        default=[],
        help="random samples of this size; without NAME for the only input",
    )
    parser.add_argument(
        "--batch", type=_positive, metavar="N", help="random samples of N along the first axis"
    )
    parser.add_argument("--original", metavar="MODEL.pt", help="the model that was optimized")
    known = ",".join(peers.PEERS)
    parser.add_argument("--peers", metavar="A,B", help=f"which ones (default: {known})")
    parser.add_argument("--rounds", type=_positive, default=15, help="per sample (default 15)")
    parser.add_argument(
        "--require",
        type=float,
        metavar="RATIO",
        help="exit code 1 if the speed-up is less, 5 if noise hides whether it is",
    )
    parser.add_argument("--threads", type=_positive, metavar="N", help="of torch, per call")
    parser.add_argument(
        "--callers", type=_positive, metavar="N", help="throughput with N threads that call at once"
    )
    parser.add_argument(
        "--streams", type=_positive, metavar="N", help="of the GPU, that callers share (default: N)"
    )
    parser.add_argument(
        "--seconds",
        type=_positive_seconds,
        metavar="S",
        help=f"of latency per sample and side (default {SECONDS:g}), and of throughput ({WINDOWS_S:g})",
    )
    parser.add_argument("--kernels", action="store_true", help="time per fused kernel")
    add_pickle(parser)
    return parser


def run(args: argparse.Namespace) -> CommandResult:
    wanted = _wanted(args)
    path = Path(args.file)
    optimized = read_torchscript(path)
    samples = _samples(args, path)
    original = read_torchscript(path)  # a separate copy, so that nothing is switched between calls
    switch_off(original)
    before = NEIGHBOURS.describe()
    with progress_bar("bench"), torch.no_grad(), _threads(args.threads):
        _check(optimized, samples, args.inputs)
        rows = []
        for done, sample in enumerate(samples):
            announce("original", done, len(samples), shape_text(t.shape for t in sample.tensors))
            rows.append(_measure(optimized, original, sample, _rounds(args)))
        pairs = [(_call(optimized, one), _call(original, one)) for one in samples]
        tails = [latencies(pair, args.seconds or SECONDS) for pair in pairs]
        many = [_throughput(args, one, pair) for one, pair in zip(samples, pairs, strict=True)]
        counters = stats(optimized)
        kernels = _kernels(optimized, samples) if args.kernels else {}
        others = _peers(args, wanted, optimized, samples) if args.original else {}
        threads = torch.get_num_threads()
    speedup, low, high = speed_interval(rows)
    data = {
        "file": str(path),
        "inputs": args.inputs or "remembered types, random contents",
        "threads": threads,
        "machine": {"before": before, "after": NEIGHBOURS.describe()},
        "speedup": speedup,
        "interval": [low, high],
        "required": args.require,
        "verdict": _verdict(low, high, args.require),
        "samples": [
            {
                **asdict(t),
                "speedup": t.speedup,
                "interval": [t.low, t.high],
                "latency": {"blade": asdict(tails[i][0]), "original": asdict(tails[i][1])},
                "throughput": many[i],
                "peers": {n: p[i] for n, p in others.items()},
            }
            for i, t in enumerate(rows)
        ],
        "kernels": {name: [asdict(one) for one in every] for name, every in kernels.items()},
        "engines": counters,
    }
    return CommandResult(data, render(data, rows, kernels), _CODES[str(data["verdict"])])


_CODES = {
    "measured": ExitCode.OK,
    "passed": ExitCode.OK,
    "failed": ExitCode.FOUND,
    "inconclusive": ExitCode.UNCLEAR,
}


def _verdict(low: float, high: float, required: float | None) -> str:
    """What the interval of the speed-up says about ``required``."""
    if required is None:
        return "measured"
    return "passed" if low >= required else "failed" if high < required else "inconclusive"


def _samples(args: argparse.Namespace, path: Path) -> list[BenchSample]:
    shown = read_report(path)
    if args.inputs is None:
        return remembered(shown, path, parse_shapes(args.shape), args.batch)
    if args.shape or args.batch:
        raise UsageError("--shape and --batch make random samples: give them without --inputs")
    return given(read_samples(Path(args.inputs), allow_pickle=args.allow_pickle))


def _rounds(args: argparse.Namespace) -> int:
    """Fewer rounds than ``MIN_ROUNDS`` have no interval, which --require needs."""
    return int(args.rounds if args.require is None else max(args.rounds, MIN_ROUNDS))


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _throughput(
    args: argparse.Namespace, sample: BenchSample, pair: Sequence[Callable[[], Any]]
) -> dict[str, Any] | None:
    """Of --callers: calls and rows per second, latencies, and the ratio to the original with its interval."""
    if args.callers is None:
        return None
    found, [ratio] = throughput(pair, args.callers, args.seconds or WINDOWS_S, args.streams)
    sides = {
        name: {**asdict(one), "rows_per_s": one.calls_per_s * sample.rows}
        for name, one in zip(("blade", "original"), found, strict=True)
    }
    interval = [ratio.low, ratio.high]
    return {"callers": args.callers, **sides, "speedup": ratio.middle, "interval": interval}


def _kernels(
    optimized: torch.jit.ScriptModule, samples: Sequence[BenchSample]
) -> dict[str, tuple[KernelTime, ...]]:
    """By cluster; ``InputError`` for samples by keyword, whose order is not known."""
    from blade.cli.shared.engine_kernels import kernels_of  # needs the runtime; the doctor does not

    if any(one.kwargs for one in samples):
        raise InputError("--kernels: give samples with positional arguments, a tuple each")
    return kernels_of(optimized, [one.args for one in samples])


def _call(fn: Callable[..., Any], one: BenchSample) -> Callable[[], Any]:
    return lambda: fn(*one.args, **one.kwargs)


def _positive_seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("more than 0")
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return value


def _wanted(args: argparse.Namespace) -> tuple[str, ...]:
    if args.peers is None:
        return tuple(peers.PEERS)
    if args.original is None:
        raise UsageError("--peers: they need the model that was optimized, --original MODEL.pt")
    names = tuple(name.strip() for name in args.peers.split(",") if name.strip())
    if unknown := [name for name in names if name not in peers.PEERS]:
        raise UsageError(
            f"--peers: {unknown[0]!r} is not known; known are: {', '.join(peers.PEERS)}"
        )
    return names


def switch_off(module: torch.jit.ScriptModule) -> None:
    """Make every call of ``module`` run the original from now on."""
    for _, part in module.named_modules():
        for attribute in ENGINES:
            engine = getattr(part, attribute, None)
            if isinstance(engine, torch.ScriptObject):
                cast("Engine", engine).set_enabled(False)


def _check(
    optimized: torch.jit.ScriptModule, samples: Sequence[BenchSample], source: str | None
) -> None:
    """Check before timing that the model accepts the samples."""
    for i, sample in enumerate(samples):
        try:
            optimized(*sample.args, **sample.kwargs)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            what = f"{source}: sample {i}" if source else f"random contents for sample {i}"
            hint = "" if source else "; give real ones with --inputs SAMPLES.pt"
            line = str(error).strip().splitlines()[-1]
            raise InputError(f"{what} does not run on this model: {line}{hint}") from error
    rearm(optimized)


def _measure(
    mine: Callable[..., Any], other: Callable[..., Any], one: BenchSample, n: int
) -> Timing:
    def call(fn: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *tensors: fn(*one.args, **one.kwargs)

    return measure(call(mine), call(other), one.tensors, n)


def _peers(
    args: argparse.Namespace,
    wanted: Sequence[str],
    optimized: torch.jit.ScriptModule,
    samples: Sequence[BenchSample],
) -> dict[str, list[dict[str, Any]]]:
    """Per peer and sample: ``ms`` and ``blade_ms``, measured in turns, or the reason why not."""
    model = read_model(Path(args.original), allow_pickle=args.allow_pickle)
    found: dict[str, list[dict[str, Any]]] = {}
    for done, name in enumerate(wanted):
        announce("peers", done, len(wanted), name)
        bound = [(one.args, one.kwargs) for one in samples]
        prepared = peers.prepare(name, model, bound)
        found[name] = []
        for i, sample in enumerate(samples):
            if isinstance(prepared, Reason):
                found[name].append({"why_not": prepared.detail})
                continue
            timed = peers.try_one(name, lambda: prepared[i])  # noqa: B023 - called at once
            found[name].append(_against(name, timed, optimized, sample, args.rounds))
    return found


def _against(
    name: str,
    call: peers.Call | Reason,
    optimized: torch.jit.ScriptModule,
    one: BenchSample,
    rounds: int,
) -> dict[str, Any]:
    def measured() -> Timing:
        assert not isinstance(call, Reason)
        return _measure(optimized, lambda *args, **kwargs: call(), one, rounds)

    timing = call if isinstance(call, Reason) else peers.try_one(name, measured)
    if isinstance(timing, Reason):
        return {"why_not": timing.detail}
    ratio = {"blade_speedup": timing.speedup, "interval": [timing.low, timing.high]}
    return {
        "ms": timing.original_ms,
        "blade_ms": timing.engine_ms,
        "spread": timing.spread,
        **ratio,
    }
