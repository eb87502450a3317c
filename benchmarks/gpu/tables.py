# SPDX-License-Identifier: Apache-2.0
"""What was measured, as tables and as lines of JSON."""

import datetime
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gpu.rounds import Runner


def median_ms(seconds: Sequence[float] | None) -> str:
    return f"{statistics.median(seconds) * 1e3:.3f}" if seconds else "-"


def calls_table(title: str, runners: Mapping[str, Runner], shapes: Sequence[str]) -> Table:
    """Median milliseconds of a call per peer and shape, and what it costs to get there.

    Per shape: kernels + copies on the device and calls of the host per call, in the same order as times.
    """
    table = Table(title=f"{title}: median ms of a call, waited for")
    table.add_column("peer", no_wrap=True)
    for shape in shapes:
        table.add_column(shape, justify="right")
    for name in ("compile, s", "error", "kernels", "host calls", "MiB"):
        table.add_column(name, justify="right")
    for peer, one in runners.items():
        answer = one.answer
        if not answer.get("times"):
            continue
        work = (answer.get("work") or {}).get(shapes[0])
        errors = answer.get("errors") or {}
        table.add_row(
            peer,
            *(median_ms(answer["times"].get(shape)) for shape in shapes),
            f"{answer['compile_s']:.1f}",
            f"{max(errors.values()):.0e}" if errors else "-",
            f"{work['kernels']:.0f}+{work['copies']:.0f}" if work else "-",
            f"{work['host_calls']:.0f}" if work else "-",
            f"{answer['memory']:.0f}" if answer.get("memory") else "-",
        )
    return table


def device_table(title: str, runners: Mapping[str, Runner], shapes: Sequence[str]) -> Table:
    """Microseconds that the device itself works per call: what is left of a call is waiting."""
    table = Table(title=f"{title}: ms of device work per call (calls not waited for, ms)")
    table.add_column("peer", no_wrap=True)
    for shape in shapes:
        table.add_column(shape, justify="right")
    for peer, one in runners.items():
        work, queued = one.answer.get("work") or {}, one.answer.get("queued") or {}
        if not queued:
            continue
        cells = []
        for shape in shapes:
            busy = work.get(shape)
            busy_text = f"{busy['device_us'] / 1e3:.3f}" if busy else "-"
            cells.append(f"{busy_text} ({queued[shape] * 1e3:.3f})")
        table.add_row(peer, *cells)
    return table


def breakdown_table(peer: str, found: Mapping[str, Mapping[str, Sequence[float]]]) -> Table:
    """A row per kernel, the longest over all shapes first; per shape how often it runs and for how long."""
    table = Table(title=f"{peer}: runs of each kernel in a call x microseconds of one")
    table.add_column("kernel", overflow="fold")
    for shape in found:
        table.add_column(shape, justify="right", no_wrap=True)
    total: dict[str, float] = {}
    for kernels in found.values():
        for name, (_, us) in kernels.items():
            total[name] = total.get(name, 0.0) + us
    for name in sorted(total, key=lambda n: -total[n])[:30]:
        cells = [kernels.get(name) for kernels in found.values()]
        table.add_row(
            name[:70], *("" if c is None else f"{c[0]:.0f} x {c[1] / c[0]:.1f}" for c in cells)
        )
    sums = [sum(us for _, us in kernels.values()) for kernels in found.values()]
    table.add_section()
    table.add_row("all of them, us", *(f"{us:.0f}" for us in sums))
    return table


def plain(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    table = Table(title=title)
    for k, column in enumerate(columns):
        table.add_column(column, justify="right" if k else "left", no_wrap=not k)
    for row in rows:
        table.add_row(*(f"{c:.4g}" if isinstance(c, float) else str(c) for c in row))
    return table


def remarks(console: Console, runners: Mapping[str, Runner]) -> None:
    """Who failed, whose values are wrong, and who answered inside of blade's modules."""
    for peer, one in runners.items():
        if one.failed:
            console.print(f"{peer}: FAILED: {one.failed}", style="yellow", markup=False)
        if wrong := one.answer.get("wrong"):
            console.print(f"{peer}: WRONG VALUES: {wrong}", style="red", markup=False)
        if found := one.answer.get("served"):
            parts = [f"{found['engine_runs']} engine runs in {found['clusters']}"]
            parts += [f"{k} {v:.1f} s" for k, v in found["seconds"].items() if v >= 0.05]
            console.print(f"{peer}: {', '.join(parts)}", markup=False)
            refused = [c for c in found["counters"] if c.get("fallbacks")]
            for text in [str(c) for c in refused] + found["reasons"]:
                console.print(f"  {text}", markup=False)


def write(
    path: Path | None,
    bench: str,
    subject: str,
    runners: Mapping[str, Runner],
    facts: Mapping[str, Any],
    shorten: Callable[[dict[str, Any]], dict[str, Any]] = lambda answer: answer,
) -> None:
    """One line per peer, appended to ``path``."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    with path.open("a") as out:
        for peer, one in runners.items():
            common = {"bench": bench, "subject": subject, "peer": peer, "time": now, **facts}
            line = {**common, "failed": one.failed or None, **shorten(dict(one.answer))}
            out.write(json.dumps(line) + "\n")


def with_medians(answer: dict[str, Any]) -> dict[str, Any]:
    """``times`` become their medians, least and number."""
    times = answer.pop("times", None) or {}
    answer["ms"] = {
        key: {
            "median": round(statistics.median(found) * 1e3, 5),
            "min": round(min(found) * 1e3, 5),
            "p90": round(sorted(found)[int(0.9 * (len(found) - 1))] * 1e3, 5),
            "calls": len(found),
        }
        for key, found in times.items()
        if found
    }
    return answer
