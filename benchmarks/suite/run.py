# SPDX-License-Identifier: Apache-2.0
"""Cells prepared side by side, then timed in turns, model by model; every finished one is written at once.

A model's cells live at the same time, each in a process of its own, and one at a time is timed: what disturbs a
round disturbs all of them. A run that finds a part of a model's cells done prepares the others and eager again:
"anchor_ms" is eager's time in the same rounds, so that cells of different runs compare by their speed over eager.
"""

import multiprocessing as mp
import os
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu.device import Where
from gpu.remote import PeerFailed, Remote
from gpu.rounds import Clock

from suite.cells import Bounds
from suite.lines import Line, Lines
from suite.registry import ENTRIES

HELLO_S = 120.0  # to import, and to build the model
NEEDED_S = 20.0  # with less time left, nothing new begins


@dataclass(frozen=True)
class Work:
    """A model in a mode, and who takes part; the anchor is whichever is called eager."""

    model: str
    mode: str
    peers: tuple[str, ...]

    @property
    def anchor(self) -> str:
        return next((peer for peer in self.peers if peer.endswith("eager")), "")


@dataclass(frozen=True)
class Limits:
    """``whole_s``: of all of it. ``cell_s``: to prepare one cell. ``seconds``: of calls, per shape and round."""

    whole_s: float | None
    cell_s: float
    seconds: float
    rounds: int
    jobs: int
    again: bool = False

    @property
    def reserve_s(self) -> float:
        """What timing a cell takes, about: two shapes."""
        return 3.0 * self.seconds * self.rounds


class Cut(Exception):
    """The time for all of it is over: the cell is neither done nor failed."""


class Running:
    """A cell that is prepared or has failed; ``times``: per shape, per round."""

    def __init__(self, work: Work, peer: str, remote: Remote) -> None:
        self.work, self.peer, self.remote = work, peer, remote
        self.answer: dict[str, Any] = {}
        self.failed = ""
        self.cut = False
        self.times: dict[str, dict[str, list[float]]] = {}
        self.memory: dict[str, float] = {}

    def ask(self, command: str, limit: float, clock: Clock, **kwargs: Any) -> Any:
        """``None`` if it fails, now or before."""
        if self.failed or self.cut:
            return None
        left = clock.left()
        try:
            return self.remote.ask(command, min(limit, max(left, 1.0)), **kwargs)
        except PeerFailed as error:
            if left < limit and clock.left() < 1:
                self.cut = True
            elif "exit code 77" in str(error):
                self.failed = f"{command}: more memory than it may take"
            else:
                self.failed = f"{command}: {error}"
            return None


