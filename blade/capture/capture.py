# SPDX-License-Identifier: Apache-2.0
"""Capture: from the user's model and samples to a frozen TorchScript graph that was compared with the model.

    captured = capture(model, {"input_ids": ids, "attention_mask": mask}, config)
    captured.module(ids, mask)                           # also by keyword: input_ids=..., ...

Tracing comes first: it takes any Python and leaves a graph without control flow. Its danger is that a
decision of the model's code on a size or a value is lost. So the traced module runs at other sizes and other
values than the sample's, and where it differs from the model, the model is scripted. A trace that is wrong at
some sizes and cannot be replaced gets checks that raise there.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from blade.capture.candidate import CapturedCandidate, KnownTraces, compared, is_within
from blade.capture.capture_exported import inputs_of, interface_of, module_of, script_exported
from blade.capture.clean import clean, freeze
from blade.capture.derived_shapes import Axis, axes_of
from blade.capture.diagnose_export import diagnose_export
from blade.capture.explore_paths import FOR_CAPTURE, explore, falls_back, served_by, tell
from blade.capture.export_instead import Exported, export_instead, may_export
from blade.capture.exported.interface import fixed_axes
from blade.capture.inputs import Sample, gathered, has_tensor, normalize, to_calibrate
from blade.capture.messages import (
    Differences,
    capture_failed,
    limited,
    neither,
    no_graph,
    specialized,
    tied,
    warning,
    with_diagnosis,
)
from blade.capture.missing_overloads import with_overloads
from blade.capture.model import private_copy, signature_of
from blade.capture.outputs import NotTensors
from blade.capture.quantized_layers import read_quantized_layers
from blade.capture.recapture import recapture, record_of
from blade.capture.references import (
    OTHER_VALUES,
    ReferenceRuns,
    run_references,
    with_constants,
)
from blade.capture.tied_dimensions import find_tied_dimensions
from blade.capture.trace import (
    Trace,
    fused_layers,
    has_fused_layers,
    script,
    script_around,
    trace,
    trace_frozen,
)
from blade.capture.unattached import readable_properties
from blade.config import Config
from blade.core.attempt import attempt
from blade.core.captured import Captured, EqualSizes, SizeRange
from blade.core.reason import Code, Reason, Stage
from blade.errors import InputError, warn_user
from blade.graph.torchscript.functionalize import functionalize
from blade.graph.torchscript.keep_types import keep_types
from blade.graph.torchscript.move_constructors import move_constructors
from blade.runtime.originals import new_number
from blade.timing.time_budget import UNLIMITED, TimeBudget

_log = logging.getLogger(__name__)


def capture(
    model: nn.Module | ExportedProgram,
    inputs: Any,
    config: Config,
    known: KnownTraces | None = None,
    budget: TimeBudget = UNLIMITED,
) -> Captured:
    """Return a frozen, cleaned graph of ``model`` that agrees with it at the samples and at other sizes.

    ``inputs`` is a tensor, a tuple of positional arguments, a mapping of keyword arguments, or a list of such
    samples; by default, the example inputs of an ``ExportedProgram``. A trace among the ``known`` ones is not
    compared, as what is made of it is compared with ``references``. ``budget`` bounds the search for further paths,
    and the diagnosis of a model that cannot be captured exactly.

    Raises ``InputError`` for a model or inputs that cannot be used, and for a model without a graph that
    computes the same; ``ConfigError`` for declared sizes that do not fit the inputs.
    """
    program = model if isinstance(model, ExportedProgram) else None
    own = private_copy(model) if program is None else module_of(program)
    if program is not None and inputs is None:
        inputs = inputs_of(program, own)
    reasons: list[Reason] = []
    further: list[Any] = []
    if program is None:
        reasons += read_quantized_layers(own)
    if config.quantizes:
        inputs, further = to_calibrate(
            gathered(inputs, config.calibration_samples), config.calibration_samples
        )
    if program is not None:
        graph = _exported(program, own, inputs, config)
    elif isinstance(own, torch.jit.ScriptModule):
        graph = compared(own, run_references(own, inputs, config, bake=False), "script", config)
    elif isinstance(config.allow_tracing, tuple):
        with readable_properties(own):
            graph = _script_partly(own, inputs, config, config.allow_tracing)
    else:
        with readable_properties(own):
            graph = _traced_again_or_anew(own, inputs, config, reasons, known, budget)
    if graph.differences and not _is_accepted(graph, config):
        raise InputError(no_graph(graph.how, graph.seen.call, graph.differences, reasons))
    if graph.unserved and config.strict and config.allow_tracing is not True:
        raise InputError(no_graph(graph.how, graph.seen.call, graph.unserved, reasons))
    served = served_by(graph)
    reasons += [*_baked(graph.seen), *graph.seen.crashes]
    final = graph.frozen
    if final is None:
        final = freeze(graph.module, config.preserved_attributes, config.freeze_module)
        if graph.table is not None:
            graph.table.finish_again(final)
    clean(final, config.customize_jit_passes)
    in_place = functionalize(final, served.samples, served.probes)
    move_constructors(final, served.samples, served.probes)
    for one in (final, in_place):
        if one is not None:
            keep_types(one.graph)
    _log.info("captured %s by %s", type(model).__name__, graph.how)
    return Captured(
        module=final,
        in_place=in_place,
        original=graph.seen.original,
        samples=served.samples,
        probes=served.probes,
        reasons=tuple(reasons),
        how=graph.how,
        limits=graph.limits,
        equal_sizes=graph.equal_sizes,
        fixed=_fixed(graph.seen) | graph.fixed,
        references=served.references,
        calibration=_normalized(own, graph, inputs, further),
        key=graph.key,
        record=graph.record,
        is_compared=graph.is_compared,
        paths=graph.table.described() if graph.table is not None else (),
        original_number=_number(graph, config),
        structure=graph.structure,
        paths_number=new_number(),
        ends=graph.table.ends() if graph.table is not None else (),
    )


def _number(graph: CapturedCandidate, config: Config) -> int:
    """The number of the original if it is to answer where no path does, else 0.

    A model with a state has another one than the graph after the first call.
    """
    may_answer = config.python_fallback and graph.is_guarded and graph.seen.original_may_answer
    return new_number() if may_answer else 0


def _normalized(
    model: nn.Module, graph: CapturedCandidate, inputs: Any, further: list[Any]
) -> tuple[Sample, ...]:
    """Return ``further`` samples in the form of those that ``graph`` was made from."""
    if not further:
        return ()
    known = inputs if isinstance(inputs, list) else [inputs]
    bake = graph.how != "script"
    call, samples = normalize(signature_of(model), [*known, *further], bake)
    kept = graph.seen.call.names
    named = [dict(zip(call.names, sample, strict=True)) for sample in samples[len(known) :]]
    return tuple(tuple(one[name] for name in kept) for one in named)


def _fixed(seen: ReferenceRuns) -> frozenset[Axis]:
    """Return declared sizes if all entries but guarded ones are tensors: then the leaves are the graph's inputs."""
    count = len(seen.call.names) - len(seen.call.guards)
    if not all(isinstance(entry, torch.Tensor) for entry in seen.samples[0][:count]):
        return frozenset()
    return frozenset(axis for axis, (low, high) in seen.ranges.items() if low == high)


