# SPDX-License-Identifier: Apache-2.0
"""The sentences of capture: what a trace lost, and what the user can do about it."""

import re
from collections.abc import Collection, Sequence
from pathlib import Path

from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from blade.capture.derived_shapes import Axis, axes_of
from blade.capture.inputs import CallSignature, Sample, describe, name_of_leaf
from blade.core.captured import EqualSizes, Reference, SizeRange
from blade.core.reason import Code, Reason, Stage
from blade.graph.torchscript.decision_checks import LIMITED, NO_PATH

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\w+)')
Differences = Sequence[tuple[Reference, str]]

WHAT_TO_DO = (
    "Make the model scriptable (torch.jit.script tells what it does not understand), or name the "
    "submodules without such decisions in Config(allow_tracing=[...]) so that only the rest is scripted"
)


def capture_failed(subject: str, code: Code, detail: str) -> Reason:
    """Return a ``Reason`` of this stage."""
    return Reason(Stage.CAPTURE, code, None, subject, detail)


def specialized(subject: str, call: CallSignature, differences: Differences) -> Reason:
    """Reason that the trace of ``subject`` differs from the model."""
    return capture_failed(
        subject,
        Code.TRACE_SPECIALIZED,
        f"The trace differs from the model at {list_differences(call, differences)}.",
    )


def limited(
    subject: str, call: CallSignature, sample: Sample, limits: Sequence[SizeRange]
) -> Reason:
    """Reason that the trace of ``subject`` is kept with checks on sizes."""
    where = "; ".join(size_range_text(call, sample, one) for one in limits)
    return capture_failed(
        subject,
        Code.TRACE_SPECIALIZED,
        f"The trace is kept for the sizes it is right at: {where}.",
    )


def warning(kept: Reason, axes: Collection[Axis], falls_back: bool) -> str:
    """Return the warning for a user who did not ask for limits; ``kept`` is their Reason."""
    several = "these dimensions" if len(axes) > 1 else "this dimension"
    return (
        f"{kept.subject}: {kept.detail} {_answered('Elsewhere', falls_back)} If that is meant, say so: "
        f"Config(allow_tracing=True), or fix {several} in Config(dynamic_shapes=...). If not: "
        f"{WHAT_TO_DO[0].lower()}{WHAT_TO_DO[1:]}."
    )


def not_exported(
    subject: str, call: CallSignature, wrong: Differences, missed: Differences
) -> Reason:
    """Reason that the export of ``subject`` is not taken: it is ``wrong`` at references, or raises at samples."""
    detail = (
        f"The exported module differs from the model at {list_differences(call, wrong)}."
        if wrong
        else f"The exported module does not answer at {_list_unanswered(call, missed).rstrip('.')}."
    )
    return capture_failed(subject, Code.EXPORT_FAILED, detail)


def with_diagnosis(reasons: Sequence[Reason], found: Sequence[Reason]) -> list[Reason]:
    """``reasons`` and those that a diagnosis ``found``: a line of code is named once, and an error of the diagnosis
    itself only where there is no other."""
    known = [one for one in reasons if one.code is Code.EXPORT_FAILED]
    added = [one for one in found if one.error is None or not known]
    lines = {_first_word(one) for one in added}
    return [*(one for one in reasons if one not in known or _first_word(one) not in lines), *added]


def _first_word(reason: Reason) -> str:
    """``model.py:12`` if the reason is about that line."""
    return reason.detail.partition(" ")[0]


def told(error: Exception) -> str:
    """``error`` in a line or two: of the interpreter's traceback, the innermost line of code and what it raised."""
    kind, text = type(error).__name__, str(error).strip()
    if "TorchScript interpreter" not in text.partition("\n")[0]:
        return f"{kind}: {text}"
    *rest, last = text.splitlines()
    frames = [_FRAME.search(line) for line in rest]
    places = [f" ({Path(m[1]).name}:{m[2]}, in {m[3]})" for m in frames if m is not None]
    return f"{last if last.startswith(kind) else f'{kind}: {last}'}{places[-1] if places else ''}"


def unanswered(subject: str, call: CallSignature, unserved: Differences) -> Reason:
    """Reason that no captured path of ``subject`` answers at the references ``unserved``."""
    return capture_failed(
        subject,
        Code.TRACE_SPECIALIZED,
        f"The captured paths do not answer at {_list_unanswered(call, unserved)}.",
    )


def _list_unanswered(call: CallSignature, unserved: Differences) -> str:
    shown = [
        f"{one.what} ({describe(call.names, one.sample)}), because of {_decision(why)}"
        for one, why in unserved[:3]
    ]
    more = len(unserved) - len(shown)
    return "; ".join(shown) + (f"; and {more} more" if more else "")


def _decision(why: str) -> str:
    """The decision in the message of a check."""
    text = why.partition("]: ")[2]
    return (text.partition(" gave ")[0] or why).splitlines()[0]


def unanswered_warning(kept: Reason, falls_back: bool) -> str:
    """The warning for a user who did not agree to it; ``kept`` is its Reason."""
    there = _answered("There", falls_back)
    return (
        f"{kept.subject}: {kept.detail} {there} Samples of such inputs add paths (Config.max_paths); "
        "Config(allow_tracing=True) says that this is meant, Config(strict=True) refuses it."
    )


