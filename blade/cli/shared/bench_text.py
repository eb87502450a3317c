# SPDX-License-Identifier: Apache-2.0
"""The answer of ``bench`` as text: a line, tables of times, latencies, throughput and kernels, notes."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from blade.cli.shared.result import add_row, plain_table, to_text
from blade.report import KernelTime, Timing, shape_text
from blade.report.interval import between, disturbed_text
from blade.report.text import kernel_table

Data = Mapping[str, Any]

REQUIRED = {
    "passed": "at least {:.2f}x was required",
    "failed": "at least {:.2f}x was required: it is slower than that",
    "inconclusive": "at least {:.2f}x was required: inconclusive, the interval includes it",
}


def render(data: Data, rows: Sequence[Timing], kernels: Mapping[str, Sequence[KernelTime]]) -> str:
    """Return the text of ``data``, whose samples ``rows`` are of."""
    low, high = data["interval"]
    first = (
        f"{data['file']}: {data['speedup']:.2f}x the original's speed ({between(low, high)}; "
        "geometric mean)"
    )
    if data["required"] is not None:
        first += f"; {REQUIRED[data['verdict']].format(data['required'])}"
    told = f"inputs: {data['inputs']}; {data['threads']} threads"
    if data["machine"]["after"]:
        told += f"; {data['machine']['after']}"
    parts: list[str | Table] = [_times(data, rows), _latencies(data)]
    if data["samples"][0]["throughput"] is not None:
        parts.append(_throughput(data))
    parts += [kernel_table(name, every) for name, every in kernels.items()]
    parts += [first, told]
    if noise := disturbed_text(rows):
        parts.append(noise)
    return to_text(*parts, *sorted({*_peers_notes(data), *_engine_notes(data)}))


def _times(data: Data, rows: Sequence[Timing]) -> Table:
    names = list(data["samples"][0]["peers"])
    right = ("original ms", "blade ms", "speed-up", "interval", *names)
    table = plain_table("sample", *right, right=right)
    for timing, sample in zip(rows, data["samples"], strict=True):
        others = [_peer_cell(sample["peers"][name]) for name in names]
        numbers = (f"{timing.original_ms:.3f}", f"{timing.engine_ms:.3f}", f"{timing.speedup:.2f}x")
        between_text = between(timing.low, timing.high)
        add_row(table, shape_text(timing.shapes), *numbers, between_text, *others)
    return table


def _latencies(data: Data) -> Table:
    right = ("p50 ms", "p90 ms", "p99 ms", "calls")
    table = plain_table("latency of single calls", "", *right, right=right)
    for sample in data["samples"]:
        for side in ("original", "blade"):
            one = sample["latency"][side]
            shown = [f"{one[p]:.3f}" for p in ("p50", "p90", "p99")]
            add_row(table, shape_text(sample["shapes"]), side, *shown, one["calls"])
    return table


def _throughput(data: Data) -> Table:
    right = ("calls/s", "rows/s", "p50 ms", "p90 ms", "p99 ms", "speed-up")
    callers = data["samples"][0]["throughput"]["callers"]
    table = plain_table(f"throughput of {callers} callers", "", *right, right=right)
    for sample in data["samples"]:
        found = sample["throughput"]
        low, high = found["interval"]
        for side in ("original", "blade"):
            one = found[side]
            shown = [f"{one['latency'][p]:.3f}" for p in ("p50", "p90", "p99")]
            rates = (f"{one['calls_per_s']:.1f}", f"{one['rows_per_s']:.1f}")
            ratio = f"{found['speedup']:.2f}x ({low:.2f}-{high:.2f})" if side == "blade" else ""
            add_row(table, shape_text(sample["shapes"]), side, *rates, *shown, ratio)
    return table


def _peers_notes(data: Data) -> Iterator[str]:
    for sample in data["samples"]:
        for name, one in sample["peers"].items():
            if why := one.get("why_not"):
                yield f"{name}: {why}"


def _engine_notes(data: Data) -> Iterator[str]:
    for name, counters in data["engines"].items():
        misses = {k: n for k, n in counters.items() if not k.startswith(("graph_", "calls"))}
        if missed := {k: n for k, n in misses.items() if k != "engine_runs" and n}:
            told = ", ".join(f"{k} {n}" for k, n in missed.items())
            yield (
                f"{name}: {counters['engine_runs']} of {counters['calls']} calls ran in the "
                f"engine ({told})"
            )


def _peer_cell(one: Mapping[str, Any]) -> str:
    if "why_not" in one:
        return "-"
    low, high = one["interval"]
    return f"{one['ms']:.3f} ({one['blade_speedup']:.2f}x, {low:.2f}-{high:.2f})"
