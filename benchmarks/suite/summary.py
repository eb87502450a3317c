# SPDX-License-Identifier: Apache-2.0
"""Per model and per family: blade against the best peer that is right, as Markdown.

    print(summary(Lines(path).found(), "cpu"))

A speed is eager's time over the peer's in the same rounds. On a GPU, where the host's Python decides how fast eager is,
all lines of a shape have its least time in any run: two peers compare by their own times, on whichever card each ran.
blade passes at a shape if it is right and no peer that is right is faster by more than ``LEVEL``.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from suite.entry import FAMILIES
from suite.lines import Line
from suite.peers import LESS_EXACT

LEVEL = 1.03  # what two runs of one program differ by
NAMES = {
    "reduce_overhead": "torch.compile, reduce-overhead",
    "max_autotune": "torch.compile, max-autotune",
    "inductor": "Inductor",
    "onnxruntime": "ONNX Runtime",
    "openvino": "OpenVINO",
    "openvino_default": "OpenVINO as it comes",
    "torchscript": "TorchScript",
}


@dataclass(frozen=True)
class Row:
    """One model at one shape. ``ahead``: blade's speed over the best peer's; ``None``: one of them has none."""

    family: str
    model: str
    shape: str
    own: Line | None
    speeds: dict[str, float]
    best: str
    ahead: float | None
    right: bool

    @property
    def passes(self) -> bool:
        return self.right and (self.ahead is None or self.ahead >= 1 / LEVEL)


def peer_name(name: str) -> str:
    return name.removeprefix("cuda_")


def speed(line: Line) -> float | None:
    """Over eager, by the clock; of one thread by the time of the process, which neighbours do not take from it."""
    kind = _kind(line)
    own, anchor = line.get(kind), line.get(f"anchor_{kind}")
    return anchor / own if own and anchor else None


def with_least_anchors(lines: Sequence[Line]) -> list[Line]:
    """``lines``, those of one model and shape on GPUs with the least of eager's times in any run."""
    least: dict[tuple[str, ...], float] = {}
    for line in lines:
        anchor = line.get("anchor_ms")
        if line["device"] != "cpu" and anchor:
            least[_place(line)] = min(anchor, least.get(_place(line), math.inf))
    return [
        {**line, "anchor_ms": least[_place(line)]}
        if line.get("anchor_ms") and _place(line) in least
        else line
        for line in lines
    ]


def _place(line: Line) -> tuple[str, ...]:
    return tuple(str(line.get(key)) for key in ("mode", "model", "shape", "dtype"))


def _kind(line: Line) -> str:
    return "cpu_ms" if line["device"] == "cpu" and line["threads"] == 1 else "ms"


def rows(lines: Iterable[Line], device: str, mode: str) -> list[Row]:
    given = with_least_anchors([x for x in lines if x["device"] == device and x["mode"] == mode])
    found = []
    for model in dict.fromkeys(line["model"] for line in given):
        mine = [line for line in given if line["model"] == model]
        shapes = dict.fromkeys(line["shape"] for line in mine if line["shape"])
        found += [_row(mine, shape) for shape in shapes or [""]]
    order = {family: k for k, family in enumerate(FAMILIES)}
    return sorted(found, key=lambda row: order[row.family])


def _row(mine: Sequence[Line], shape: str) -> Row:
    own, speeds, less = None, {}, {}
    for line in mine:
        name = peer_name(line["peer"])
        if name == "blade" and line["shape"] in (shape, ""):
            own = line
        found = speed(line) if line["shape"] == shape else None
        if found is not None and not line.get("wrong"):
            (less if name in LESS_EXACT else speeds)[name] = found
    others = {name: value for name, value in speeds.items() if name != "blade"}
    best = max(others, key=lambda name: others[name], default="")
    ahead = speeds["blade"] / others[best] if best and "blade" in speeds else None
    right = own is not None and not own["failed"] and not own.get("wrong")
    first = mine[0]
    return Row(first["family"], first["model"], shape, own, {**speeds, **less}, best, ahead, right)


def mean(values: Iterable[float]) -> float | None:
    """The geometric one."""
    logs = [math.log(value) for value in values if value > 0]
    return math.exp(statistics.fmean(logs)) if logs else None


def summary(lines: Sequence[Line], device: str) -> str:
    parts = []
    for mode in ("inference", "training"):
        measured = [row for row in rows(lines, device, mode) if row.own is not None]
        made = [row for row in measured if "eager" in row.speeds]
        if made:
            parts += [f"## {device}, {mode}", families(made), models(made), failures(made)]
        gone = {row.model: row for row in measured if "eager" not in row.speeds}
        parts += [f"* {name}: left out, eager has no time" for name in gone]
    skipped = [x for x in lines if x["device"] == device and x["mode"] == "skipped"]
    parts += [f"* {line['model']}: skipped: {line['failed']}" for line in skipped]
    return "\n\n".join(part for part in parts if part)


