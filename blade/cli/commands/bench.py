# SPDX-License-Identifier: Apache-2.0
"""``python -m blade bench OUT.pt``: compare the optimized file with its own original, and with peers."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils import _pytree as pytree

from blade.cli.shared import peers
from blade.cli.shared.files import (
    read_model,
    read_report,
    read_samples,
    read_torchscript,
)
from blade.cli.shared.options import (
    Commands,
    UsageError,
    add_command,
    add_inputs,
    add_pickle,
)
from blade.cli.shared.progress_bar import progress_bar
from blade.cli.shared.result import (
    CommandResult,
    ExitCode,
    add_row,
    plain_table,
    to_text,
)
from blade.core.progress import announce
from blade.core.reason import Reason
from blade.errors import InputError
from blade.report import ENGINES, Report, Timing, rearm, shape_text, stats
from blade.report.graph import InputReport
from blade.report.interval import speed
from blade.timing.interleaved import measure

if TYPE_CHECKING:
    from blade.runtime import Engine

TEXT = """Time an optimized file against its own original, the two in turns; medians of rounds.

The original is the same file with its engines switched off. Samples are those of --inputs; without it,
random ones of the sizes, types and ranges of values that the file remembers from `optimize`. With
--original MODEL.pt the libraries that are installed and can run that model are measured, too.
The code in the file runs: give it only files that you trust."""

DTYPES = {name: kind for name, kind in vars(torch).items() if isinstance(kind, torch.dtype)}
"""Dtypes by the names that reports use."""


@dataclass(frozen=True)
class BenchSample:
    """One call: positional and keyword arguments."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        leaves = pytree.tree_leaves((self.args, dict(self.kwargs)))
        return tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))


def add(commands: Commands, shared: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser = add_command(commands, shared, "bench", TEXT)
    parser.add_argument("file", metavar="OUT.pt", help="a file that optimize wrote")
    add_inputs(parser, required=False)
    parser.add_argument("--original", metavar="MODEL.pt", help="the model that was optimized")
    known = ",".join(peers.PEERS)
    parser.add_argument("--peers", metavar="A,B", help=f"which ones (default: {known})")
    parser.add_argument("--rounds", type=_positive, default=15, help="per sample (default 15)")
    parser.add_argument(
        "--require", type=float, metavar="RATIO", help="exit code 1 if the speed-up is less"
    )
    add_pickle(parser)
    return parser


def run(args: argparse.Namespace) -> CommandResult:
    wanted = _wanted(args)
    path = Path(args.file)
    shown = read_report(path)
    optimized = read_torchscript(path)
    if args.inputs is None:
        samples = remembered(shown, path)
    else:
        samples = given(read_samples(Path(args.inputs), allow_pickle=args.allow_pickle))
    original = read_torchscript(path)  # a separate copy, so that nothing is switched between calls
    switch_off(original)
    with progress_bar("bench"), torch.no_grad():
        _check(optimized, samples, args.inputs)
        rows = []
        for done, sample in enumerate(samples):
            announce("original", done, len(samples), shape_text(t.shape for t in sample.tensors))
            rows.append(_measure(optimized, original, sample, args.rounds))
        counters = stats(optimized)
        others = _peers(args, wanted, optimized, samples) if args.original else {}
    speedup, _ = speed(rows)
    data = {
        "file": str(path),
        "inputs": args.inputs or "remembered shapes, random contents",
        "threads": torch.get_num_threads(),
        "speedup": speedup,
        "samples": [
            {**vars(t), "speedup": t.speedup, "peers": {n: p[i] for n, p in others.items()}}
            for i, t in enumerate(rows)
        ],
        "engines": counters,
    }
    slower = args.require is not None and speedup < args.require
    return CommandResult(
        data, _render(data, rows, args.require), ExitCode.FOUND if slower else ExitCode.OK
    )


def given(inputs: Any) -> list[BenchSample]:
    """The user's samples."""
    return [_sample(one) for one in (inputs if isinstance(inputs, list) else [inputs])]


def remembered(shown: Report, path: Path) -> list[BenchSample]:
    """Random samples with the sizes, dtypes and ranges of the report; ``InputError`` if it has none."""
    if not shown.inputs:
        raise InputError(
            f"{path}: it does not say what its samples looked like (they held more than tensors, or it was "
            "written by an older blade); give them with --inputs SAMPLES.pt"
        )
    generator = torch.Generator().manual_seed(0)
    return [BenchSample(tuple(make(one, generator) for one in row), {}) for row in shown.inputs]


def make(one: InputReport, generator: torch.Generator) -> torch.Tensor:
    """A random tensor between the smallest and largest value seen; standard normal if these are unknown."""
    dtype = DTYPES.get(one.dtype)
    if dtype is None:
        raise InputError(f"{one.name}: no random tensors are made of dtype {one.dtype!r}")
    low, high = one.low, one.high
    if dtype == torch.bool:
        return torch.rand(one.shape, generator=generator) * 2 < (0 if high == 0 else 1 + (low or 0))
    if dtype.is_complex:
        return torch.randn(one.shape, generator=generator, dtype=dtype)
    if not dtype.is_floating_point:
        top = int(high or 0) + 1
        return torch.randint(int(low or 0), top, one.shape, generator=generator).to(dtype)
    if low is None or high is None:
        return torch.randn(one.shape, generator=generator).to(dtype)
    unit = torch.rand(one.shape, generator=generator, dtype=torch.float64)
    return (unit * (high - low) + low).to(dtype)


def _sample(one: Any) -> BenchSample:
    if isinstance(one, Mapping):
        return BenchSample((), dict(one))
    return BenchSample((one,) if isinstance(one, torch.Tensor) else tuple(one), {})


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
    ratio = {"blade_speedup": timing.speedup, "spread": timing.spread}
    return {"ms": timing.original_ms, "blade_ms": timing.engine_ms, **ratio}


def _render(data: Mapping[str, Any], rows: Sequence[Timing], required: float | None) -> str:
    names = list(data["samples"][0]["peers"])
    right = ("original ms", "blade ms", "speed-up", "noise", *names)
    table = plain_table("sample", *right, right=right)
    for timing, sample in zip(rows, data["samples"], strict=True):
        others = [_peer_cell(sample["peers"][name]) for name in names]
        numbers = (f"{timing.original_ms:.3f}", f"{timing.engine_ms:.3f}", f"{timing.speedup:.2f}x")
        add_row(table, shape_text(timing.shapes), *numbers, f"{timing.spread:.1%}", *others)
    lines = [f"{data['file']}: {data['speedup']:.2f}x the original's speed (geometric mean)"]
    if required is not None:
        lines[0] += f"; at least {required:.2f}x was required"
    notes = {
        f"{name}: {why}"
        for sample in data["samples"]
        for name in names
        if (why := sample["peers"][name].get("why_not"))
    }
    for name, counters in data["engines"].items():
        misses = {k: n for k, n in counters.items() if not k.startswith(("graph_", "calls"))}
        if missed := {k: n for k, n in misses.items() if k != "engine_runs" and n}:
            told = ", ".join(f"{k} {n}" for k, n in missed.items())
            notes.add(
                f"{name}: {counters['engine_runs']} of {counters['calls']} calls ran in the "
                f"engine ({told})"
            )
    told_inputs = f"inputs: {data['inputs']}; {data['threads']} threads"
    return to_text(table, *lines, told_inputs, *sorted(notes))


def _peer_cell(one: Mapping[str, Any]) -> str:
    return "-" if "why_not" in one else f"{one['ms']:.3f} ({one['blade_speedup']:.2f}x)"
