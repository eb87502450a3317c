# SPDX-License-Identifier: Apache-2.0
"""What stops an export of a model, by ``torch.export.draft_export``: each decision, with its line of code.

    drafted = draft_export(model, interface, others)
    drafted.failures        # ExportFailure("model.py:12", "value", "model.py:12 decides on a value ...")

draft_export computes with the sample itself beside the symbols, so it goes on where an export raises. It raises as
well at some models, such as those with ``torch.cond`` at symbolic sizes, so what it logs is read while it runs.
It does not compute ``torch.cond``: the data behind one is arbitrary, and no failure quotes a value.
"""

import linecache
import logging
import re
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from types import CodeType
from typing import Any

import sympy
import torch
from torch import nn
from torch._logging._internal import trace_log  # the structured log, which draft_export reads too
from torch.export import Dim
from torch.utils import _pytree as pytree
from torch.utils._sympy import functions

from blade.capture.exported.export_script import arguments, quiet
from blade.capture.exported.interface import Interface, Sample
from blade.core.attempt import attempt
from blade.core.reason import Code, Reason, Stage
from blade.core.torch_modes import oblivious_to_sizes
from blade.errors import is_internal

_LONGEST = 100  # characters of a line of code
_EVENTS = (
    "propagate_real_tensors_provenance",
    "guard_added",
    "missing_fake_kernel",
    "mismatched_fake_kernel",
)
_SOURCE = re.compile(r"L\['(\w+)'\]((?:\['[^']+'\]|\[\d+\])*)\.size\(\)\[(\d+)\]")
_STEP = re.compile(r"\[(?:'([^']+)'|(\d+))\]")
_FUNCTIONS = {name: getattr(functions, name) for name in functions.__all__}
_STDLIB = f"{sysconfig.get_path('stdlib')}/"


@dataclass(frozen=True)
class ExportFailure:
    """``place``: ``file.py:line``, or empty if it is in no code of the user's. ``kind``: ``value``, ``size`` or
    ``kernel``. ``text``: what is in the way, and what to do."""

    place: str
    kind: str
    text: str


@dataclass(frozen=True)
class Drafted:
    """``failures`` in the order met; ``raised``: why draft_export went no further, ``None`` if it did."""

    failures: tuple[ExportFailure, ...]
    raised: Reason | None = None


def draft_export(model: nn.Module, interface: Interface, others: Sequence[Sample]) -> Drafted:
    """Return what stops an export of ``model`` at ``interface.sample`` that is to answer at ``others`` too.

    The axes whose sizes differ there are dynamic; without ``others`` none is. ``model`` is in eval mode. Its code
    runs with the sample's data, from the present random state, and may leave attributes and buffers behind.
    Nothing is written to stderr or kept on disk.
    """
    shapes_of = [
        [x.shape if isinstance(x, torch.Tensor) else () for x in pytree.tree_leaves(one)]
        for one in (interface.sample, *others)
    ]
    dims = {
        (k, axis): Dim.AUTO if any(one[k][axis] != size for one in shapes_of) else Dim.STATIC
        for k, shape in enumerate(shapes_of[0])
        for axis, size in enumerate(shape)
    }
    given = [_by_name(model, interface, one) for one in others]

    def run() -> None:
        args, kwargs, shapes = arguments(interface, dims)
        backed = oblivious_to_sizes()
        with quiet(), torch.no_grad(), backed:
            torch.export.draft_export(model, args, kwargs, dynamic_shapes=shapes, strict=False)

    reader = _Reader(run.__code__, given)
    with _reading(reader):
        made = attempt(Stage.CAPTURE, None, type(model).__name__, run, code=Code.EXPORT_FAILED)
    return Drafted(tuple(reader.met.values()), made)


def _by_name(model: nn.Module, interface: Interface, sample: Sample) -> dict[str, Any]:
    args, kwargs = interface.bind(sample)
    return signature(model.forward).bind(*args, **kwargs).arguments


class _Reader(logging.Handler):
    """Reads records of the structured log while the model's frames are on the stack.

    ``end``: the code that calls draft_export. ``given``: arguments by name, at which guards have to hold.
    """

    def __init__(self, end: CodeType, given: Sequence[dict[str, Any]]) -> None:
        super().__init__()
        self._end, self._given = end, given
        self.met: dict[tuple[str, str], ExportFailure] = {}
        self.others: set[logging.Handler] = set()

    def emit(self, record: logging.LogRecord) -> None:
        self.others.update(trace_log.handlers)
        known: dict[str, Any] = getattr(record, "metadata", {})
        place, code = _place(self._end) if any(key in known for key in _EVENTS) else ("", "")
        found = None
        if (event := known.get("propagate_real_tensors_provenance")) is not None:
            found = _value(event, place, code)
        elif (event := known.get("guard_added")) is not None:
            found = _size(event, place, code, self._given)
        elif (event := known.get("missing_fake_kernel")) is not None:
            found = _kernel(event["op"], "is missing", place, code)
        elif (event := known.get("mismatched_fake_kernel")) is not None:
            found = _kernel(event["op"], f"is wrong: {event['reason'].strip()}", place, code)
        if found is not None:
            self.met.setdefault((place or found.text, found.kind), found)