def families(made: Sequence[Row]) -> str:
    """Pass rates of models (at all their shapes), and geometric means over shapes."""
    table = [
        "| family | models | right | right and not behind | over the best peer | over eager | compile, s "
        "| ops in engines |"
    ]
    table.append("|---|--:|--:|--:|--:|--:|--:|--:|")
    for family in (*FAMILIES, "all"):
        own = [row for row in made if family in (row.family, "all")]
        if not own:
            continue
        names = {row.model for row in own}
        right = {n for n in names if all(row.right for row in own if row.model == n)}
        passing = {n for n in names if all(row.passes for row in own if row.model == n)}
        ahead = mean(row.ahead for row in own if row.ahead is not None)
        eager = mean(row.speeds["blade"] for row in own if "blade" in row.speeds)
        first = {row.model: row.own for row in own if row.own is not None}
        compiled = [x["compile_s"] for x in first.values() if x.get("compile_s")]
        served = [x["served"] for x in first.values() if x.get("served")]
        share = sum(s["ops"] for s in served) / max(1, sum(s["all_ops"] for s in served))
        cells = [
            family,
            len(names),
            _share(right, names),
            _share(passing, names),
            _times(ahead),
            _times(eager),
        ]
        cells += [
            f"{statistics.median(compiled):.1f}" if compiled else "-",
            f"{share:.1%}" if served else "-",
        ]
        table.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(table)


def _share(part: set[str], whole: set[str]) -> str:
    return f"{len(part)} ({len(part) / len(whole):.0%})"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def models(made: Sequence[Row]) -> str:
    """A row per model; what is measured per shape has its shapes' values in their order."""
    peers = [p for p in dict.fromkeys(n for row in made for n in row.speeds) if p != "blade"]
    peers = [p for p in peers if p != "eager"]
    head = ["model", "shapes", "eager, ms", "blade", *(NAMES.get(p, p) for p in peers)]
    head += ["over the best peer", "error", "ops in engines", "compile, s", "peak, MiB"]
    table = ["| " + " | ".join(head) + " |", "|---|---|" + "--:|" * (len(head) - 2)]
    for name in dict.fromkeys(row.model for row in made):
        own = [row for row in made if row.model == name]
        cells = [name, " / ".join(row.shape or "-" for row in own), _each(own, _eager)]
        cells += [_each(own, partial(_speed, peer=peer)) for peer in ("blade", *peers)]
        cells += [_each(own, lambda row: _times(row.ahead)), _error(own), *_costs(own[0].own or {})]
        table.append("| " + " | ".join(cells) + " |")
    return "\n".join(table)


def _each(own: Sequence[Row], one: Callable[[Row], str]) -> str:
    texts = [one(row) for row in own]
    return "-" if set(texts) == {"-"} else " / ".join(texts)


def _costs(line: Line) -> list[str]:
    """Ops in engines, seconds to compile, MiB."""
    served, memory = line.get("served") or {}, line.get("memory") or {}
    peak = memory.get("device_mb", memory.get("peak_mb"))
    return [
        f"{served['ops']}/{served['all_ops']}" if served else "-",
        f"{line['compile_s']:.1f}" if line.get("compile_s") else "-",
        "-" if peak is None else f"{peak:.0f}",
    ]


def _speed(row: Row, peer: str) -> str:
    if peer not in row.speeds:
        return "-"
    text = f"{row.speeds[peer]:.2f}x"
    return f"**{text}**" if row.speeds[peer] == max(row.speeds.values()) else text


def _eager(row: Row) -> str:
    value = row.own.get(f"anchor_{_kind(row.own)}") if row.own else None
    return "-" if value is None else f"{value:.3g}"


def _error(own: Sequence[Row]) -> str:
    """The largest."""
    if any(row.own is None or row.own["failed"] for row in own):
        return "fails"
    found = [row.own["error"] for row in own if row.own and row.own.get("error") is not None]
    text = f"{max(found):.0e}" if found else "-"
    return text if all(row.right for row in own) else f"WRONG {text}"


def failures(made: Sequence[Row]) -> str:
    """What is not right, what fell back, and what is behind."""
    found = []
    for row in made:
        line = row.own or {}
        served, name = line.get("served") or {}, f"* {row.model} {row.shape}"
        if served.get("fallbacks"):
            found.append(f"{name}: {served['fallbacks']} calls of engines fell back")
        if served.get("original"):
            found.append(f"{name}: {served['original']} calls went to the original model")
        if row.right and row.passes:
            continue
        what = (
            line.get("failed")
            or line.get("wrong")
            or f"{row.ahead:.2f}x of {NAMES.get(row.best, row.best)}"
        )
        found.append(f"{name}: {str(what)[:300]}")
    return "\n".join(found)