def _traced_again_or_anew(
    own: nn.Module,
    inputs: Any,
    config: Config,
    reasons: list[Reason],
    known: KnownTraces | None,
    budget: TimeBudget,
) -> CapturedCandidate:
    """Return the graph that an earlier capture made, if its trace is known, or capture, and note what it took."""
    if known is None:
        return _trace_or_script(own, inputs, config, reasons, None, budget)
    if (again := recapture(own, inputs, config, known)) is not None:
        graph, told = again
        tell(type(own).__name__, graph, config, [])
        reasons += told
        return graph
    before = len(reasons)
    graph = _trace_or_script(own, inputs, config, reasons, known, budget)
    return replace(graph, record=record_of(graph, config, known, reasons[before:]))


def _trace_or_script(
    own: nn.Module,
    inputs: Any,
    config: Config,
    reasons: list[Reason],
    known: KnownTraces | None,
    budget: TimeBudget,
) -> CapturedCandidate:
    """Return the traced paths if they answer everywhere, else the scripted module if that is right, else what
    the trace can be kept for. What cannot be traced is exported, which comes after a script if it is no whole
    answer."""
    traced = _trace(own, inputs, config, reasons, known, budget)
    methods = [name for name in config.preserved_attributes if _is_method(own, name)]
    name = type(own).__name__
    if traced is not None:
        whole = config.allow_tracing is True or not (traced.unserved or traced.decides_on_elements)
        if not traced.differences and whole and not methods and not _only_numbers(traced.seen):
            reasons += traced.warnings
            tell(name, traced, config, reasons)
            return traced
        if traced.differences:
            reasons.append(specialized(name, traced.seen.call, traced.differences))
    exported = export_instead(own, inputs, config, reasons) if traced is None else Exported()
    if exported.found is not None and exported.found.is_exact:
        return exported.found
    if config.allow_tracing is not True:
        scripted = _script(own, inputs, config, reasons)
        if scripted is not None:
            return scripted
    if exported.found is not None:
        tell(name, exported.found, config, reasons)
        return exported.found
    if traced is None or methods:
        if exported.seen is not None:
            reasons[:] = with_diagnosis(reasons, diagnose_export(exported.seen, (), budget))
        raise InputError(neither(own, methods, reasons))
    reasons += traced.warnings
    if traced.differences:
        kept = _with_equal_sizes(own, inputs, traced, config, reasons)
        if (
            kept is None
            and config.allow_tracing is not True
            and may_export(own, traced.seen, config)
        ):
            reasons += diagnose_export(traced.seen, traced.differences, budget)
        traced = _with_size_limits(own, traced, config, reasons) if kept is None else kept
    tell(name, traced, config, reasons)
    return traced


