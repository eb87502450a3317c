# SPDX-License-Identifier: Apache-2.0
"""Records decisions: each conversion of a traced tensor into a Python value becomes a check in the graph.

    with recording() as recorder:
        graph = torch._C._create_graph_by_tracing(...)       # if x.sum() > 0: ...
    recorder.decisions       # [TracedDecision(0, "models.py:12", "if x.sum() > 0:", True)]

A trace holds one path through the model's code. Where Python asks a tensor for a value (``bool``, ``int``,
``len``, iteration, ``numpy``, ...), the trace calls a function that raises unless the value is what it was; its
message names the decision. The methods of ``torch.Tensor`` are patched for this, since modes of torch see
nothing inside of functions that are Python themselves. Other threads meanwhile get torch's methods.
"""

import linecache
import operator
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from blade.capture.decisions import checks
from blade.capture.decisions.assignments import assign
from blade.capture.decisions.contraction_order import with_unchecked_order
from blade.capture.decisions.lists_of_numbers import with_lists
from blade.capture.decisions.traced_number import (
    TracedNumber,
    as_number,
    as_own_number,
    dtype_of,
    is_float,
    is_traced,
    rank_of,
    untraced,
    watch_divisors,
)
from blade.core import torchscript
from blade.graph.torchscript.decision_checks import MARK
from blade.process.shared_switch import SharedSwitch

_LISTED = 64
"""Elements up to which ``tolist`` returns numbers of the graph; larger tensors have to be equal."""

_STANDARD = os.path.dirname(os.__file__) + os.sep
_HERE = (os.path.dirname(torch.__file__) + os.sep, str(Path(__file__).parents[2]) + os.sep)


@dataclass(frozen=True)
class TracedDecision:
    """One conversion of a tensor into Python: where it is in the model's code, and what it gave."""

    index: int
    kind: str  # "bool", "int", "float", "elements", "layout", "comparison", "form" or "argument"
    where: str  # "models.py:12"
    function: str
    line: str  # the source line
    outcome: str

    def __str__(self) -> str:
        quoted = f"`{self.line}` " if self.line else ""
        return f"{quoted}({self.where}, in {self.function})"


@dataclass
class Recorder:
    """What one trace decided. ``consulted``: the kinds of forms that the code asked for, with their decisions;
    ``arguments``: the entries of the sample that decide by their value, with theirs.

    ``deferred`` are conditions to be checked at the end of the trace, where it can be extended: what depends on
    them does no harm, and a check cuts what may be one cluster.
    """

    decisions: list[TracedDecision] = field(default_factory=list)
    consulted: dict[str, int] = field(default_factory=dict)
    arguments: dict[int, int] = field(default_factory=dict)
    may_defer: bool = False
    deferred: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    weights: frozenset[int] = frozenset()  # ids of tensors whose form never changes
    _is_busy: bool = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing inside the block."""
        before, self._is_busy = self._is_busy, True
        try:
            yield
        finally:
            self._is_busy = before

    @property
    def is_active(self) -> bool:
        return not self._is_busy and torchscript.is_tracing()

    def consult(self, about: str, tensor: torch.Tensor) -> None:
        """Note that the model's code asked ``tensor``, if it is none of the weights, for its form."""
        if about in self.consulted or id(tensor) in self.weights:
            return
        if is_traced(tensor) and (about == "device" or not _is_size(tensor)):
            self.consulted[about] = self._add("form", about)

    def consult_ranks(self) -> None:
        """Note that scripted code asked for the rank of a tensor."""
        if "rank" not in self.consulted:
            self.consulted["rank"] = self._add("form", "rank")

    def consult_code(self, about: str, place: tuple[CodeType, int]) -> None:
        """Note that the model's code asks for forms at ``place``, a code and a line of it."""
        code, number = place
        where = f"{os.path.basename(code.co_filename)}:{number}"
        line = linecache.getline(code.co_filename, number).strip()
        index = len(self.decisions)
        self.consulted[about] = index
        self.decisions.append(TracedDecision(index, "form", where, code.co_name, line, repr(about)))

    def note_argument(
        self, position: int, name: str, value: object, forward: CodeType | None
    ) -> None:
        """Note that the code ``forward`` was called with ``value``, or with a tensor, as its argument ``name``."""
        shown = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
        where, function = "?", "forward"
        if forward is not None:
            where = f"{os.path.basename(forward.co_filename)}:{forward.co_firstlineno}"
            function = forward.co_name
        index = self.arguments[position] = len(self.decisions)
        self.decisions.append(TracedDecision(index, "argument", where, function, name, shown))

    def note(self, kind: str, outcome: object, check: Callable[[str], Any]) -> None:
        """Add a decision; ``check(text)`` puts its check into the graph."""
        index = self._add(kind, outcome)
        with self.paused(), torch._C.DisableTorchFunctionSubclass():
            check(f"{MARK}{index}")

    def never(self, condition: torch.Tensor) -> None:
        """Add a decision whose ``condition`` is false, to be checked at the end of the trace."""
        if self.may_defer:
            self.deferred.append((self._add("bool", False), condition))
        else:
            self.note("bool", False, lambda text: checks.same_bool(condition, False, text))

    def ended(self, output: Any) -> Any:
        """``output``, behind the checks that were put off until it exists."""
        with self.paused(), torch._C.DisableTorchFunctionSubclass():
            for index, condition in self.deferred:
                checks.same_bool(condition, False, f"{MARK}{index}")
        self.deferred.clear()
        return output

    def _add(self, kind: str, outcome: object) -> int:
        where, function, line = _described(_place())
        text, index = repr(outcome), len(self.decisions)
        shown = text if len(text) < 80 else f"{text[:77]}..."
        self.decisions.append(TracedDecision(index, kind, where, function, line, shown))
        return index


