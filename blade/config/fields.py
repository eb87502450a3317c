# SPDX-License-Identifier: Apache-2.0
"""The types of the fields of ``Config``, and the checks of their values.

A check returns the normalized value (lists become tuples), or raises ``ValueError`` with the allowed values.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeGuard

import torch
from pydantic import BeforeValidator

from blade.config.accuracy import AccuracyBudget, parse

# One dimension: True or "auto" (any size), an int (fixed at it), or (min, max), both included.
Dim = bool | str | int | tuple[int, int]
Shape = tuple[int, ...]
JitPass = Callable[[torch.Graph], None]

GPU_TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
"""The entries of ``Config.gpu_targets``."""
_OP_KIND = re.compile(r"[A-Za-z_]\w*::[A-Za-z_]\w*(@-?\d+)?")


@dataclass(frozen=True)
class TuningShapes:
    """``Config.dynamic_tuning_shapes``, checked; each entry holds one shape per input."""

    min: tuple[Shape, ...]
    opts: tuple[tuple[Shape, ...], ...]
    max: tuple[Shape, ...]


def _pipeline(value: object) -> object:
    if isinstance(value, str) and not value.strip():
        raise ValueError('the name of a pipeline is expected, for example "auto" or "DISC"')
    return value.strip() if isinstance(value, str) else value


def _names(value: object) -> tuple[str, ...]:
    """A list of strings as a tuple; a single string is refused, because it would count as its letters."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ValueError("a list of strings is expected")
    names = tuple(value)
    if bad := [name for name in names if not isinstance(name, str) or not name]:
        raise ValueError(f"a list of non-empty strings is expected, and {bad[0]!r} is not one")
    return names


def _op_kinds(value: object) -> tuple[str, ...]:
    kinds = _names(value)
    if bad := [kind for kind in kinds if not _OP_KIND.fullmatch(kind)]:
        raise ValueError(
            f'each entry is an op kind like "aten::add", or one occurrence of it, "aten::add@3"; '
            f"{bad[0]!r} is neither"
        )
    return kinds


def _gpu_targets(value: object) -> tuple[str, ...]:
    names = _names(value)
    if bad := [name for name in names if name not in GPU_TARGETS]:
        raise ValueError(f"each entry is one of {', '.join(GPU_TARGETS)}; {bad[0]!r} is none")
    return tuple(dict.fromkeys(names))


def _tracing(value: object) -> object:
    if value is None or value is True:
        return value
    if value is False or isinstance(value, str) or not isinstance(value, Iterable):
        raise ValueError("None, True or a list of submodule names is expected")
    return _names(value)


def _is_positive(value: object) -> TypeGuard[float]:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and 0 < value < math.inf  # type: ignore[operator]


def _seconds(value: object) -> object:
    """A number of seconds, int or float."""
    if value is None:
        return None
    if _is_positive(value):
        return float(value)
    raise ValueError("a number of seconds > 0, or None, is expected")


def _weights(value: object) -> object:
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ValueError("a list of numbers, one per sample, is expected")
    weights = tuple(value)
    for weight in weights:
        if not _is_positive(weight):
            raise ValueError(f"each weight is a finite number > 0; got {weight!r}")
    return tuple(map(float, weights))


def _path(value: object) -> Path | None:
    if value is None or isinstance(value, Path):
        return value
    if isinstance(value, str) and value:
        return Path(value)
    raise ValueError("a folder is expected, a non-empty string or a Path")


def _passes(value: object) -> tuple[Any, ...]:
    if not isinstance(value, Iterable):
        raise ValueError("a list of functions taking a torch.Graph is expected")
    passes = tuple(value)
    if bad := [p for p in passes if not callable(p)]:
        raise ValueError(
            f"each entry is a function taking a torch.Graph; {bad[0]!r} is not callable"
        )
    return passes


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _dim(value: object) -> Dim:
    """One entry of ``dynamic_shapes``, normalized."""
    if value is True or value == "auto" or _is_size(value):
        return value  # type: ignore[return-value]
    if isinstance(value, (tuple, list)) and [*map(_is_size, value)] == [True, True]:
        low, high = value
        if low <= high:
            return (low, high)
    raise ValueError(
        f'a dimension is True, "auto", a fixed size >= 0 or (min, max), min <= max; got {value!r}'
    )


