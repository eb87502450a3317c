# SPDX-License-Identifier: Apache-2.0
"""``float(t)``, ``int(t)``, ``max(a, b)``, ``math.sqrt(n)``, ... of the model's modules, as numbers of the graph.

    with shadowed(model):
        torch.jit.trace(...)             # 0.1 / max(float(x.norm()), 1e-5) follows x

Python demands that ``float(t)`` is a float, so the value would be a constant. While a model is traced, the
names ``float``, ``int``, ``len``, ``max``, ``min`` and ``math`` of the modules that define it, and of their
packages, mean the functions below. For anything but a traced tensor they do what Python's do. So do the names of
torch's FlexAttention (``flex_attention.py``).
"""

import builtins
import importlib
import math
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn

from blade.capture.decisions.flex_attention import function_in, stand_ins
from blade.capture.decisions.recorder import current
from blade.capture.decisions.traced_number import (
    TracedNumber,
    as_number,
    as_own_number,
    dtype_of,
    is_made,
    is_traced,
    rank_of,
    untraced,
)
from blade.process.shared_switch import SharedSwitch

_SCRIPTING: list[Any] = [
    importlib.import_module(name) for name in ("torch.jit", "torch.jit._trace")
]
"""Modules whose ``script`` is called while a model is traced, by torch's decorators and those of libraries."""

_NOT_SHADOWED = frozenset({"torch", "builtins", "blade", *sys.stdlib_module_names}) - {"__main__"}


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and current() is not None and is_traced(value)


class _Kind(type):
    """A stand-in for ``float`` or ``int`` that equals it, and has its instances."""

    real: type
    dtype: torch.dtype

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and _is_scalar(args[0]) and _has_one(args[0]):
            return cls.number(args[0])
        return cls.real(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        if type(instance) is TracedNumber:
            return dtype_of(instance) is cls.dtype
        return isinstance(instance, cls.real)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.real)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.real

    def __hash__(cls) -> int:
        return hash(cls.real)

    def __or__(cls, other: Any) -> Any:
        return cls.real | other

    def __ror__(cls, other: Any) -> Any:
        return other | cls.real

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.real, name)


def _has_one(tensor: torch.Tensor) -> bool:
    return rank_of(tensor) == 0 or all(n == 1 for n in _sizes(tensor))


def _sizes(tensor: torch.Tensor) -> list[int]:
    with untraced():
        return list(tensor.shape)


class _Float(metaclass=_Kind):
    real = builtins.float
    dtype = torch.float64

    @staticmethod
    def number(value: torch.Tensor) -> Any:
        return as_number(value, torch.float64)


class _Int(metaclass=_Kind):
    real = builtins.int
    dtype = torch.int64

    @staticmethod
    def number(value: torch.Tensor) -> Any:
        if dtype_of(value) is torch.int64 and rank_of(value) == 0 and is_made(value):
            return as_own_number(value)  # a size, or a number already
        return as_number(value, torch.int64)


def _len(value: Any) -> Any:
    if _is_scalar(value) and rank_of(value):
        return value.shape[0]
    return builtins.len(value)


def _extreme(real: Any, is_better: Any) -> Any:
    def extreme(*args: Any, **kwargs: Any) -> Any:
        several = args[0] if len(args) == 1 and isinstance(args[0], (list, tuple)) else args
        if kwargs or not several or not any(map(_is_scalar, several)) or not _same_kind(several):
            return real(*args, **kwargs)
        best = several[0]
        for one in several[1:]:
            first, second = _both(best, one)
            with torch._C.DisableTorchFunctionSubclass():
                best = _kept(torch.where(is_better(second, first), second, first))
        return best

    return extreme


def _same_kind(values: Any) -> bool:
    """Whether all are floats, or all ints: then the type of the result does not depend on which one it is."""
    kinds = {_kind(value) for value in values}
    return len(kinds) == 1 and None not in kinds