def _answered(place: str, falls_back: bool) -> str:
    """Who answers where no path does; ``place`` begins the sentence."""
    if not falls_back:
        return f"{place} the call raises."
    return (
        f"{place} the original model answers, in this process; in another one that loads the saved module, the "
        "call raises."
    )


def size_range_text(call: CallSignature, sample: Sample, limit: SizeRange) -> str:
    """``axis 1 of 'x' must be 16``."""
    name = name_of_leaf(call.names, sample, limit.index)
    size = f"{limit.low}" if limit.low == limit.high else f"{limit.low}..{limit.high}"
    return f"axis {limit.axis} of {name!r} must be {size}"


_TO_DO = ". Optimize with samples of other sizes, or a model that can be scripted, or call the original model here."


def outside(limit: str) -> str:
    """The message where the sizes of a call are none that the trace is right at."""
    return f"{NO_PATH} [{LIMITED}]: {limit}{_TO_DO}"


def limit_in(message: str) -> str:
    """The ``limit`` of a message that ``outside`` made."""
    return message.partition("]: ")[2].removesuffix(_TO_DO)


def tied(subject: str, call: CallSignature, sample: Sample, ties: Sequence[EqualSizes]) -> Reason:
    """Reason that the trace of ``subject`` is kept with checks on equal sizes."""
    where = "; ".join(equal_sizes_text(call, sample, one) for one in ties)
    return capture_failed(
        subject,
        Code.TRACE_SPECIALIZED,
        f"The trace is kept for samples like those given, where {where}.",
    )


def equal_sizes_text(call: CallSignature, sample: Sample, tie: EqualSizes) -> str:
    """``axis 1 of 'mask' is as long as axis 2 of 'key'``."""
    (a, i), (b, j) = tie.first, tie.second
    first, second = (name_of_leaf(call.names, sample, index) for index in (a, b))
    return f"axis {i} of {first!r} is as long as axis {j} of {second!r}"


def list_differences(call: CallSignature, differences: Differences) -> str:
    """``other sizes (x: float32[3, 4]): output 0 is off by up to 0.5; ...``, three at most."""
    shown = [
        f"{one.what} ({describe(call.names, one.sample)}): {why}" for one, why in differences[:3]
    ]
    more = len(differences) - len(shown)
    return "; ".join(shown) + (f"; and {more} more" if more else "")


def no_graph(
    how: str, call: CallSignature, differences: Differences, reasons: Sequence[Reason]
) -> str:
    """Return the text of the ``InputError`` when the best graph is wrong."""
    done = {"trace": "traced", "script": "scripted", "export": "exported"}[how]
    text = (
        f"model: the {done} module differs from the model at {list_differences(call, differences)}."
    )
    why_not_scripted = [one.detail for one in reasons if one.code is Code.SCRIPT_FAILED]
    if why_not_scripted:
        text += f" Scripting is no way out: {' '.join(why_not_scripted)}"
    if how != "trace":
        return text + _export_stops(reasons)
    text += f" {WHAT_TO_DO}"
    if all(one.axes for one, _ in differences):
        first = axes_of(differences[0][0].sample)
        sizes = ", ".join(str(first[axis]) for axis in sorted(differences[0][0].axes))
        text += (
            f"; or keep the trace for the sizes of the samples only (others, such as {sizes}, are the original's): "
            "Config(allow_tracing=True), or fix these dimensions in Config(dynamic_shapes=...)"
        )
    return f"{text}.{_export_stops(reasons)}"


def _export_stops(reasons: Sequence[Reason]) -> str:
    """A line for each Reason against an export; empty without any."""
    lines = [f"\n  {one.detail}" for one in reasons if one.code is Code.EXPORT_FAILED]
    return f"\ntorch.export is no way out:{''.join(lines)}" if lines else ""


def neither(model: nn.Module, methods: Sequence[str], reasons: Sequence[Reason]) -> str:
    """Return the text of the ``InputError`` when there is no graph at all."""
    subject = type(model).__name__
    others = [one for one in reasons if one.code is not Code.EXPORT_FAILED]
    details = " ".join(f"[{one.code.value}] {one.detail}" for one in others)
    if methods:
        return (
            f"preserved_attributes: {methods[0]!r} is a method, and tracing keeps only forward; {subject} "
            f"has to be scriptable (with @torch.jit.export on {methods[0]!r}), and it is not. {details}"
        )
    return f"model: {subject} can be neither traced nor scripted. {details}{_wrapped(model)}{_export_stops(reasons)}"


def _wrapped(model: nn.Module) -> str:
    """Return advice on parameters that are tensor subclasses; empty without any."""
    for name, parameter in model.named_parameters():
        if is_traceable_wrapper_subclass(parameter):
            return (
                f" Its parameter {name!r} is a {type(parameter).__name__}, whose operations TorchScript cannot record. "
                "Give the model as it was before its weights were wrapped (int8 is what Config(enable_int8=True) is "
                "for), or one that says explicitly how it is quantized, as torchao's convert_pt2e returns it."
            )
    return ""