_local = threading.local()


def current() -> Recorder | None:
    """The recorder of the trace that this thread is making, if it is to see the present call."""
    found: Recorder | None = getattr(_local, "recorder", None)
    return found if found is not None and found.is_active else None


@contextmanager
def recording(weights: frozenset[int] = frozenset()) -> Iterator[Recorder]:
    """Record the decisions of this thread's trace."""
    checks.compile_all()
    before = getattr(_local, "recorder", None)
    _local.recorder = made = Recorder(weights=weights)
    try:
        with _patched:
            yield made
    finally:
        _local.recorder = before


def _place() -> FrameType | None:
    """The innermost frame of the model's code; the innermost of torch if that is a module of torch alone."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_HERE[1]):
        frame = frame.f_back
    innermost = frame
    while frame is not None and _is_library(frame.f_code.co_filename):
        if frame.f_code.co_filename.startswith(_HERE[1]):
            return innermost  # what is around is no model
        frame = frame.f_back
    return innermost if frame is None else frame


def _is_library(path: str) -> bool:
    """Whether ``path`` is torch's, this package's or Python's own."""
    own = path.startswith(_STANDARD) and "-packages" not in path
    return own or path.startswith(_HERE)


def _described(frame: FrameType | None) -> tuple[str, str, str]:
    if frame is None:
        return "unknown", "unknown", ""
    path, number = frame.f_code.co_filename, frame.f_lineno
    line = linecache.getline(path, number).strip()
    return f"{os.path.basename(path)}:{number}", frame.f_code.co_name, line


def _see_divisor(divisor: Any) -> None:
    """Python raises where a number is divided by 0; tensors do not."""
    recorder = current()
    if recorder is None or not is_traced(divisor):
        return
    if not _plain(divisor, lambda t: bool(t == 0)):
        recorder.never(divisor == 0)
        return
    recorder.note("bool", True, lambda text: checks.same_bool(divisor == 0, True, text))
    raise ZeroDivisionError("division by zero")


watch_divisors(_see_divisor)

# The methods of torch.Tensor

_T: Any = torch.Tensor
_functions_of_torch: Any = torch._C._VariableFunctions
_builtins: Any = torch.jit._builtins


