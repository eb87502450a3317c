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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from blade.capture.attributes import attributes_of
from blade.capture.clean import clean, forward_of, freeze
from blade.capture.derived_shapes import Axis, axes_of
from blade.capture.equivalence import find_differences
from blade.capture.inputs import Sample, gathered, normalize, to_calibrate
from blade.capture.messages import (
    Differences,
    capture_failed,
    limited,
    neither,
    no_graph,
    specialized,
    tied,
    warning,
)
from blade.capture.model import private_copy, signature_of
from blade.capture.outputs import NotTensors
from blade.capture.references import (
    OTHER_VALUES,
    TWICE,
    ReferenceRuns,
    run_references,
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
from blade.config import Config
from blade.core.attempt import attempt
from blade.core.captured import Captured, EqualSizes, SizeRange
from blade.core.reason import Code, Reason, Stage
from blade.errors import InputError, warn_user
from blade.graph.torchscript.functionalize import functionalize
from blade.verification.index_guard import in_bounds

_log = logging.getLogger(__name__)

LookUp = Callable[[torch.jit.ScriptModule, Sequence[Sample]], tuple[str | None, bool]]
"""(frozen graph, samples) -> a key for it, and whether it was compared with such a model before."""


@dataclass(frozen=True)
class _CapturedCandidate:
    """A candidate: a module, the view of the model it was compared in, and where it is wrong."""

    module: torch.jit.ScriptModule
    seen: ReferenceRuns
    how: str
    differences: Differences
    warnings: tuple[Reason, ...] = ()
    branches_on_values: bool = False
    limits: tuple[SizeRange, ...] = ()
    equal_sizes: tuple[EqualSizes, ...] = ()
    key: str | None = None
    is_compared: bool = True
    frozen: torch.jit.ScriptModule | None = None  # ``module`` frozen, if still unchanged


def capture(
    model: nn.Module, inputs: Any, config: Config, look_up: LookUp | None = None
) -> Captured:
    """Return a frozen, cleaned graph of ``model`` that agrees with it at the samples and at other sizes.

    ``inputs`` is a tensor, a tuple of positional arguments, a mapping of keyword arguments, or a list of such
    samples. A trace that ``look_up`` knows is compared at other values only; the optimized module has to be
    compared at all of ``references``. Raises ``InputError`` for a model or inputs that cannot be used, and
    for a model without a graph that computes the same; ``ConfigError`` for declared sizes that do not fit the
    inputs.
    """
    own = private_copy(model)
    reasons: list[Reason] = []
    further: list[Any] = []
    if config.quantizes:
        inputs, further = to_calibrate(
            gathered(inputs, config.calibration_samples), config.calibration_samples
        )
    if isinstance(own, torch.jit.ScriptModule):
        graph = _compared(own, run_references(own, inputs, config, bake=False), "script", config)
    elif isinstance(config.allow_tracing, tuple):
        graph = _script_partly(own, inputs, config, config.allow_tracing)
    else:
        graph = _trace_or_script(own, inputs, config, reasons, look_up)
    if graph.differences and not _is_accepted(graph, config):
        raise InputError(no_graph(graph.how, graph.seen.call, graph.differences, reasons))
    reasons += [*_baked(graph.seen), *graph.seen.crashes]
    final = graph.frozen
    if final is None:
        final = freeze(graph.module, config.preserved_attributes, config.freeze_module)
    clean(final, config.customize_jit_passes)
    functionalize(final, graph.seen.samples)
    _log.info("captured %s by %s", type(model).__name__, graph.how)
    return Captured(
        module=final,
        original=graph.seen.original,
        samples=graph.seen.samples,
        probes=tuple(one for one in graph.seen.probes if _is_within(one, graph.limits)),
        reasons=tuple(reasons),
        how=graph.how,
        limits=graph.limits,
        equal_sizes=graph.equal_sizes,
        fixed=_fixed(graph.seen),
        references=tuple(
            one
            for one in graph.seen.references
            if one.what not in (OTHER_VALUES, TWICE) and _is_within(one.sample, graph.limits)
        ),
        calibration=_normalized(own, graph, inputs, further),
        key=graph.key,
        is_compared=graph.is_compared,
    )


def _normalized(
    model: nn.Module, graph: _CapturedCandidate, inputs: Any, further: list[Any]
) -> tuple[Sample, ...]:
    """Return ``further`` samples in the form of those that ``graph`` was made from."""
    if not further:
        return ()
    known = inputs if isinstance(inputs, list) else [inputs]
    bake = graph.how == "trace"
    _, samples = normalize(signature_of(model), [*known, *further], bake)
    return samples[len(known) :]


def _fixed(seen: ReferenceRuns) -> frozenset[Axis]:
    """Return declared sizes if all sample entries are tensors: then the leaves are the graph's inputs."""
    if not all(isinstance(entry, torch.Tensor) for entry in seen.samples[0]):
        return frozenset()
    return frozenset(axis for axis, (low, high) in seen.ranges.items() if low == high)


def _trace_or_script(
    own: nn.Module, inputs: Any, config: Config, reasons: list[Reason], look_up: LookUp | None
) -> _CapturedCandidate:
    """Return the trace if it is right, else the scripted module if that is, else the trace with limits."""
    traced = _trace(own, inputs, config, reasons, look_up)
    methods = [name for name in config.preserved_attributes if _is_method(own, name)]
    if isinstance(traced, _CapturedCandidate):
        trusted = config.allow_tracing is True or not traced.branches_on_values
        if not traced.differences and trusted and not methods and not _only_numbers(traced.seen):
            reasons += traced.warnings
            return traced
        if traced.differences:
            reasons.append(specialized(type(own).__name__, traced.seen.call, traced.differences))
    if config.allow_tracing is not True:
        scripted = _script(own, inputs, config, reasons)
        if scripted is not None:
            return scripted
    if traced is None or methods:
        raise InputError(neither(own, methods, reasons))
    reasons += traced.warnings
    if not traced.differences:
        return traced
    kept = _with_equal_sizes(own, inputs, traced, config, reasons)
    return _with_size_limits(own, traced, config, reasons) if kept is None else kept


def _only_numbers(seen: ReferenceRuns) -> bool:
    """Whether there are arguments, none with a tensor: a trace would hold for these numbers alone."""
    return bool(seen.call.baked) and not seen.call.names


def _trace(
    own: nn.Module, inputs: Any, config: Config, reasons: list[Reason], look_up: LookUp | None
) -> _CapturedCandidate | None:
    """Return the best trace: at the first sample or, if a size of 1 led it astray, at the widest probe."""
    try:
        seen = run_references(own, inputs, config, bake=True)
    except NotTensors as error:
        reasons.append(capture_failed(type(own).__name__, Code.TRACE_FAILED, str(error)))
        return None
    best: _CapturedCandidate | None = None
    ways = [(sample, False) for sample in (seen.samples[0], *seen.probes[-1:])]
    if has_fused_layers(own):
        ways.append((seen.samples[0], True))
    for sample, fused in ways:
        graph = _trace_at(own, seen, sample, config, reasons, look_up=look_up, fused=fused)
        if graph is None:
            break
        best = graph if best is None or not graph.differences else best
        if not best.differences:
            break
    return best


def _trace_at(
    own: nn.Module,
    seen: ReferenceRuns,
    sample: Sample,
    config: Config,
    reasons: list[Reason],
    limits: tuple[SizeRange, ...] = (),
    ties: tuple[EqualSizes, ...] = (),
    look_up: LookUp | None = None,
    fused: bool = False,
) -> _CapturedCandidate | None:
    name = type(own).__name__
    result: Trace | Reason | None = None
    if config.freeze_module and not config.preserved_attributes and not seen.original.is_stateful:
        flat = partial(trace_frozen, own, seen.call, sample, seen.is_plain, limits, ties)
        with fused_layers(fused):
            result = attempt(Stage.CAPTURE, None, name, flat, code=Code.TRACE_FAILED)
        seen.original.reset()
    if not isinstance(result, Trace):
        preserved = config.preserved_attributes
        as_module = partial(trace, own, seen.call, sample, seen.is_plain, limits, preserved, ties)
        with fused_layers(fused):
            result = attempt(Stage.CAPTURE, None, name, as_module, code=Code.TRACE_FAILED)
        seen.original.reset()
    if isinstance(result, Reason):
        reasons.append(result)
        return None
    graph = _compared(result.module, seen, "trace", config, result, limits, look_up)
    return replace(graph, equal_sizes=ties)


def _script(
    own: nn.Module, inputs: Any, config: Config, reasons: list[Reason]
) -> _CapturedCandidate | None:
    """Return the scripted model if it exists and is right; ``reasons`` gets what is against it."""
    name = type(own).__name__
    module = attempt(Stage.CAPTURE, None, name, lambda: script(own), code=Code.SCRIPT_FAILED)
    if isinstance(module, Reason):
        reasons.append(module)
        return None
    graph = _compared(module, run_references(own, inputs, config, bake=False), "script", config)
    if graph.differences:
        details = specialized(name, graph.seen.call, graph.differences).detail
        reasons.append(capture_failed(name, Code.SCRIPT_FAILED, details.replace("trace", "script")))
        return None
    return graph


def _script_partly(
    own: nn.Module, inputs: Any, config: Config, names: Sequence[str]
) -> _CapturedCandidate:
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
    return _compared(module, seen, "script", config)


def _compared(
    module: Any,
    seen: ReferenceRuns,
    how: str,
    config: Config,
    traced: Trace | None = None,
    limits: tuple[SizeRange, ...] = (),
    look_up: LookUp | None = None,
) -> _CapturedCandidate:
    """Freeze ``module`` as it will be returned, and compare it with every reference within ``limits``, or, if
    it is known, with those at other values."""
    frozen = module
    if traced is None or not traced.is_frozen:
        frozen = freeze(module, config.preserved_attributes, config.freeze_module)
    key, is_known = (None, False) if look_up is None else look_up(frozen, seen.samples)
    within = [
        one
        for one in seen.references
        if _is_within(one.sample, limits) and (not is_known or one.what == OTHER_VALUES)
    ]
    forward = forward_of(frozen)
    with in_bounds(seen.samples, seen.original.device):  # an index may be of other sizes
        differences = find_differences(
            frozen, within, original=seen.original, forward=forward, apart=True
        )
    # unused so far, unless a run may have changed attributes
    reused = None if attributes_of(frozen) else frozen
    if traced is None:
        return _CapturedCandidate(module, seen, how, differences, frozen=reused)
    warnings = tuple(
        Reason(Stage.CAPTURE, Code.TRACER_WARNING, None, module.original_name, text)
        for text in traced.warnings
    )
    found = _CapturedCandidate(
        module, seen, how, differences, warnings, traced.branches_on_values, limits
    )
    return replace(found, key=key, is_compared=not is_known, frozen=reused)


def _with_equal_sizes(
    own: nn.Module, inputs: Any, graph: _CapturedCandidate, config: Config, reasons: list[Reason]
) -> _CapturedCandidate | None:
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
    own: nn.Module, graph: _CapturedCandidate, config: Config, reasons: list[Reason]
) -> _CapturedCandidate:
    """Trace ``graph`` again with checks that raise where it is wrong.

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
        if again.differences or not all(_is_within(one, limits) for one in seen.samples):
            return graph
        warn_user(warning(kept, axes))
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


def _is_within(sample: Sample, limits: Sequence[SizeRange]) -> bool:
    sizes = axes_of(sample)
    return all(one.low <= sizes[one.index, one.axis] <= one.high for one in limits)


def _is_accepted(graph: _CapturedCandidate, config: Config) -> bool:
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