def _exported(
    program: ExportedProgram, own: nn.Module, inputs: Any, config: Config
) -> CapturedCandidate:
    """Return ``program`` as it is, compared with ``own``, its module."""
    seen = run_references(own, inputs, config, bake=True)
    interface = interface_of(program, own, seen.call, seen.samples[0])
    module = script_exported(program, own, interface)
    seen.original.reset()
    graph = compared(module, seen, "export", config)
    return replace(graph, fixed=fixed_axes(program, interface))


def _only_numbers(seen: ReferenceRuns) -> bool:
    """Whether there are arguments, none with a tensor: a trace would hold for these numbers alone."""
    return bool(seen.call.slots) and not any(map(has_tensor, seen.samples[0]))


def _trace(
    own: nn.Module,
    inputs: Any,
    config: Config,
    reasons: list[Reason],
    known: KnownTraces | None,
    budget: TimeBudget,
) -> CapturedCandidate | None:
    """Return the best trace: at the first sample or, if a size of 1 led it astray, at the widest probe."""
    try:
        seen = run_references(own, inputs, config, bake=True)
    except NotTensors as error:
        reasons.append(capture_failed(type(own).__name__, Code.TRACE_FAILED, str(error)))
        return None
    best: CapturedCandidate | None = None
    ways = [(sample, False) for sample in (seen.samples[0], *seen.probes[-1:])]
    if has_fused_layers(own):
        ways.append((seen.samples[0], True))
    for sample, fused in ways:
        graph = _trace_at(own, seen, sample, config, reasons, known=known, fused=fused)
        if graph is None:
            break
        graph = explore(own, graph, config, reasons, budget)
        known = None  # only the first way is gone again
        if best is None or _faults(graph) < _faults(best):
            best = graph
        is_late = not config.strict and budget.is_used(FOR_CAPTURE)
        if best.is_exact or (not best.differences and is_late):
            break
    return best


def _faults(graph: CapturedCandidate) -> tuple[int, int, int]:
    """How many of the user's samples ``graph`` does not answer; of all references, how many wrongly, and not at all."""
    samples = {id(sample) for sample in graph.seen.samples}
    missed = sum(id(one.sample) in samples for one, _ in graph.unserved)
    return missed, len(graph.differences), len(graph.unserved)


def _trace_at(
    own: nn.Module,
    seen: ReferenceRuns,
    sample: Sample,
    config: Config,
    reasons: list[Reason],
    limits: tuple[SizeRange, ...] = (),
    ties: tuple[EqualSizes, ...] = (),
    known: KnownTraces | None = None,
    fused: bool = False,
) -> CapturedCandidate | None:
    name = type(own).__name__
    result: Trace | Reason | None = None
    # what a model keeps that shows nowhere, as sizes of its last call, is none of the graph's business
    if config.freeze_module and not config.preserved_attributes and seen.original_may_answer:
        flat = partial(trace_frozen, own, seen.call, sample, seen.is_plain, limits, ties)
        flat = partial(with_overloads, flat, seen.original.reset)
        with fused_layers(fused):
            result = attempt(Stage.CAPTURE, None, name, flat, code=Code.TRACE_FAILED)
        seen.original.reset()
    if not isinstance(result, Trace):
        preserved = config.preserved_attributes
        seen, sample = with_constants(seen, sample)
        as_module = partial(trace, own, seen.call, sample, seen.is_plain, limits, preserved, ties)
        as_module = partial(with_overloads, as_module, seen.original.reset)
        with fused_layers(fused):
            result = attempt(Stage.CAPTURE, None, name, as_module, code=Code.TRACE_FAILED)
        seen.original.reset()
    if isinstance(result, Reason):
        reasons.append(result)
        return None
    graph = compared(result.module, seen, "trace", config, result, limits, known, sample)
    return replace(graph, equal_sizes=ties)


