# SPDX-License-Identifier: Apache-2.0
"""Capture a model again by what was found out about it before: it is traced, and not explored.

    record = record_of(graph, config, known, reasons)      # bytes, to be kept under the trace's key
    graph, reasons = recapture(own, inputs, config, known) # None: it has to be captured from the start

A trace that is known to the letter takes the same paths at the same sizes. What finding them took, runs of the
model at many sizes, traces that led nowhere and comparisons, is not done again. The model runs at the samples, and
at one derived input that it answered before, for what is made of the graph to be compared with.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count
from math import prod
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from blade.capture.candidate import CapturedCandidate, KnownTraces, differences_of
from blade.capture.derived_shapes import Axis, axes_of, resized
from blade.capture.equivalence import reference
from blade.capture.explore_paths import served_by, trace_at
from blade.capture.inputs import Sample
from blade.capture.outputs import NotTensors
from blade.capture.paths import CapturedPath, PathTable, Widened, finish
from blade.capture.references import ReferenceRuns, answered_at, derived, run_samples
from blade.capture.trace import Trace
from blade.config import Config
from blade.core.attempt import attempt
from blade.core.captured import Reference
from blade.core.reason import Code, Reason, Stage
from blade.graph.torchscript.hoist_size_checks import HoistedChecks, WrittenChecks
from blade.graph.torchscript.merge_paths import CannotMerge
from blade.report import reason_from

How = Mapping[Axis, int] | str | None
_WIDENED, _ADDED = "checks dropped", "a path"


@dataclass(frozen=True)
class _Derived:
    """An input: sample ``index``, or the first one with other sizes or contents."""

    index: int
    how: How

    def to_json(self) -> Any:
        sizes = self.how if isinstance(self.how, str) or self.how is None else _pairs(self.how)
        return [self.index, sizes]

    @staticmethod
    def from_json(data: Any) -> "_Derived":
        index, how = data
        return _Derived(index, _sizes(how) if isinstance(how, list) else how)

    def of(self, samples: Sequence[Sample]) -> Sample:
        return samples[self.index] if self.how is None else derived(samples[0], self.how)


def record_of(
    graph: CapturedCandidate, config: Config, known: KnownTraces, reasons: Sequence[Reason]
) -> bytes:
    """What ``recapture`` needs to make ``graph`` again, which was captured with ``reasons``.

    Empty if it is more than paths.
    """
    table, seen = graph.table, graph.seen
    is_plain = graph.how == "trace" and not (graph.differences or graph.limits or graph.equal_sizes)
    is_cut_short = any(one.code is Code.TIME_BUDGET for one in reasons)
    if graph.key is None or table is None or not is_plain or graph.frozen is None:
        return b""
    if seen.original.is_stateful:
        return b""
    place = {id(s): _Derived(k, None) for k, s in enumerate(seen.samples)}
    compared = _to_compare(graph)
    others = [one for one in (*seen.references, *compared) if one.how is not None]
    place |= {id(one.sample): _Derived(0, one.how) for one in others}
    steps = [
        [_WIDENED, one.path, one.checks]
        if isinstance(one, Widened)
        else [_ADDED, place[id(one.sample)].to_json(), asdict(one.hoisted)]
        for one in table.steps
    ]
    return json.dumps(
        {
            "checks": asdict(table.paths[0].hoisted),
            "steps": steps,
            "key": known.key_of(graph.frozen, seen.samples),
            "settings": _settings(config),
            "cut_short_s": config.time_budget if is_cut_short else None,
            "probes": [_pairs(_sizes_beside(seen.samples[0], one)) for one in seen.probes],
            "compared": [_reference(place, one) for one in compared],
            "unserved": [[_reference(place, one), why] for one, why in graph.unserved],
            "crashes": [asdict(one) for one in seen.crashes],
            "reasons": [asdict(one) for one in reasons],
        }
    ).encode()


def recapture(
    own: nn.Module, inputs: Any, config: Config, known: KnownTraces
) -> tuple[CapturedCandidate, list[Reason]] | None:
    """The candidate and the reasons of an earlier capture of such a model; ``None`` if there was none."""
    if not (config.freeze_module and known.has_any(own)) or config.preserved_attributes:
        return None
    try:
        seen = run_samples(own, inputs, config, bake=True)
    except NotTensors:
        return None
    if seen.original.is_stateful:
        return None
    own_reasons: list[Reason] = []
    traced = trace_at(own, seen, seen.samples[0], own_reasons)
    if traced is None:
        return None
    key = known.key_of(traced.module, seen.samples)
    record = known.look_up(key)
    told: Any = json.loads(record) if record else None
    if told is None or told["settings"] != _settings(config) or _has_more_time(told, config):
        return None
    again = partial(_again, own, seen, traced, told, known)
    found = attempt(Stage.CAPTURE, None, type(own).__name__, again, code=Code.TRACE_FAILED)
    if isinstance(found, Reason) or found is None:
        return None
    return replace(found, key=key), [reason_from(one) for one in told["reasons"]]


def _has_more_time(record: Any, config: Config) -> bool:
    """Whether paths were not looked for that there is time for now."""
    given_s, now_s = record["cut_short_s"], config.time_budget
    return given_s is not None and (now_s is None or now_s > given_s)


def _settings(config: Config) -> Any:
    """What capture depends on, and the keys of records do not."""
    return [config.max_paths, config.strict]


def _again(
    own: nn.Module, seen: ReferenceRuns, first: Trace, record: Any, known: KnownTraces
) -> CapturedCandidate | None:
    table = PathTable(_finished(first, seen.samples[0], record["checks"]))
    for what, *data in record["steps"]:
        if what == _WIDENED:
            table.widen(Widened(data[0], tuple(data[1])))
            continue
        sample = _Derived.from_json(data[0]).of(seen.samples)
        traced = trace_at(own, seen, sample, [])
        if traced is None or not table.add(_finished(traced, sample, data[1])):
            return None
    try:
        module = table.module(type(own).__name__, seen.call.names)
    except CannotMerge:
        return None
    if known.key_of(module, seen.samples) != record["key"]:
        return None
    compared = [_answered(seen, one) for one in record["compared"]]
    if any(one is None for one in compared):
        return None
    seen = replace(
        seen,
        probes=tuple(resized(seen.samples[0], _sizes(one)) for one in record["probes"]),
        references=(*seen.references, *(one for one in compared if one is not None)),
        crashes=tuple(reason_from(one) for one in record["crashes"]),
    )
    return CapturedCandidate(
        module,
        seen,
        "trace",
        differences=[],
        unserved=[(_unanswered(seen, one), why) for one, why in record["unserved"]],
        table=table,
        is_compared=False,
        frozen=module,
    )


def _finished(traced: Trace, sample: Sample, checks: Any) -> CapturedPath:
    written = [
        WrittenChecks(
            one["behind"],
            one["code"],
            tuple(one["tensors"]),
            {int(index): text for index, text in one["texts"].items()},
        )
        for one in checks["written"]
    ]
    known = HoistedChecks(tuple(checks["gone"]), tuple(written))
    return finish(traced.module, traced.recorder, sample, traced.structure, known)


def _to_compare(graph: CapturedCandidate) -> list[Reference]:
    """A small derived input, all of whose varied sizes differ from the first sample's, that ``graph`` answers as
    the model does; else the smallest of those that it was compared at."""
    seen = graph.seen
    known = [one for one in served_by(graph).references if one.how is not None]
    if seen.probes:
        base, widest = seen.samples[0], seen.probes[-1]
        sizes = _shrunk(_sizes_beside(base, widest), axes_of(base))
        small = answered_at(seen, sizes, "small sizes")
        if small is not None and not any(differences_of(graph.module, seen, [small])):
            return [small]
    most = max((len(one.axes) for one in known), default=0)
    return [one for one in sorted(known, key=_elements) if len(one.axes) == most][:1]


def _shrunk(sizes: Mapping[Axis, int], own: Mapping[Axis, int]) -> dict[Axis, int]:
    """Small sizes instead, equal where ``sizes`` are equal; none is the sample's ``own``."""
    taken = {own[axis] for axis in sizes}
    small = iter(k for k in count(2) if k not in taken)
    by_size = {size: next(small) for size in sorted(set(sizes.values()))}
    return {axis: by_size[size] for axis, size in sizes.items()}


