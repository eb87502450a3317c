# SPDX-License-Identifier: Apache-2.0
"""A report as text: clusters with their times and errors, layers with their precision, every reason.

print(render(report))
"""

import io
from collections import Counter
from collections.abc import Iterable, Mapping

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from blade.reason import Reason
from blade.report import ORIGINAL, ClusterReport, Report, Timing, Verdict, shape_text


def render(shown: Report) -> str:
    """What ``str`` of a report is."""
    out = Console(file=io.StringIO(), width=118, force_terminal=False, color_system=None)
    engines = [c for c in shown.clusters if c.backend != ORIGINAL]
    inside = sum(sum(c.ops.values()) for c in engines)
    total = sum(shown.outside.values()) + sum(sum(c.ops.values()) for c in shown.clusters)
    lines = [
        f"{len(engines)} of {len(shown.clusters)} clusters run in engines: {inside} of {total} ops"
    ]
    lines += [f"  {c.name} ({c.sizes or c.backend}): {_counts(c.ops)}" for c in shown.clusters]
    if shown.outside:
        lines.append(f"  outside ({ORIGINAL}): {_counts(shown.outside)}")
    out.print(Text("\n".join(lines)))
    if any(c.timings or c.verdict for c in shown.clusters):
        out.print(_cluster_table(shown.clusters))
    for c in shown.clusters:
        if c.precision:
            out.print(_precision_table(c))
    if reasons := shown.all_reasons():
        out.print(reason_table(reasons))
    out.print(Text(_footer(shown)))
    assert isinstance(out.file, io.StringIO)
    return "\n".join(line.rstrip() for line in out.file.getvalue().splitlines())


def _cluster_table(clusters: Iterable[ClusterReport]) -> Table:
    """One row per sample; ``max error`` is over all samples and everything else that was tried."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
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
    return shape_text(t.shapes), f"{t.original_ms:.3f}", f"{t.engine_ms:.3f}", f"{t.speedup:.2f}x"


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
    quantized = sum(p.precision not in ("fp32", "fp16", "bf16") for p in cluster.precision)
    table = Table(
        title=f"Precision of {cluster.name}: {quantized} of {len(cluster.precision)} layers quantized",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
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
    """For printing. Equal decisions are one row, with the first of what they are about and how many there are."""
    table = Table(
        title="Why not otherwise",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
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


def _footer(shown: Report) -> str:
    built = ", ".join(f"{name} {version}" for name, version in shown.versions.items())
    took = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in shown.seconds.items())
    return f"Built with {built} on {shown.cpu or 'an unknown CPU'}.\nSeconds: {took}"
