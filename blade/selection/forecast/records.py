# SPDX-License-Identifier: Apache-2.0
"""Measured speeds of other backends beside DISC's: those that blade brings along, and those of this machine.

    learned, shipped = known_records(config, machine)      # a SpeedRecord per backend and search
    learn_speeds(task.graph, task.plan, names, config, built, decisions)

``measured.jsonl`` was written by ``benchmarks/measure_backends.py``, one line per record; this machine's are in the
disk cache. A record names no model: what counts is its work.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from math import isfinite
from statistics import geometric_mean
from typing import Any

import torch

from blade.config import Config
from blade.core.cluster import OpNode, values_in
from blade.core.disk_cache import code_version, digest, open_cache
from blade.core.hardware import cpu_name
from blade.core.reason import Code
from blade.graph.torchscript.view import GraphView
from blade.partition.support import Support
from blade.report import Timing
from blade.selection.forecast.work import Work, work_of
from blade.selection.plan.built import ClusterCandidates
from blade.selection.plan.select import Decision
from blade.timing.decision import is_unclear

REFERENCE = "disc"
KIND = "speeds"
MEASURED = "measured.jsonl"
MOST = 200  # records that are kept of a machine; the latest ones
SAME_COVERAGE = 0.95  # share of a group's ops that DISC's engine must cover to be compared with

_LOST = (Code.CONVERSION_FAILED, Code.CONVERSION_CRASHED, Code.WRONG_VALUES, Code.ENGINE_RAISED)


@dataclass(frozen=True)
class SpeedRecord:
    """``ratio``: the backend's time for some ops over DISC's, ``None`` where it made no engine that serves.

    ``machine`` is what ``machine_of`` says. ``work`` are the seconds of a ``Work``.
    """

    backend: str
    machine: str
    work: tuple[float, ...]
    ops: int
    ratio: float | None

    def work_done(self) -> Work:
        return Work(self.work, self.ops)


def machine_of(nodes: Iterable[OpNode]) -> str:
    """Return the kind of processor that ``nodes`` run on: "cpu AVX512", "cuda 9.0"."""
    devices = {v.device for n in nodes for v in values_in(n.outputs) if v.device is not None}
    gpu = next((d for d in devices if d.type == "cuda"), None)
    if gpu is None:
        return f"cpu {torch.backends.cpu.get_cpu_capability()}"
    return "cuda {}.{}".format(*torch.cuda.get_device_capability(gpu))


def known_records(config: Config, machine: str) -> tuple[list[SpeedRecord], list[SpeedRecord]]:
    """Return the records that this machine has made, and those that blade brings along for such a ``machine``."""
    return _learned(config, machine), [one for one in _shipped() if one.machine == machine]


def learn_speeds(
    view: GraphView,
    plan: Support,
    names: Iterable[str],
    config: Config,
    builts: Sequence[ClusterCandidates],
    decisions: Mapping[str, Decision],
) -> None:
    """Keep what the measured engines of one search say about other backends than DISC, if any was tried."""
    cache = open_cache(config.cache)
    if cache is None or config.reduces_precision or not config.timing:
        return
    found = compared(view, plan, names, builts, decisions)
    if not found:
        return
    machine = found[0].machine  # a search has one
    every = dict.fromkeys([*_learned(config, machine), *found])
    cache.put(KIND, _key(machine), json.dumps([asdict(r) for r in every][-MOST:]).encode())


def compared(
    view: GraphView,
    plan: Support,
    names: Iterable[str],
    builts: Sequence[ClusterCandidates],
    decisions: Mapping[str, Decision],
) -> list[SpeedRecord]:
    """Return a record per backend of ``names``: its ratio at its largest group, for the work of all that DISC takes.

    A group is comparable if DISC has an engine for its ops, or for more: then not times are compared, but how many
    times as fast as the original each is. A backend that takes no group has lost. Nothing is recorded of one
    that the time was too short for.
    """
    every = {one.name: one for one in builts}.values()
    served = [
        (frozenset(one.group.nodes), timings)
        for one in every
        if (timings := _timings(decisions[one.name]).get(REFERENCE))
    ]
    takers = {name.lower() for one in every for name in one.eligible}
    ratios: dict[str, float | None] = dict.fromkeys(set(names) - takers if served else ())
    for one in sorted(every, key=lambda built: len(built.group.nodes)):  # the largest group counts
        nodes = frozenset(one.group.nodes)
        best = [
            (t, len(group & nodes) >= SAME_COVERAGE * len(group | nodes))
            for group, t in served
            if len(group & nodes) >= SAME_COVERAGE * len(nodes)
        ]
        if not best:
            continue
        lost = (str(r.backend).lower() for r in one.reasons if r.code in _LOST)
        ratios |= {name: ratios.get(name) for name in lost}
        known = [pair for pair in best if not is_unclear(pair[0])]
        for backend, timings in _timings(decisions[one.name]).items() if known else ():
            if not is_unclear(timings):  # what neighbours made unclear says nothing
                ratios[backend.lower()] = min(_ratio(timings, *pair) for pair in known)
    own = [n for n, label in zip(view.nodes, plan.labels, strict=True) if REFERENCE in label]
    work, machine = work_of(own), machine_of(own)
    return [
        SpeedRecord(name, machine, work.seconds, work.ops, ratios[name])
        for name in sorted(ratios)
        if name != REFERENCE
    ]


def _timings(decision: Decision) -> dict[str, Sequence[Timing]]:
    return {one.backend: one.timings for one in decision.tried if one.timings}


def _ratio(mine: Sequence[Timing], its: Sequence[Timing], is_same: bool) -> float:
    """Return the factor from the time of DISC's engine to mine, for the same ops or per time of the original's."""
    pairs = list(zip(mine, its, strict=False))
    factors = [a.engine_ms / b.engine_ms for a, b in pairs]
    if not is_same:
        factors = [f * b.original_ms / a.original_ms for f, (a, b) in zip(factors, pairs)]
    return round(geometric_mean(factors), 3)


@cache
def _shipped() -> tuple[SpeedRecord, ...]:
    text = resources.files(__package__).joinpath(MEASURED).read_text(encoding="utf-8")
    return tuple(_decode(json.loads(line)) for line in text.splitlines() if line)


def _learned(config: Config, machine: str) -> list[SpeedRecord]:
    cache = open_cache(config.cache)
    data = None if cache is None else cache.get(KIND, _key(machine))
    return [] if data is None else [_decode(one) for one in json.loads(data)]


def _decode(fields: dict[str, Any]) -> SpeedRecord:
    ratio = fields["ratio"]
    known = isinstance(ratio, float) and isfinite(ratio)
    return SpeedRecord(
        fields["backend"],
        fields["machine"],
        tuple(fields["work"]),
        fields["ops"],
        ratio if known else None,
    )


def _key(machine: str) -> str:
    return digest([machine, code_version(), cpu_name(), f"{torch.get_num_threads()} threads"])