def _elements(one: Reference) -> int:
    leaves = pytree.tree_leaves(one.sample)
    return sum(prod(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor))


def _reference(place: Mapping[int, _Derived], one: Reference) -> Any:
    return [place[id(one.sample)].to_json(), sorted(one.axes), one.what]


def _unanswered(seen: ReferenceRuns, data: Any) -> Reference:
    where, axes, what = data
    one = _Derived.from_json(where)
    return Reference(one.of(seen.samples), (), frozenset(map(tuple, axes)), what, one.how)


def _answered(seen: ReferenceRuns, data: Any) -> Reference | None:
    """The reference with the answers of the original, ``None`` if it raises."""
    one = _unanswered(seen, data)
    made = reference(seen.original, one.sample, one.axes, one.what)
    return None if made is None else replace(made, how=one.how)


def _sizes_beside(base: Sample, other: Sample) -> dict[Axis, int]:
    own = axes_of(base)
    return {axis: size for axis, size in axes_of(other).items() if size != own[axis]}


def _pairs(sizes: Mapping[Axis, int]) -> list[Any]:
    return [[list(axis), size] for axis, size in sorted(sizes.items())]


def _sizes(pairs: Any) -> dict[Axis, int]:
    return {(axis[0], axis[1]): size for axis, size in pairs}
