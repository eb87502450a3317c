# SPDX-License-Identifier: Apache-2.0
"""A report as text: a summary that fits one screen, and the full text.

print(render_text(report))   # a sentence, a table of clusters, one row per backend on why not
print(render_all(report))    # the ops, layers and kernels of each cluster, every reason
"""

import io
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from blade.core.reason import Reason
from blade.report import (
    ORIGINAL,
    SEARCHING,
    ClusterReport,
    KernelTime,
    Report,
    Timing,
    Verdict,
    shape_text,
)
from blade.report.interval import between, disturbed_text, is_known, speed_interval
from blade.report.why_not import (
    losers,
    mean,
    speed,
    why_not,
)

WIDTH = 118
MOST_CLUSTERS = 12  # rows of the summary's table


def render_text(shown: Report) -> str:
    """The summary, which ``str`` of a report returns."""
    parts: list[RenderableType] = [*textwrap.wrap(summary(shown), WIDTH, break_on_hyphens=False)]
    if shown.clusters:
        parts.append(_overview(shown))
    if noise := disturbed_text([*shown.timings, *(t for c in shown.clusters for t in c.timings)]):
        parts.append(noise)
    if shown.gains:
        parts += textwrap.wrap(shown.gains, WIDTH, break_on_hyphens=False)
    for c in shown.clusters:
        if c.precision:
            parts.append(_quantized(c))
    if rows := why_not(shown):
        parts.append(_why_not_table(rows))
    parts += _paths(shown, MOST_CONDITIONS)[:MOST_PATHS]
    told = len(shown.all_reasons())
    parts.append(f"report.explain() tells everything: ops, layers, kernels and all {told} reasons.")
    return _text(parts)


def render_all(shown: Report) -> str:
    """All clusters, layers, kernels and reasons of a report."""
    lines = [f"  {c.name} ({c.sizes or c.backend}): {_counts(c.ops)}" for c in shown.clusters]
    if shown.outside:
        lines.append(f"  outside ({ORIGINAL}): {_counts(shown.outside)}")
    parts: list[RenderableType] = [
        *textwrap.wrap(summary(shown), WIDTH, break_on_hyphens=False),
        _coverage(shown),
        *lines,
    ]
    if shown.timings:
        parts.append(_overview(shown))
    if any(c.timings or c.verdict for c in shown.clusters):
        parts.append(_cluster_table(shown.clusters))
    parts += [_precision_table(c) for c in shown.clusters if c.precision]
    parts += [kernel_table(c.name, c.kernels) for c in shown.clusters if c.kernels]
    parts += _paths(shown)
    if reasons := shown.all_reasons():
        parts.append(reason_table(reasons))
    return _text([*parts, _footer(shown)])


def summary(shown: Report) -> str:
    """One sentence: model, speed-up over TorchScript and eager mode, backends, error, the next best."""
    name = shown.model or "The model"
    if shown.state == SEARCHING:
        return f"{name} runs as TorchScript while engines are made in the background."
    engines = [c for c in shown.clusters if c.backend != ORIGINAL]
    if not engines:
        return f"{name} stays TorchScript: no engine serves{_next_best(shown)}."
    used = ", ".join(dict.fromkeys(c.backend for c in engines))
    inside, total = _ops(shown)
    what = f"{inside} of {total} ops in {used}"
    errors = [c.verdict.error for c in engines if c.verdict is not None]
    exact = f", error at most {max(errors):.1e}" if errors else ""
    rows = _measured(shown)
    if not rows:
        return f"{name} runs {what}{exact}; its speed was not measured."
    speedup, low, high = speed_interval(rows)
    over = f"{speedup:.2f}x as fast as TorchScript"
    if is_known(rows):
        over += f" ({between(low, high)})"
    eager = [t.eager_ms / t.engine_ms for t in rows if t.eager_ms is not None]
    if len(eager) == len(rows):
        over += f" and {mean(eager):.2f}x as fast as eager"
    if len(rows) > 1:
        over += f" (mean of {len(rows)} samples)"
    part = "" if shown.timings else " where it was measured"
    return f"{name} runs {over}{part}, {what}{exact}{_next_best(shown)}."


def _next_best(shown: Report) -> str:
    """``; next best is onnxruntime (1.62x)``: another engine plan, or engine at the largest cluster."""
    others = [(speed(o.timings), o.name) for o in shown.compositions if o.timings and not o.chosen]
    where = ""
    if not others and shown.clusters:
        largest = max(shown.clusters, key=lambda c: sum(c.ops.values()))
        others = [(speed(o.timings), o.backend) for c, o in losers(shown) if c is largest]
        where = f" on {largest.name}"
    if not others:
        return ""
    times, name = max(others)
    return f"; next best is {name} ({times:.2f}x{where})"