def _untraced(value: torch.Tensor) -> torch.Tensor:
    """A copy of ``value`` that is a constant to the tracer."""
    with untraced():
        return value.detach().clone()


def _plain(self: torch.Tensor, read: Callable[[torch.Tensor], Any]) -> Any:
    """Read a value of a traced tensor, without the tracer's notice."""
    with untraced(), torch._C.DisableTorchFunctionSubclass():
        return read(self)


def _reader(name: str, kind: str, check: Callable[..., Any]) -> Callable[..., Any]:
    original = getattr(_T, name)

    def method(self: torch.Tensor) -> Any:
        recorder = current()
        if recorder is None or not is_traced(self):
            return original(self)
        value = _plain(self, original)
        recorder.note(kind, value, lambda text: check(self, value, text))
        return value

    method.__name__ = name
    return method


def _float_check(t: torch.Tensor, value: float, text: str) -> Any:
    return checks.is_nan(t, text) if value != value else checks.same_float(t, value, text)


def _len(original: Callable[..., int]) -> Callable[..., int]:
    def __len__(self: torch.Tensor) -> int:
        recorder = current()
        if recorder is None or rank_of(self) == 0 or not is_traced(self):
            return original(self)
        count = int(_plain(self, lambda t: t.shape[0]))
        recorder.note("int", count, lambda text: checks.same_size(self, 0, count, text))
        return count

    return __len__


def _unbind(original: Callable[..., Any]) -> Callable[..., Any]:
    def unbind(self: torch.Tensor, dim: int = 0) -> Any:
        recorder = current()
        if recorder is not None and is_traced(self) and rank_of(self):
            count = int(_plain(self, lambda t: t.shape[dim]))  # asked before the list is unpacked
            recorder.note("int", count, lambda text: checks.same_size(self, dim, count, text))
        return original(self, dim)

    return unbind


def _in_parts(
    original: Callable[..., Any], keeping: Callable[..., Any], count: Callable[..., Any]
) -> Callable[..., Any]:
    """A method that returns as many tensors as a size says; ``keeping`` takes a traced size as it is."""

    def method(self: torch.Tensor, *given: Any, **named: Any) -> Any:
        recorder = current()
        dim = given[1] if len(given) > 1 else named.get("dim", 0)
        # torch calls it chunks, split_size or split_size_or_sections
        by_name = (value for name, value in named.items() if name != "dim")
        parts = given[0] if given else next(by_name, None)
        is_size = parts is not None and not isinstance(parts, (list, tuple))
        if recorder is None or not is_size or not is_traced(self):
            return original(self, *given, **named)
        found = len(_plain(self, lambda t: original(t, parts, dim)))
        recorder.note("int", found, lambda text: count(self, parts, dim, found, text))
        is_kept = isinstance(parts, torch.Tensor) and rank_of(parts) == 0
        return (keeping if is_kept else original)(self, parts, dim)

    return method


def _split_count(x: torch.Tensor, size: Any, dim: int, want: int, text: str) -> Any:
    return checks.same_split(x, _as_tensor(size), dim, want, text)


def _chunk_count(x: torch.Tensor, chunks: Any, dim: int, want: int, text: str) -> Any:
    return checks.same_chunks(x, _as_tensor(chunks), dim, want, text)


def _as_tensor(number: Any) -> torch.Tensor:
    return number if isinstance(number, torch.Tensor) else torch.as_tensor(number)


def _item(original: Callable[..., Any]) -> Callable[..., Any]:
    def item(self: torch.Tensor) -> Any:
        recorder = current()
        if recorder is None or not is_traced(self) or dtype_of(self).is_complex:
            return original(self)
        return self.__bool__() if dtype_of(self) is torch.bool else as_number(self)

    return item


def _of_int(name: str) -> Callable[..., Any]:
    """A method that ints have and tensors do not, for sizes and other numbers of the graph."""

    def method(self: torch.Tensor, *args: Any) -> Any:
        _require_tracing(name)
        return getattr(self.__int__(), name)(*args)

    return method