def _dynamic_shapes(value: object) -> object:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ValueError('a mapping like {"input_ids": {0: (1, 8), 1: True}} is expected')
    return {_input_key(key): _axes(key, axes) for key, axes in value.items()}


def _input_key(key: object) -> object:
    if (isinstance(key, str) and key) or _is_size(key):
        return key
    raise ValueError(f"an input is named by its position (0, 1, ...) or its name; got {key!r}")


def _axes(key: object, axes: object) -> dict[int, Dim]:
    if not isinstance(axes, Mapping):
        raise ValueError(f"input {key!r} needs a mapping from axis to size; got {axes!r}")
    for axis in axes:
        if not isinstance(axis, int) or isinstance(axis, bool):
            raise ValueError(f"input {key!r}: an axis is an int; got {axis!r}")
    return {axis: _dim(dim) for axis, dim in axes.items()}


def _shapes(where: str, value: object) -> tuple[Shape, ...]:
    """``[[1, 3, 224, 224], ...]``, one shape per input."""
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError(f"{where!r} is a list with one shape per input; got {value!r}")
    for shape in value:
        if not isinstance(shape, (list, tuple)) or not all(map(_is_size, shape)):
            raise ValueError(f"{where!r}: a shape is a list of sizes >= 0; got {shape!r}")
    return tuple(tuple(shape) for shape in value)


def _tuning_shapes(value: object) -> object:
    if value is None or isinstance(value, TuningShapes):
        return value
    if not isinstance(value, Mapping) or set(value) != {"min", "opts", "max"}:
        raise ValueError('a mapping with exactly the keys "min", "opts" and "max" is expected')
    if not isinstance(value["opts"], (list, tuple)):
        raise ValueError(f'"opts" is a list of lists of shapes; got {value["opts"]!r}')
    low, high = _shapes("min", value["min"]), _shapes("max", value["max"])
    opts = tuple(_shapes("opts", one) for one in value["opts"])
    for one in (*opts, high):
        _check_between(low, one, high)
    return TuningShapes(low, opts, high)


def _check_between(low: tuple[Shape, ...], one: tuple[Shape, ...], high: tuple[Shape, ...]) -> None:
    ranks = [len(shape) for shape in low]
    if [len(shape) for shape in one] != ranks:
        raise ValueError(
            f'"min", "max" and each of "opts" need the same number of shapes and the same ranks; '
            f'{list(one)} differs from "min" {list(low)}'
        )
    for small, mid, big in zip(low, one, high):
        if not all(a <= b <= c for a, b, c in zip(small, mid, big)):
            raise ValueError(f'shape {mid} does not lie between "min" {small} and "max" {big}')


Names = Annotated[tuple[str, ...], BeforeValidator(_names)]
OpKinds = Annotated[tuple[str, ...], BeforeValidator(_op_kinds)]
GpuTargets = Annotated[tuple[str, ...], BeforeValidator(_gpu_targets)]
Tracing = Annotated[Literal[True] | tuple[str, ...] | None, BeforeValidator(_tracing)]
DynamicShapes = Annotated[dict[int | str, dict[int, Dim]] | None, BeforeValidator(_dynamic_shapes)]
Weights = Annotated[tuple[float, ...] | None, BeforeValidator(_weights)]
Budget = Annotated[AccuracyBudget, BeforeValidator(parse)]
Seconds = Annotated[float | None, BeforeValidator(_seconds)]
Pipeline = Annotated[str, BeforeValidator(_pipeline)]
Tuning = Annotated[TuningShapes | None, BeforeValidator(_tuning_shapes)]
JitPasses = Annotated[tuple[JitPass, ...], BeforeValidator(_passes)]
Folder = Annotated[Path | None, BeforeValidator(_path)]