def _kind(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        is_number = rank_of(value) == 0 and dtype_of(value) in (torch.float64, torch.int64)
        return dtype_of(value) if is_number else None
    return {builtins.float: torch.float64, builtins.int: torch.int64}.get(type(value))


def _both(a: Any, b: Any) -> tuple[torch.Tensor, torch.Tensor]:
    like = a if isinstance(a, torch.Tensor) else b
    with torch._C.DisableTorchFunctionSubclass():
        first, second = (x if isinstance(x, torch.Tensor) else like.new_tensor(x) for x in (a, b))
    return first, second


def _kept(value: torch.Tensor) -> Any:
    return value if dtype_of(value) is torch.int64 else as_number(value)


def _divmod(a: Any, b: Any) -> Any:
    return (a // b, a % b) if _is_scalar(a) or _is_scalar(b) else builtins.divmod(a, b)


class _Math(ModuleType):
    """``math`` with functions of numbers of the graph."""

    def __getattr__(self, name: str) -> Any:
        return getattr(math, name)


def _of_number(name: str) -> Any:
    real, function = getattr(math, name), getattr(torch, {"fabs": "abs"}.get(name, name))

    def call(value: Any, *args: Any) -> Any:
        if args or type(value) is not TracedNumber or current() is None:
            return real(value, *args)
        return as_number(function(as_number(value, torch.float64)))

    return call


def _math() -> ModuleType:
    made = _Math("math")
    for name in "sqrt exp log log2 log10 sin cos tanh fabs".split():
        setattr(made, name, _of_number(name))
    return made


_NAMES: dict[str, Any] = {
    "float": _Float,
    "int": _Int,
    "len": _len,
    "max": _extreme(builtins.max, lambda new, old: new > old),
    "min": _extreme(builtins.min, lambda new, old: new < old),
    "divmod": _divmod,
}
_MATH = _math()
_INSTEAD = {
    id(getattr(math, name)): getattr(_MATH, name)
    for name in vars(_MATH)
    if hasattr(math, name) and not name.startswith("__")
}


@dataclass
class _Shadowed:
    """A namespace with shadows: how many need them, what they are, and what they hide."""

    space: dict[str, Any]
    shadows: dict[str, Any]
    hidden: dict[str, Any]
    users: int = 1

    def put(self) -> None:
        self.space.update(self.shadows)

    def take_back(self) -> None:
        for name, value in self.hidden.items():
            if value is _MISSING:
                self.space.pop(name, None)
            else:
                self.space[name] = value


_lock = threading.RLock()
_known: dict[int, _Shadowed] = {}  # by the id of the namespace
_MISSING = object()


@contextmanager
def shadowed(model: nn.Module) -> Iterator[None]:
    """Shadow the names in the modules of ``model``'s classes and in their packages."""
    spaces = [vars(module) for module in _modules_of(model)]
    with _lock:
        for space in spaces:
            _shadow(space)
    try:
        with _scripting:
            yield
    finally:
        with _lock:
            for space in spaces:
                _unshadow(space)


def _shadow(space: dict[str, Any]) -> None:
    known = _known.get(id(space))
    if known is not None:
        known.users += 1
        return
    shadows = {name: made for name, made in _NAMES.items() if name not in space}
    instead = {**_INSTEAD, **stand_ins()}
    for name, value in space.items():
        if value is math:
            shadows[name] = _MATH
        elif id(function := function_in(value)) in instead:
            shadows[name] = instead[id(function)]
    hidden = {name: space.get(name, _MISSING) for name in shadows}
    _known[id(space)] = _Shadowed(space, shadows, hidden)
    _known[id(space)].put()


def _unshadow(space: dict[str, Any]) -> None:
    known = _known[id(space)]
    known.users -= 1
    if not known.users:
        known.take_back()
        del _known[id(space)]


def _without_shadows(script: Any) -> Any:
    """``script`` for functions that are scripted while a model is traced: ``float`` is a type to it.

    Another thread that traces meanwhile meets Python's ``float``, which makes its numbers decisions.
    """

    def scripted(*args: Any, **kwargs: Any) -> Any:
        with _lock:
            for known in _known.values():
                known.take_back()
            try:
                return script(*args, **kwargs)
            finally:
                for known in _known.values():
                    known.put()

    return scripted


def _put() -> list[Any]:
    before = [module.script for module in _SCRIPTING]
    for module, script in zip(_SCRIPTING, before, strict=True):
        module.script = _without_shadows(script)
    return before


def _restore(before: list[Any]) -> None:
    for module, script in zip(_SCRIPTING, before, strict=True):
        module.script = script


_scripting = SharedSwitch(_put, _restore)


def _modules_of(model: nn.Module) -> list[ModuleType]:
    classes = {base for part in model.modules() for base in type(part).__mro__}
    names = {one.__module__ for one in classes}
    tops = {name.partition(".")[0] for name in names} - _NOT_SHADOWED
    return [
        module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in tops and isinstance(module, ModuleType)
    ]