def _is_integer(self: torch.Tensor) -> bool:
    """A method of Python's numbers, of which only the answer is a decision."""
    _require_tracing("is_integer")
    return not is_float(self) or bool(self == torch.floor(self))


def _astype(self: torch.Tensor, dtype: Any) -> torch.Tensor:
    """What ``np.ceil(np.log(x.shape[1])).astype(int)`` asks of NumPy's numbers."""
    import numpy as np

    _require_tracing("astype")
    kind = np.dtype(dtype).kind
    if kind not in "iuf":
        raise AttributeError(f"'Tensor' object has no attribute 'astype' that makes {dtype}")
    return self.to(torch.float64 if kind == "f" else torch.int64)


def _require_tracing(name: str) -> None:
    if current() is None:
        raise AttributeError(f"'Tensor' object has no attribute {name!r}")


def _assigning(original: Callable[..., Any], apart: Callable[..., Any]) -> Callable[..., Any]:
    """``n += 1`` of a number of the graph makes another number, as Python does; of a tensor it writes."""

    def method(self: torch.Tensor, other: Any) -> Any:
        if current() is None or not is_traced(self) or not _is_size(self):
            return original(self, other)
        return as_own_number(apart(self, other))

    return method


def _is_size(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a number of the graph, or one of the sizes that are 0-d tensors while torch traces."""
    if isinstance(tensor, TracedNumber):
        return True
    if rank_of(tensor) or dtype_of(tensor) is not torch.int64:
        return False
    kind: str = torch._C._get_value_trace(tensor).node().kind()  # type: ignore[attr-defined]
    return kind in ("aten::size", "prim::NumToTensor")


def _tolist(original: Callable[..., Any]) -> Callable[..., Any]:
    def tolist(self: torch.Tensor) -> Any:
        recorder = current()
        if recorder is None or not is_traced(self):
            return original(self)
        if dtype_of(self).is_complex or _plain(self, torch.Tensor.numel) > _LISTED:
            return _elements(recorder, self, original)
        if rank_of(self) == 0:
            return self.item()
        return [row.tolist() for row in self.unbind(0)]

    return tolist


def _elements(recorder: Recorder, self: torch.Tensor, read: Callable[..., Any]) -> Any:
    """``read(self)``, which is right as long as all elements are what they are."""
    want = _untraced(self)
    value = read(want)
    shape = _plain(want, lambda t: list(t.shape))
    recorder.note("elements", shape, lambda text: checks.same_elements(self, want, text))
    return value


def _leaving(original: Callable[..., Any]) -> Callable[..., Any]:
    """A method whose result is not of torch."""

    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        recorder = current()
        if recorder is None or not is_traced(self):
            return original(self, *args, **kwargs)
        return _elements(recorder, self, lambda t: original(t, *args, **kwargs))

    return method


def _indexing(
    original: Callable[..., Any], call: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """The tracer records a traced tensor in an index, yet asks for its value as well; ``call``: how to trace it."""
    traced = original if call is None else call

    def method(self: torch.Tensor, index: Any, *value: Any) -> Any:
        recorder = current()
        if recorder is None:
            return original(self, index, *value)
        if isinstance(index, tuple):
            index = tuple(_stacked(part) if _has_numbers(part) else part for part in index)
        elif _has_numbers(index):
            index = _stacked(index)
        if isinstance(index, tuple) and any(part is Ellipsis for part in index[:-1]):
            recorder.consult("rank", self)  # the dimensions behind it are counted from the first
        with recorder.paused():
            return traced(self, index, *value)

    method.__name__ = original.__name__  # torch gives this function to modes
    return method


def _setting(get: Callable[..., Any], put: Callable[..., Any]) -> Callable[..., Any]:
    return _indexing(put, lambda self, index, value: assign(self, index, value, get, put))


def _has_numbers(part: Any) -> bool:
    """Whether ``part`` is a list of indices with traced ones, which the tracer would take for constants."""
    return isinstance(part, list) and _has_traced(part)


def _contains(original: Callable[..., Any]) -> Callable[..., Any]:
    def __contains__(self: torch.Tensor, element: Any) -> Any:
        if current() is None:
            return original(self, element)
        return bool((element == self).any())

    return __contains__


def _rounding(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """``math.ceil(t)`` and its kin: a number of the graph."""

    def method(self: torch.Tensor) -> Any:
        if current() is None or not is_traced(self):
            return function(self).item()
        return as_number(function(self), torch.int64) if is_float(self) else self

    return method


def _round(self: torch.Tensor, digits: int | None = None) -> Any:
    if current() is None or not is_traced(self) or digits is not None:
        return round(self.item(), digits)
    return _rounding(torch.round)(self)


def _format(original: Callable[..., str]) -> Callable[..., str]:
    def __format__(self: torch.Tensor, form: str) -> str:
        recorder = current()
        if recorder is None or not is_traced(self):
            return original(self, form)
        if rank_of(self) == 0:  # as a number is written
            return format(self.__float__() if is_float(self) else self.__int__(), form)
        # the text of several numbers is read by people: most often it is a message that nobody sees
        return original(_untraced(self), form)

    return __format__


def _contiguous(original: Callable[..., bool]) -> Callable[..., bool]:
    def is_contiguous(self: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
        recorder = current()
        value = original(self, *args, **kwargs)
        if recorder is not None and not args and not kwargs and is_traced(self):
            recorder.note("layout", value, lambda text: checks.same_layout(self, value, text))
        return value

    return is_contiguous


def _stride(original: Callable[..., Any]) -> Callable[..., Any]:
    def stride(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        recorder = current()
        if recorder is None or not is_traced(self):
            return original(self, *args, **kwargs)
        want = list(_plain(self, original))
        order = tuple(sorted(range(len(want)), key=lambda dim: (-want[dim], dim)))
        if order and want == _products(_plain(self, lambda t: list(t.shape)), order):
            known = f"dense in the order {order}"
            recorder.note("layout", known, lambda text: checks.dense_strides(self, order, text))
            numbers = tuple(_products(list(self.shape), order))
            dim = args[0] if args else kwargs.get("dim")
            return numbers if dim is None else numbers[dim]
        recorder.note("layout", want, lambda text: checks.same_strides(self, want, text))
        return original(self, *args, **kwargs)

    return stride


def _products(sizes: list[Any], order: Sequence[int]) -> list[Any]:
    """The strides of a dense tensor with these sizes, whose dimensions lie in memory in this ``order``."""
    found: list[Any] = [1] * len(sizes)
    for before, dim in reversed(list(pairwise(order))):
        found[before] = sizes[dim] * found[dim]
    return found


def _consulting(original: Callable[..., Any], about: Callable[[Any], str]) -> Callable[..., Any]:
    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        recorder = current()
        if recorder is not None:
            recorder.consult(about(self), self)
        return original(self, *args, **kwargs)

    return method


def _consulting_property(original: Any, about: Callable[[Any], str]) -> property:
    return property(_consulting(original.__get__, about), getattr(original, "__set__", None))


def _data(original: Any) -> property:
    """``t.data`` is a constant to the tracer, and so are its sizes: ``x.view(*y.data.shape)``."""

    def data(self: torch.Tensor) -> torch.Tensor:
        if current() is None or not is_traced(self):
            found: torch.Tensor = original.__get__(self)
            return found
        return self.detach()

    return property(data, original.__set__)


def _rank(tensor: torch.Tensor) -> str:
    return "rank"


def _dtype(tensor: torch.Tensor) -> str:
    return "dtype of floats" if is_float(tensor) else "dtype of integers"


def _device(tensor: torch.Tensor) -> str:
    return "device"


def _methods() -> dict[str, Any]:
    own: dict[str, Any] = {
        "__bool__": _reader("__bool__", "bool", checks.same_bool),
        "is_nonzero": _reader("is_nonzero", "bool", checks.same_bool),
        "__int__": _reader("__int__", "int", checks.same_int),
        "__index__": _reader("__index__", "int", checks.same_int),
        "__float__": _reader("__float__", "float", _float_check),
        "__complex__": _leaving(_T.__complex__),
        "__len__": _len(_T.__len__),
        "__contains__": _contains(_T.__contains__),
        "__format__": _format(_T.__format__),
        "__array__": _leaving(_T.__array__),
        "__dlpack__": _leaving(_T.__dlpack__),
        "__ceil__": _rounding(torch.ceil),
        "__floor__": _rounding(torch.floor),
        "__trunc__": _rounding(torch.trunc),
        "__round__": _round,
        "__iadd__": _assigning(_T.__iadd__, operator.add),
        "__isub__": _assigning(_T.__isub__, operator.sub),
        "__imul__": _assigning(_T.__imul__, operator.mul),
        "__getitem__": _indexing(_T.__getitem__),
        "__setitem__": _setting(_T.__getitem__, _T.__setitem__),
        "item": _item(_T.item),
        "tolist": _tolist(_T.tolist),
        "numpy": _leaving(_T.numpy),
        "bit_length": _of_int("bit_length"),
        "bit_count": _of_int("bit_count"),
        "is_integer": _is_integer,
        "astype": _astype,
        "unbind": _unbind(_T.unbind),
        "split": _in_parts(_T.split, _functions_of_torch.split, _split_count),
        "chunk": _in_parts(_T.chunk, _functions_of_torch.chunk, _chunk_count),
        "is_contiguous": _contiguous(_T.is_contiguous),
        "stride": _stride(_T.stride),
        "dim": _consulting(_T.dim, _rank),
        "size": _consulting(_T.size, _rank),
        "is_floating_point": _consulting(_T.is_floating_point, _dtype),
        "is_complex": _consulting(_T.is_complex, _dtype),
        "get_device": _consulting(_T.get_device, _device),
    }
    own["data"] = _data(_T.data)
    for name, about in (("shape", _rank), ("ndim", _rank), ("dtype", _dtype), ("device", _device)):
        own[name] = _consulting_property(getattr(_T, name), about)
    return own


def _functions() -> dict[str, Any]:
    return {
        "equal": _comparing(torch.equal, checks.same_equal),
        "allclose": _comparing(torch.allclose, checks.same_allclose),
        _ALIGNED: _comparing(getattr(torch, _ALIGNED), checks.same_alignment),
        "unbind": _unbind(torch.unbind),
        "split": _in_parts(torch.split, _functions_of_torch.split, _split_count),
        "chunk": _in_parts(torch.chunk, _functions_of_torch.chunk, _chunk_count),
        "tensor": _making(torch.tensor),
        "as_tensor": _making(torch.as_tensor),
        "is_floating_point": _consulting(torch.is_floating_point, _dtype),
        "is_nonzero": _reader("is_nonzero", "bool", checks.same_bool),
    }


_ALIGNED = "_nested_tensor_from_mask_left_aligned"  # what nn.TransformerEncoder decides by
_BUILTINS = {"equal": "aten::equal", "allclose": "aten::allclose", "unbind": "aten::unbind"}
_BUILTINS |= {"split": "aten::split", "chunk": "aten::chunk", "tensor": "aten::tensor"}
_BUILTINS |= {"as_tensor": "aten::as_tensor", "is_floating_point": "aten::is_floating_point"}
_BUILTINS |= {"is_nonzero": "aten::is_nonzero", _ALIGNED: f"aten::{_ALIGNED}"}
"""What the patched functions are to code that is scripted while a model is traced."""


def _comparing(original: Callable[..., bool], check: Callable[..., Any]) -> Callable[..., bool]:
    def method(a: Any, b: Any, *args: Any, **kwargs: Any) -> bool:
        value = original(a, b, *args, **kwargs)
        recorder = current()
        if recorder is not None and (is_traced(a) or is_traced(b)):
            recorder.note(
                "comparison",
                value,
                lambda text: check(a, b, *args, want=value, text=text, **kwargs),
            )
        return value

    return method


_DTYPES: dict[Any, torch.dtype] = {int: torch.int64, float: torch.float64}  # by shadows.py's, too


def _making(original: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.tensor`` of numbers of the graph."""

    def method(data: Any, *args: Any, **kwargs: Any) -> Any:
        if current() is None:
            return original(data, *args, **kwargs)
        if kwargs.get("dtype") in _DTYPES:
            kwargs["dtype"] = _DTYPES[kwargs["dtype"]]
        if not _has_traced(data):
            return original(data, *args, **kwargs)
        dtype = kwargs.get("dtype", args[0] if args else None)
        device = kwargs.get("device", args[1] if len(args) > 1 else None)
        if isinstance(data, torch.Tensor) and rank_of(data):
            return original(data, *args, **kwargs)
        found = _stacked(data)
        if dtype is None:
            dtype = torch.get_default_dtype() if is_float(found) else dtype_of(found)
        made = found.to(dtype)
        return made if device is None else made.to(device)

    return method


def _has_traced(data: Any) -> bool:
    if isinstance(data, (list, tuple)):
        return any(map(_has_traced, data))
    return isinstance(data, torch.Tensor) and is_traced(data)


def _stacked(data: Any) -> torch.Tensor:
    if not isinstance(data, (list, tuple)):
        if isinstance(data, torch.Tensor):
            return data.plain() if isinstance(data, TracedNumber) else data
        return _scalar(data)
    parts = [_stacked(item) for item in data]
    common = dtype_of(parts[0])
    for part in parts[1:]:
        common = torch.promote_types(common, dtype_of(part))
    return torch.stack([part.to(common) for part in parts])


def _scalar(value: Any) -> torch.Tensor:
    kind = torch.float64 if isinstance(value, float) else None
    made: torch.Tensor = _originals["tensor"](value, dtype=kind)
    return made


_originals: dict[str, Any] = {"tensor": torch.tensor}


@dataclass(frozen=True)
class _Before:
    """What the patches replaced; ``None``: a base class has it."""

    methods: dict[str, Any]
    functions: dict[str, Any]
    listing: list[tuple[Any, str, Any]]
    builtins: list[Any]  # functions that scripting is told about, by their ids


def _put() -> _Before:
    methods, functions = _methods(), _functions()
    kept = {name: _T.__dict__[name] for name in methods if name in _T.__dict__}
    kept_functions = {name: getattr(torch, name) for name in functions}
    for name, made in methods.items():
        setattr(_T, name, made)
    for name, made in functions.items():
        setattr(torch, name, made)
        _builtins._register_builtin(made, _BUILTINS[name])
    listing, builtins = [], list(functions.values())
    for owner, name, made in _patches(lambda: current() is not None):
        original = getattr(owner, name)
        builtin = _builtins._find_builtin(original)
        if builtin is not None:
            _builtins._register_builtin(made, builtin)
            builtins.append(made)
        listing.append((owner, name, original))
        setattr(owner, name, made)
    unpatched = {name: kept.get(name) for name in methods}
    return _Before(unpatched, kept_functions, listing, builtins)


def _patches(is_active: Callable[[], bool]) -> Iterator[tuple[Any, str, Any]]:
    yield from with_lists(is_active)
    yield from with_unchecked_order(is_active)


def _restore(before: _Before) -> None:
    for made in before.builtins:  # another function may have its id one day
        _builtins._get_builtin_table().pop(id(made), None)
    for owner, name, original in before.listing:
        if owner is _T:
            delattr(owner, name)
        else:
            setattr(owner, name, original)
    for name, original in before.methods.items():
        if original is None:  # torch defines it in a base class
            delattr(_T, name)
        else:
            setattr(_T, name, original)
    for name, original in before.functions.items():
        setattr(torch, name, original)


_patched = SharedSwitch(_put, _restore)
"""Patches the methods of ``torch.Tensor`` while any thread records; ``current`` tells the threads apart."""