def _script(
    own: nn.Module, inputs: Any, config: Config, reasons: list[Reason]
) -> CapturedCandidate | None:
    """Return the scripted model if it exists and is right; ``reasons`` gets what is against it."""
    name = type(own).__name__
    module = attempt(Stage.CAPTURE, None, name, lambda: script(own), code=Code.SCRIPT_FAILED)
    if isinstance(module, Reason):
        reasons.append(module)
        return None
    graph = compared(module, run_references(own, inputs, config, bake=False), "script", config)
    if graph.differences:
        details = specialized(name, graph.seen.call, graph.differences).detail
        reasons.append(capture_failed(name, Code.SCRIPT_FAILED, details.replace("trace", "script")))
        return None
    return graph


def _script_partly(
    own: nn.Module, inputs: Any, config: Config, names: Sequence[str]
) -> CapturedCandidate:
    seen = run_references(own, inputs, config, bake=False)
    # The copy under seen.original is not changed: its parts are needed untraced.
    module = attempt(
        Stage.CAPTURE,
        None,
        type(own).__name__,
        lambda: script_around(private_copy(own), names, seen.call, seen.samples[0]),
        code=Code.SCRIPT_FAILED,
    )
    if isinstance(module, Reason):
        raise InputError(
            f"allow_tracing={list(names)}: the rest cannot be scripted. {module.detail}"
        )
    return compared(module, seen, "script", config)


def _with_equal_sizes(
    own: nn.Module, inputs: Any, graph: CapturedCandidate, config: Config, reasons: list[Reason]
) -> CapturedCandidate | None:
    """Trace ``graph`` again with checks that sizes equal in the samples are equal, if that is enough to make
    it right: a model may accept a mask of another length than the states it masks, though calls rarely do
    that.
    """
    classes, ties = find_tied_dimensions(graph.seen, [one for one, _ in graph.differences])
    if not ties:
        return None
    seen = run_references(own, inputs, config, bake=True, together=classes)
    again = _trace_at(own, seen, seen.samples[0], config, reasons, ties=ties)
    if again is None or again.differences:
        return None
    reasons.append(tied(type(own).__name__, seen.call, seen.samples[0], ties))
    return again


def _with_size_limits(
    own: nn.Module, graph: CapturedCandidate, config: Config, reasons: list[Reason]
) -> CapturedCandidate:
    """Trace ``graph`` again with checks that fail where it is wrong.

    The user agreed to limits by ``allow_tracing=True``, or by declaring the range of the dimension. Otherwise
    they are a warning, or, with ``strict``, an error.
    """
    axes, seen = _guilty(graph.differences), graph.seen
    agreed = config.allow_tracing is True or all(axis in seen.ranges for axis in axes)
    if not axes or (config.strict and not agreed):
        return graph
    sizes = axes_of(seen.samples[0])
    limits = tuple(
        SizeRange(*axis, *seen.ranges.get(axis, (sizes[axis], sizes[axis])))
        for axis in sorted(axes)
    )
    again = _trace_at(own, seen, seen.samples[0], config, reasons, limits)
    if again is None:
        return graph
    kept = limited(type(own).__name__, seen.call, seen.samples[0], limits)
    if not agreed:
        if again.differences or not all(is_within(one, limits) for one in seen.samples):
            return graph
        warn_user(warning(kept, axes, falls_back(again, config)))
    reasons.append(kept)
    return again


def _guilty(differences: Differences) -> set[Axis]:
    """Return the dimensions whose size matters; empty if the first sample's fail too."""
    if any(not one.axes for one, _ in differences):
        return set()
    smallest = sorted((one.axes for one, _ in differences), key=len)
    guilty: set[Axis] = set()
    for axes in smallest:
        if not guilty & axes:
            guilty |= axes
    return guilty


def _is_accepted(graph: CapturedCandidate, config: Config) -> bool:
    """With ``allow_tracing=True`` the user vouches for other values, not for the samples."""
    only_values = all(one.what == OTHER_VALUES for one, _ in graph.differences)
    return graph.how == "trace" and config.allow_tracing is True and only_values


def _baked(seen: ReferenceRuns) -> list[Reason]:
    return [
        capture_failed(
            name,
            Code.BAKED_ARGUMENT,
            f"Argument {name!r} holds no tensor: it is the constant {value!r} and no parameter any more.",
        )
        for name, value in seen.call.baked.items()
    ]


def _is_method(model: nn.Module, name: str) -> bool:
    return callable(getattr(model, name, None)) and not isinstance(
        getattr(model, name, None), nn.Module
    )