def _measured(shown: Report) -> tuple[Timing, ...]:
    """Timings of the whole module; if it was not measured, of the cluster that takes longest."""
    if shown.timings:
        return shown.timings
    timed = [c.timings for c in shown.clusters if c.timings]
    return max(timed, key=lambda rows: sum(t.original_ms for t in rows), default=())


def _ops(shown: Report) -> tuple[int, int]:
    """The number of ops in engines, and of all ops."""
    inside = sum(sum(c.ops.values()) for c in shown.clusters if c.backend != ORIGINAL)
    total = sum(shown.outside.values()) + sum(sum(c.ops.values()) for c in shown.clusters)
    return inside, total


def _coverage(shown: Report) -> str:
    engines = [c for c in shown.clusters if c.backend != ORIGINAL]
    inside, total = _ops(shown)
    return (
        f"{len(engines)} of {len(shown.clusters)} clusters run in engines: {inside} of {total} ops"
    )


def _quantized(cluster: ClusterReport) -> str:
    layers = cluster.precision
    n = sum(p.precision not in ("fp32", "fp16", "bf16") for p in layers)
    return f"{cluster.name}: {n} of {len(layers)} layers quantized"


def _text(parts: Iterable[RenderableType]) -> str:
    out = Console(file=io.StringIO(), width=WIDTH, force_terminal=False, color_system=None)
    for part in parts:
        out.print(Text(part) if isinstance(part, str) else part)
    assert isinstance(out.file, io.StringIO)
    return "\n".join(line.rstrip() for line in out.file.getvalue().splitlines())


def _plain_table(title: str = "") -> Table:
    return Table(
        title=title or None,
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )


def _overview(shown: Report) -> Table:
    """A table of the whole model and its clusters, the slowest first; one row per sample."""
    ranked = sorted(shown.clusters, key=lambda c: -sum(t.original_ms for t in c.timings))
    table = _plain_table()
    table.add_column("", no_wrap=True)
    table.add_column("backend", no_wrap=True)
    table.add_column("ops", justify="right", no_wrap=True)
    table.add_column("sample shapes", min_width=14)
    for name in ("eager ms", "TorchScript ms", "blade ms", "speed-up", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    if shown.timings:
        _add_rows(table, ("whole model", "", ""), shown.timings, None)
    for c in ranked[:MOST_CLUSTERS]:
        lead = (c.name, c.backend, str(sum(c.ops.values())))
        _add_rows(table, lead, c.timings, c.verdict)
    rest = ranked[MOST_CLUSTERS:]
    if rest:
        ops = sum(sum(c.ops.values()) for c in rest)
        table.add_row(f"{len(rest)} more clusters", "", str(ops))
    if shown.outside:
        table.add_row("outside", ORIGINAL, str(sum(shown.outside.values())))
    return table


def _add_rows(
    table: Table, lead: tuple[str, ...], timings: Sequence[Timing], verdict: Verdict | None
) -> None:
    error = "" if verdict is None else f"{verdict.error:.1e}"
    if not timings:
        table.add_row(*map(Text, (*lead, "not measured", "", "", "", "", error)))
    for i, t in enumerate(timings):
        eager = "" if t.eager_ms is None else f"{t.eager_ms:.3f}"
        shapes, *numbers = _timing_cells(t)
        first = (*lead, error) if i == 0 else ("",) * (len(lead) + 1)
        table.add_row(*map(Text, (*first[:-1], shapes, eager, *numbers, first[-1])))


def _why_not_table(rows: Sequence[tuple[str, str]]) -> Table:
    table = _plain_table("Why not more, or by another backend")
    table.add_column("backend", no_wrap=True)
    table.add_column("why not", ratio=1)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def kernel_table(name: str, kernels: Sequence[KernelTime]) -> Table:
    """One row per kernel; times are of all its calls, at each sample."""
    table = _plain_table(f"Kernels of {name}")
    table.add_column("kernel", no_wrap=True)
    for column in ("calls", "ms per sample", "share"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("computes", ratio=1)
    total = sum(k.ms[-1] for k in kernels if k.ms)
    for k in kernels:
        share = f"{k.ms[-1] / total:.0%}" if k.ms and total else ""
        times = "  ".join(f"{ms:.3f}" for ms in k.ms)
        table.add_row(*map(Text, (k.name, str(k.calls), times, share, k.ops)))
    return table


def _cluster_table(clusters: Iterable[ClusterReport]) -> Table:
    """One row per sample; ``max error`` is over all verification cases."""
    table = _plain_table()
    table.add_column("cluster", no_wrap=True)
    table.add_column("backend", no_wrap=True)
    table.add_column("sample shapes", min_width=14)
    for name in ("original ms", "blade ms", "speed-up", "max error", "vs fp64 (orig.)", "tried"):
        table.add_column(name, justify="right", no_wrap=True)
    for c in clusters:
        rows = [_timing_cells(t) for t in c.timings] or [("not measured", "", "", "")]
        for i, cells in enumerate(rows):
            lead = (c.name, c.backend) if i == 0 else ("", "")
            tail = _verdict_cells(c.verdict) if i == 0 else ("", "", "")
            table.add_row(*map(Text, (*lead, *cells, *tail)))
    return table


def _timing_cells(t: Timing) -> tuple[str, str, str, str]:
    speedup = f"{t.speedup:.2f}x"
    if is_known([t]):
        speedup += f" ({t.low:.2f}-{t.high:.2f})"
    return shape_text(t.shapes), f"{t.original_ms:.3f}", f"{t.engine_ms:.3f}", speedup


def _verdict_cells(verdict: Verdict | None) -> tuple[str, str, str]:
    if verdict is None:
        return "", "", ""
    tried = f"{verdict.checked} of {verdict.checked + verdict.refused}"
    if verdict.error_fp64 is None:
        return f"{verdict.error:.1e}", "no fp64 run", tried
    both = f"{verdict.error_fp64:.1e} ({verdict.original_error_fp64:.1e})"
    return f"{verdict.error:.1e}", both, tried


def _precision_table(cluster: ClusterReport) -> Table:
    """One row per layer that could be quantized."""
    table = _plain_table(f"Precision of {_quantized(cluster)}")
    table.add_column("layer", overflow="fold")
    for name in ("op", "precision"):
        table.add_column(name, no_wrap=True)
    for name in ("error alone", "saved ms"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("why", ratio=1)
    for p in cluster.precision:
        error = "" if p.error is None else f"{p.error:.1e}"
        saved = "" if p.saved_ms is None else f"{p.saved_ms:.3f}"
        table.add_row(*map(Text, (p.layer, p.op, p.precision, error, saved, p.why)))
    return table


def _counts(ops: Mapping[str, int], most: int = 8) -> str:
    ordered = Counter(ops).most_common()
    text = ", ".join(f"{n} {kind.removeprefix('aten::')}" for kind, n in ordered[:most])
    rest = sum(n for _, n in ordered[most:])
    return f"{sum(ops.values())} ops: {text}" + (f", {rest} others" if rest else "")


def reason_table(reasons: Iterable[Reason]) -> Table:
    """A table to print. Equal decisions are one row, with the first subject and the number of subjects."""
    table = _plain_table("Why not otherwise")
    table.add_column("stage", no_wrap=True)
    table.add_column("code", no_wrap=True)
    table.add_column("backend", no_wrap=True)
    table.add_column("subject", max_width=24)
    table.add_column("detail", ratio=1)
    rows: dict[tuple[str, str, str, str], list[str]] = {}
    for r in reasons:
        key = (r.stage.value, r.code.value, r.backend or "", r.detail)
        rows.setdefault(key, []).append(r.subject)
    for (*cells, detail), subjects in rows.items():
        n = len(subjects)
        table.add_row(
            *map(Text, (*cells, subjects[0], f"({n} times) {detail}" if n > 1 else detail))
        )
    return table


MOST_PATHS, MOST_CONDITIONS = 3, 4
"""Paths, and conditions of each, that the summary shows; ``explain`` shows all."""


def _paths(shown: Report, most: int | None = None) -> list[str]:
    """A line for each captured path that answers under a condition only, with at most so many different ones."""
    lines = []
    for k, conditions in enumerate(shown.paths, start=1):
        counts = Counter(conditions)
        told = [f"{one} ({n} times)" if n > 1 else one for one, n in counts.items()]
        if most is not None and len(told) > most:
            told[most:] = [f"{len(told) - most} more hold"]
        if told:
            lines.append(f"Path {k} answers where {'; '.join(told)}.")
    return lines


def _footer(shown: Report) -> str:
    built = ", ".join(f"{name} {version}" for name, version in shown.versions.items())
    took = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in shown.seconds.items())
    when = f" at {shown.date}" if shown.date else ""
    return f"Built{when} with {built} on {shown.cpu or 'an unknown CPU'}.\nSeconds: {took}"