def preload(packages: Path | None) -> None:
    """Have libraries imported once, by the process that forks the cells of a CPU."""
    here = Path(__file__).resolve()
    folders = [str(here.parents[1]), str(here.parents[2]), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    if packages is not None:
        os.environ["SUITE_PACKAGES"] = str(packages)
    mp.set_forkserver_preload(["suite.preloaded"])


def run(
    works: Sequence[Work],
    device: str,
    dtype: str,
    bounds: Bounds,
    limits: Limits,
    lines: Lines,
    facts: Mapping[str, Any],
) -> None:
    """Everything that ``lines`` does not have yet, while there is time."""
    preload(bounds.packages)
    clock = Clock(limits.whole_s if limits.whole_s is not None else 1e9)
    waiting = []
    for work in works:
        done = lines.done(device, work.mode, work.model, limits.again)
        missing = [peer for peer in work.peers if peer not in done]
        if missing:
            anchor = [work.anchor] if work.anchor and work.anchor not in missing else []
            waiting.append((work, [*anchor, *missing]))
    took = 0.0
    while waiting and clock.left() > max(NEEDED_S, took / 2):
        started = clock.left()
        batch = []
        while waiting and (
            not batch or sum(len(p) for _, p in batch) + len(waiting[0][1]) <= 3 * limits.jobs
        ):
            batch.append(waiting.pop(0))
        _batch(batch, Where(device, dtype), bounds, limits, clock, lines, facts)
        took = started - clock.left()


def _batch(
    batch: Sequence[tuple[Work, Sequence[str]]],
    where: Where,
    bounds: Bounds,
    limits: Limits,
    clock: Clock,
    lines: Lines,
    facts: Mapping[str, Any],
) -> None:
    """Prepare the cells of some models side by side, then time each model's in turns."""
    wanted = [(work, peer) for work, peers in batch for peer in peers]
    compiling = Clock(clock.left() - len(wanted) * limits.reserve_s)  # the rest is for calls
    with ThreadPoolExecutor(limits.jobs) as pool:
        each = (pool.submit(_prepared, *one, where, bounds, limits, compiling) for one in wanted)
        cells = [one.result() for one in list(each)]
    for work, _ in batch:
        own = [cell for cell in cells if cell.work is work]
        _time(own, limits, clock)
        anchor = next((cell for cell in own if cell.peer == work.anchor), None)
        for cell in own:
            cell.remote.close()
            again = cell.peer in lines.done(where.device, work.mode, work.model, limits.again)
            if not cell.cut and not again:
                lines.add(_lines(cell, anchor, facts))
            _say(cell, anchor)


def _prepared(
    work: Work, peer: str, where: Where, bounds: Bounds, limits: Limits, clock: Clock
) -> Running:
    given = {"model": work.model, "peer": peer, "where": where, "bounds": bounds}
    if where.is_cuda and not ENTRIES[work.model].half:
        given["where"] = Where(where.device, "float32")
    name = {"inference": "Inference", "training": "Training"}[work.mode]
    start = (
        "spawn" if where.is_cuda else "forkserver"
    )  # what has looked at a GPU must not be forked
    cell = Running(work, peer, Remote("suite.cells", name, given, start))
    if clock.left() < NEEDED_S / 2:
        cell.cut = True
    cell.ask("hello", HELLO_S, clock)
    cell.answer = cell.ask("prepare", limits.cell_s, clock) or {}
    return cell


def _time(cells: Sequence[Running], limits: Limits, clock: Clock) -> None:
    for number in range(limits.rounds):
        start = number % max(1, len(cells))
        for cell in (*cells[start:], *cells[:start]):
            found = cell.ask("time", 60 + 20 * limits.seconds, clock, seconds=limits.seconds) or {}
            for shape, kinds in found.items():
                for kind, times in kinds.items():
                    cell.times.setdefault(shape, {}).setdefault(kind, []).append(
                        statistics.median(times)
                    )
        if clock.left() < 5 and number:
            break
    for cell in cells:
        cell.memory = cell.ask("memory", 30, clock) or {}


def _lines(cell: Running, anchor: Running | None, facts: Mapping[str, Any]) -> list[Line]:
    family = ENTRIES[cell.work.model].family
    own = {"model": cell.work.model, "family": family, "mode": cell.work.mode, "peer": cell.peer}
    common = {**facts, **own}
    if cell.failed:
        return [{**common, "shape": "", "failed": cell.failed[:600]}]
    served = cell.answer.get("served")
    made = []
    for shape, kinds in cell.times.items():
        line = {**common, "shape": shape, "failed": None, "wrong": cell.answer.get("wrong", "")}
        for kind, prefix in (("wall", "ms"), ("cpu", "cpu_ms")):
            line[prefix] = _ms(kinds[kind])
            if anchor is not None and shape in anchor.times:
                line[f"anchor_{prefix}"] = _ms(anchor.times[shape][kind])
        line |= {"error": cell.answer["errors"].get(shape), "compile_s": cell.answer["compile_s"]}
        line["eager_error"] = cell.answer.get("eager_errors", {}).get(shape)
        line |= {"memory": {k: round(v) for k, v in cell.memory.items()}, "served": served}
        made.append(line)
    return made


def _ms(rounds: Sequence[float]) -> float:
    """The least of the rounds' medians: neighbours only ever add."""
    return round(min(rounds) * 1e3, 5)


def _say(cell: Running, anchor: Running | None) -> None:
    name = f"{cell.work.mode} {cell.work.model} {cell.peer}"
    if cell.failed or cell.cut:
        print(
            f"{name}: {'no time left' if cell.cut else 'FAILED: ' + cell.failed[:200]}", flush=True
        )
        return
    times = {shape: _ms(kinds["wall"]) for shape, kinds in cell.times.items()}
    wrong = f" WRONG {cell.answer['wrong']}" if cell.answer.get("wrong") else ""
    served = cell.answer.get("served") or {}
    ops = f" {served['ops']}/{served['all_ops']} ops" if served else ""
    print(f"{name}: {times} ms, compile {cell.answer['compile_s']:.1f} s{ops}{wrong}", flush=True)
    for reason in (served.get("reasons") or [])[:1]:
        print(f"    {reason}", flush=True)  # why not all of its ops are in engines