@contextmanager
def _reading(reader: _Reader) -> Iterator[None]:
    """A context in which ``reader`` gets the structured log. draft_export's own log file, and what it changes of
    the log, is undone."""
    before, folder, propagates = list(trace_log.handlers), tempfile.tempdir, trace_log.propagate
    trace_log.addHandler(reader)
    trace_log.propagate = False
    try:
        with tempfile.TemporaryDirectory() as tempfile.tempdir:
            try:
                yield
            finally:
                tempfile.tempdir = folder
                for handler in reader.others - {*before, reader}:
                    handler.close()
    finally:
        trace_log.handlers[:], trace_log.propagate = before, propagates


def _place(end: CodeType) -> tuple[str, str]:
    """``file.py:line`` and the code of the innermost frame of the user's; both empty outside the model."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code is not end:
        file = frame.f_code.co_filename
        if not (is_internal(file) or _is_library(file)):
            code = linecache.getline(file, frame.f_lineno).strip()
            shown = code if len(code) <= _LONGEST else f"{code[:_LONGEST]}..."
            return f"{Path(file).name}:{frame.f_lineno}", shown
        frame = frame.f_back
    return "", ""


def _is_library(file: str) -> bool:
    """Whether ``file`` belongs to Python, or is generated."""
    return file.startswith("<") or (file.startswith(_STDLIB) and "site-packages" not in file)


def _value(event: dict[str, Any], place: str, code: str) -> ExportFailure:
    is_decision = event["result"] in ("True", "False")
    what = "decides on a value" if is_decision else "makes a Python number of a value"
    text = (
        f"{place or 'The model'} {what} that only a call knows: {code or 'an op of torch'} (to torch, "
        f"{event['expr']}). Keep it in the graph with torch.cond or torch.where, or state what always holds with "
        "torch._check."
    )
    return ExportFailure(place, "value", text)


def _size(
    event: dict[str, Any], place: str, code: str, given: Sequence[dict[str, Any]]
) -> ExportFailure | None:
    """The failure of a guard on sizes that does not hold at all of ``given``; ``None`` for another guard."""
    sources = event["symbol_to_sources"]
    if not sources or event["prefix"] == "runtime_assert":
        return None
    names = {str(symbol): str(source) for symbol, source in sources.items()}
    for entries in given:
        sizes = {symbol: _size_at(source, entries) for symbol, source in names.items()}
        if None in sizes.values() or _holds(event["expr"], sizes) is not False:
            continue
        guard = event["expr"]
        for symbol, source in names.items():
            guard = re.sub(rf"\b{symbol}\b", _shown(source), guard)
        where = ", ".join(
            f"{_shown(source)} is {sizes[symbol]}" for symbol, source in names.items()
        )
        text = (
            f"{place or 'The model'} decides on a size: {code or 'an op of torch'} ({guard} does not hold where "
            f"{where}). Compute with the size without a loop, a table or a comparison in Python, or fix it in "
            "Config(dynamic_shapes=...)."
        )
        return ExportFailure(place, "size", text)
    return None


def _size_at(source: str, given: dict[str, Any]) -> int | None:
    """The size that ``L['x'][0].size()[1]`` names; ``None`` for another source."""
    match = _SOURCE.fullmatch(source)
    if match is None:
        return None
    name, inside, axis = match.groups()
    found: Any = given.get(name)
    for key, index in _STEP.findall(inside):
        if isinstance(found, dict):
            found = found.get(key)
        elif isinstance(found, tuple | list) and index and int(index) < len(found):
            found = found[int(index)]
        else:
            return None
    is_there = isinstance(found, torch.Tensor) and int(axis) < found.dim()
    return found.shape[int(axis)] if is_there else None


def _shown(source: str) -> str:
    """``x.size(1)``."""
    match = _SOURCE.fullmatch(source)
    assert match is not None, source
    name, inside, axis = match.groups()
    return f"{name}{inside}.size({axis})"


def _holds(expression: str, sizes: dict[str, int | None]) -> bool | None:
    """Whether a guard holds at ``sizes``; ``None`` if that cannot be told."""
    try:
        value = sympy.sympify(expression, locals={**_FUNCTIONS, **sizes})
    except (sympy.SympifyError, TypeError, ValueError, ArithmeticError, AttributeError):
        return None
    return bool(value) if value in (True, False) else None


def _kernel(op: str, what: str, place: str, code: str) -> ExportFailure:
    name = str(op).removesuffix(".default").replace(".", "::", 1)
    text = (
        f"{place or 'The model'} calls the op {name}, whose fake kernel {what}: {code or 'no line of Python'}. "
        f'Register one that makes the shape of the result: @torch.library.register_fake("{name}").'
    )
    return ExportFailure(place, "kernel", text)
