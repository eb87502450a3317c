# SPDX-License-Identifier: Apache-2.0
"""Trace calls of which TorchScript has no overload: ``mask.masked_fill(m, True)``, ``x.view(torch.int32)``, and calls
whose arguments are no bools while torch traces: ``attention(q, k, v, is_causal=x.shape[1] > 1)``, or the checks of
sizes in ``max_unpool2d``.

    trace = with_overloads(lambda: torch.jit.trace(...), reset)

torch's tracer (2.11 to 2.13 at least) ends with an internal assert or a TypeError. Then the model is traced once more.
Where an op takes a number, but a Python bool is given, it gets an int or, where the dtype of the result follows from
that of the number, a tensor without dimensions. A view in another dtype is an op of blade's. Sizes are tensors to the
tracer, and comparing them gives tensors; now it gives Python's bools, as in eager mode, and each is a decision.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import cache
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from blade.capture.decisions.traced_number import follows_sizes
from blade.process.shared_switch import SharedSwitch

T = TypeVar("T")

_REFUSED = "We don't have an op for aten::"
_NO_BOOL = "must be bool, not Tensor"
_NO_CHECK = "cond must be a bool, but got a Tensor"
_COMPARISONS = frozenset("eq ne lt le gt ge".split())
_TRUTHS = {truth: torch.tensor(truth) for truth in (False, True)}
_PROMOTING = frozenset(
    {"where", "pow", "fmod", "remainder", "floor_divide"}
    | {f"{kind}{name}" for kind in ("", "i", "bitwise_") for name in ("and", "or", "xor")}
)
"""Ops whose result has a dtype that follows from all operands."""


def with_overloads(trace: Callable[[], T], reset: Callable[[], object]) -> T:
    """Return ``trace()``; ``reset`` undoes what a trace that failed did to the model."""
    modes: list[Callable[[], AbstractContextManager[object]]] = []
    while True:
        try:
            with ExitStack() as entered:
                for mode in modes:
                    entered.enter_context(mode())
                return trace()
        except (RuntimeError, TypeError) as error:
            needed = next((mode for text, mode in _MODES.items() if text in str(error)), None)
            if needed is None or needed in modes:
                raise
            modes.append(needed)
        reset()


class _SizesDecide(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "").strip("_") not in _COMPARISONS:
            return result
        compared = [value for value in args if isinstance(value, torch.Tensor)]
        return bool(result) if all(map(follows_sizes, compared)) else result


class _OtherOverloads(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given: dict[Any, Any] = {**dict(enumerate(args)), **(kwargs or {})}
        truths = {place: value for place, value in given.items() if type(value) is bool}
        name = getattr(func, "__name__", "")
        if name == "view" and isinstance(dtype := given.get(1, given.get("dtype")), torch.dtype):
            return torch.ops.blade.view_dtype(args[0], dtype)
        for place, truth in truths.items():
            if place in _numbers_of(name):
                given[place] = _TRUTHS[truth] if name.strip("_") in _PROMOTING else int(truth)
                if name == "full" and given.get("dtype") is None:
                    given["dtype"] = torch.bool
        value = given.get(1, given.get("value"))
        if name == "fill" and isinstance(value, (int, float)):  # traced without most arguments
            return torch.full_like(given[0], value)
        return func(
            *(given[k] for k in range(len(args))),
            **{key: value for key, value in given.items() if isinstance(key, str)},
        )


def _let_checks_decide() -> Any:
    """``torch._check`` and its kin decide on tensors: to the tracer, a comparison of sizes is one. torch calls them
    where no mode sees comparisons.
    """
    check = torch._check_with

    def decided(error: Any, cond: Any, *message: Any) -> None:
        check(error, bool(cond) if isinstance(cond, torch.Tensor) else cond, *message)

    torch._check_with = decided  # type: ignore[assignment]
    return check


def _restore_checks(check: Any) -> None:
    torch._check_with = check


_checks_decide = SharedSwitch(_let_checks_decide, _restore_checks)
_MODES: Mapping[str, Callable[[], AbstractContextManager[object]]] = {
    _REFUSED: _OtherOverloads,
    _NO_BOOL: _SizesDecide,
    _NO_CHECK: lambda: _checks_decide,
}


@cache
def _numbers_of(name: str) -> frozenset[int | str]:
    """Positions and names of the arguments of an op that are numbers in one of its overloads, and bools in none."""
    kinds: dict[int | str, set[str]] = {}
    for schema in _schemas(name) or _schemas(name.strip("_")):
        for k, one in enumerate(schema.arguments):
            kind = str(one.type).removeprefix("Optional[").removesuffix("]")
            kinds.setdefault(k, set()).add(kind)
            kinds.setdefault(one.name, set()).add(kind)
    return frozenset(
        place for place, found in kinds.items() if "number" in found and "bool" not in found
    )


def _schemas(name: str) -> list[torch._C.FunctionSchema]:
    """Of the overloads that return a tensor: others compute with Python's numbers."""
    packet: Any = getattr(torch.ops.aten, name, None)
    if not hasattr(packet, "overloads"):  # a method that every object has
        return []
    schemas = (getattr(packet, overload)._schema for overload in packet.overloads())
    return [one for one in schemas if [str(r.type) for r in one.returns[:1]] == ["Tensor"]]
