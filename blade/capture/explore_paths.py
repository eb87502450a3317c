# SPDX-License-Identifier: Apache-2.0
"""Trace the further paths of a model, at the references where those traced so far do not answer."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from blade.capture.candidate import CapturedCandidate, differences_of, is_within
from blade.capture.declared_shapes import Range
from blade.capture.derived_shapes import Axis, axes_of
from blade.capture.inputs import Sample
from blade.capture.messages import unanswered, unanswered_warning
from blade.capture.missing_overloads import with_overloads
from blade.capture.paths import CapturedPath, PathTable, finish
from blade.capture.references import OTHER_VALUES, TWICE, ReferenceRuns, further_values
from blade.capture.trace import Trace, fused_layers, trace_frozen
from blade.config import Config
from blade.core.attempt import attempt
from blade.core.captured import Reference
from blade.core.reason import Code, Reason, Stage
from blade.errors import warn_user
from blade.graph.torchscript.merge_paths import CannotMerge
from blade.timing.time_budget import TimeBudget

# Share of the time budget, after which only paths of the user's samples are traced.
FOR_CAPTURE = 0.5


def explore(
    own: nn.Module,
    traced: CapturedCandidate,
    config: Config,
    reasons: list[Reason],
    budget: TimeBudget,
) -> CapturedCandidate:
    """Return ``traced`` with further paths, at most ``Config.max_paths`` in all.

    The user's samples come first, then, within half of ``budget``, other contents and other sizes; with
    ``Config.strict``, which refuses what no path answers, however long it takes. A path that a count decides, such
    as a loop's, is taken for a sample only: each other size would need its own.
    """
    if traced.is_exact and not traced.decides_on_elements:
        return traced
    if traced.decides_on_elements:
        seen = traced.seen
        more = further_values(seen)
        found = differences_of(traced.frozen, seen, more) if traced.frozen else ([], [])
        seen = replace(seen, references=(*seen.references, *more))
        traced = replace(
            traced,
            seen=seen,
            differences=[*traced.differences, *found[0]],
            unserved=[*traced.unserved, *found[1]],
        )
    if traced.frozen is not None and traced.table is not None and traced.frozen is traced.module:
        traced = _with_further_paths(own, traced, traced.table, config, reasons, budget)
    return traced


def _with_further_paths(
    own: nn.Module,
    traced: CapturedCandidate,
    table: PathTable,
    config: Config,
    reasons: list[Reason],
    budget: TimeBudget,
) -> CapturedCandidate:
    seen, name = traced.seen, traced.module.original_name
    waiting = sorted(traced.unserved, key=_rank)
    while waiting and len(table.paths) < config.max_paths:
        (one, why), *waiting = waiting
        if not one.what.startswith("sample"):
            if not config.strict and budget.is_used(FOR_CAPTURE):
                reasons.append(_out_of_time(name, one))
                break
            if table.is_of_a_count(why):
                continue
        path = path_at(own, seen, one.sample, reasons)
        if path is None:
            continue
        if table.widened_by(path):
            traced, waiting = _served_again(traced, waiting)
            continue
        if not table.add(path):
            continue
        try:
            module = table.module(name, seen.call.names)
        except CannotMerge:
            table.remove_last()
            continue
        again, left = _served_again(replace(traced, module=module, frozen=module), waiting)
        if len(again.differences) > len(traced.differences) or any(
            ref is one for ref, _ in again.unserved
        ):  # the path is wrong, or does not lead here
            table.remove_last()
            continue
        traced, waiting = again, left
    return traced


def _out_of_time(name: str, reference: Reference) -> Reason:
    detail = (
        f"Half of Config.time_budget was over before a path for {reference.what} was traced. A larger time_budget, or "
        "None, traces it; a sample that takes it is traced in any case."
    )
    return Reason(Stage.CAPTURE, Code.TIME_BUDGET, None, name, detail)


def _served_again(
    traced: CapturedCandidate, waiting: list[tuple[Reference, str]]
) -> tuple[CapturedCandidate, list[tuple[Reference, str]]]:
    """``traced``, whose module has changed, and which of ``waiting`` it still does not answer."""
    references = [one for one, _ in traced.unserved]
    differences, unserved = differences_of(traced.module, traced.seen, references)
    whys = {id(one): why for one, why in unserved}
    again = replace(traced, differences=[*traced.differences, *differences], unserved=unserved)
    return again, [(one, whys[id(one)]) for one, _ in waiting if id(one) in whys]


def _rank(item: tuple[Reference, str]) -> int:
    what = item[0].what
    return 0 if what.startswith("sample") else 1 if what == OTHER_VALUES else 2


def path_at(
    own: nn.Module, seen: ReferenceRuns, sample: Sample, reasons: list[Reason]
) -> CapturedPath | None:
    """Trace ``own`` at ``sample``; ``None`` if that fails or does not end in one graph."""
    traced = trace_at(own, seen, sample, reasons)
    if traced is None:
        return None
    return finish(traced.module, traced.recorder, sample, traced.structure)


def trace_at(
    own: nn.Module, seen: ReferenceRuns, sample: Sample, reasons: list[Reason]
) -> Trace | None:
    """Trace ``own`` at ``sample``, and freeze it; ``None`` if that fails or does not end in one graph."""
    flat = partial(trace_frozen, own, seen.call, sample, seen.is_plain)
    flat = partial(with_overloads, flat, seen.original.reset)
    with fused_layers(False):
        result = attempt(Stage.CAPTURE, None, type(own).__name__, flat, code=Code.TRACE_FAILED)
    seen.original.reset()
    if isinstance(result, Reason):
        reasons.append(result)
        return None
    return result


def falls_back(traced: CapturedCandidate, config: Config) -> bool:
    """Whether the original answers where no path does."""
    return config.python_fallback and traced.seen.original_may_answer


def tell(name: str, traced: CapturedCandidate, config: Config, reasons: list[Reason]) -> None:
    """Add a Reason, and a warning unless the user agreed to it, that some calls are not answered by a path."""
    if not traced.unserved or config.strict:
        return
    kept = unanswered(name, traced.seen.call, traced.unserved)
    reasons.append(kept)
    ranges = traced.seen.ranges
    agreed = config.allow_tracing is True or all(
        _is_outside(one.sample, ranges) for one, _ in traced.unserved
    )
    if not agreed:
        warn_user(unanswered_warning(kept, falls_back(traced, config)))


def _is_outside(sample: Sample, ranges: Mapping[Axis, Range]) -> bool:
    """Whether the user declared that such sizes will not be seen."""
    sizes = axes_of(sample)
    return any(not low <= sizes[axis] <= high for axis, (low, high) in ranges.items())


@dataclass(frozen=True)
class Served:
    """The samples, probes and references that a candidate answers."""

    samples: tuple[Sample, ...]
    probes: tuple[Sample, ...]
    references: tuple[Reference, ...]


def served_by(graph: CapturedCandidate) -> Served:
    """What later stages may run ``graph.module`` at; samples of further paths are added to the user's."""
    seen = graph.seen
    unserved = {id(one.sample) for one, _ in graph.unserved}
    sizes = [_sizes(one.sample) for one, _ in graph.unserved if one.axes]
    samples = [one for one in seen.samples if id(one) not in unserved]
    further = graph.table.paths[1:] if graph.table is not None else []
    samples += [path.sample for path in further if all(path.sample is not s for s in samples)]
    return Served(
        tuple(samples),
        tuple(
            one for one in seen.probes if is_within(one, graph.limits) and _sizes(one) not in sizes
        ),
        tuple(
            one
            for one in seen.references
            if one.what not in (OTHER_VALUES, TWICE)
            and is_within(one.sample, graph.limits)
            and id(one.sample) not in unserved
        ),
    )


def _sizes(sample: Sample) -> tuple[int, ...]:
    return tuple(axes_of(sample).values())
