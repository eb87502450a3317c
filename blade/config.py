# SPDX-License-Identifier: Apache-2.0
"""Everything a user can ask of ``blade.optimize``, in one frozen, checked value.

    config = Config(min_cluster_size=5)
    optimized = blade.optimize(model, inputs, config)     # explicitly, or
    with Config(enable_fp16=True):                        # for every call in this block
        optimized = blade.optimize(model, inputs)

A ``Config`` is also a context manager. The active ones are kept per thread and per asyncio task
(``contextvars``), never on the instance, so one instance may be entered twice, nested, or from many
threads and tasks at once. Only ``blade/api.py`` calls ``Config.current()``; below it the value is
passed as an argument.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from typing_extensions import Self

from blade.errors import ConfigError

# One dimension: True or "auto" (any size), an int (fixed at it), or (min, max), both included.
Dim = bool | str | int | tuple[int, int]
Shape = tuple[int, ...]
JitPass = Callable[[torch.Graph], None]

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
    """A list of strings as a tuple; a lone string is refused, or it would count as its letters."""
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


def _tracing(value: object) -> object:
    if value is None or value is True:
        return value
    if value is False or isinstance(value, str) or not isinstance(value, Iterable):
        raise ValueError("None, True or a list of submodule names is expected")
    return _names(value)


def _path(value: object) -> object:
    return Path(value) if isinstance(value, str) and value else value


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
Tracing = Annotated[Literal[True] | tuple[str, ...] | None, BeforeValidator(_tracing)]
DynamicShapes = Annotated[dict[int | str, dict[int, Dim]] | None, BeforeValidator(_dynamic_shapes)]


class Config(BaseModel):
    """What to optimize for; every field has a default.

    Raises ``ConfigError`` on an unknown field, a wrong type or a value out of range.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, arbitrary_types_allowed=True
    )

    optimization_pipeline: Annotated[str, BeforeValidator(_pipeline)] = Field(
        default="auto",
        description='The backend to use, case-insensitive ("DISC"), or "auto": whichever measures '
        "fastest.",
    )
    enable_fp16: bool = Field(
        default=False, description="Allow engines that compute in half precision."
    )
    enable_int8: bool = Field(
        default=False, description="Allow engines that compute in quantized int8."
    )
    preserved_attributes: Names = Field(
        default=(),
        description="Attributes and methods of the model that must survive freezing, by name.",
    )
    allow_tracing: Tracing = Field(
        default=None,
        description="None: trace, and script if tracing fails or specializes. True: trace only. "
        "A list of submodule names: trace these and script the rest.",
    )
    dynamic_shapes: DynamicShapes = Field(
        default=None,
        description="Narrows which sizes will be seen, per input (position or name) and axis: True "
        'or "auto" (any size, the default of every axis not named), an int (fixed), or (min, max). '
        "Other sizes still work: they run the original.",
    )
    dynamic_tuning_shapes: Annotated[TuningShapes | None, BeforeValidator(_tuning_shapes)] = Field(
        default=None,
        description='{"min": [shape per input], "opts": [[shape per input], ...], "max": [...]}: '
        "the range of sizes to serve, and the shapes to verify and measure at besides the samples.",
    )
    customize_op_white_list: OpKinds = Field(
        default=(),
        description='Op kinds ("aten::add", or one occurrence, "aten::add@3", counted from 0, or from '
        'the end: "aten::add@-1") to hand to backends although the default policy would not.',
    )
    customize_op_black_list: OpKinds = Field(
        default=(),
        description="Op kinds, written as in the white list, that must stay TorchScript.",
    )
    customize_jit_passes: Annotated[tuple[JitPass, ...], BeforeValidator(_passes)] = Field(
        default=(),
        description="Functions run on the captured, frozen graph, in order, before clustering.",
    )
    min_cluster_size: int = Field(
        default=3,
        ge=1,
        description="Clusters of fewer ops stay TorchScript: they rarely pay for their boundary.",
    )
    freeze_module: bool = Field(
        default=True, description="Turn parameters into constants. False keeps them as attributes."
    )
    timing: bool = Field(
        default=True,
        description="Measure every verified candidate and keep the fastest. False: take the first "
        "that verifies, unmeasured.",
    )
    timing_repeats: int = Field(
        default=15, ge=1, description="Interleaved rounds per candidate and shape, at most."
    )
    strict: bool = Field(
        default=False,
        description="Raise the error that would otherwise have become a fallback and a Reason.",
    )
    cache: bool = Field(
        default=True,
        description="Keep compiled code and verdicts in the folder BLADE_CACHE_DIR (~/.cache/blade), so that what "
        "was optimized once is not compiled and measured again.",
    )
    memory: Literal["normal", "low"] = Field(
        default="normal",
        description='"low": DISC reads every weight where it is. "normal": it may keep one copy of each, packed '
        "for its own products and convolutions, which are faster.",
    )
    dump_dir: Annotated[Path | None, BeforeValidator(_path)] = Field(
        default=None,
        description="Folder for the intermediate representations of every cluster and pass, and for a "
        "script per failed conversion that reproduces it.",
    )
    conversion_deadline_s: float = Field(
        default=300.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds one conversion may take in the process it runs in, which is then ended.",
    )
    conversion_memory_mb: int | None = Field(
        default=None,
        ge=1,
        description="MiB of address space one conversion may take in its process. None: no limit.",
    )
    max_failures: int = Field(
        default=3,
        ge=1,
        description="Consecutive run-time failures after which an engine is no longer tried.",
    )

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if both := set(self.customize_op_white_list) & set(self.customize_op_black_list):
            raise ValueError(
                f"customize_op_white_list and customize_op_black_list both name {min(both)!r}; "
                "an op kind can be in one of them"
            )
        if self.dynamic_shapes is not None and self.dynamic_tuning_shapes is not None:
            raise ValueError(
                "dynamic_shapes and dynamic_tuning_shapes both declare the range of sizes; give one"
            )
        return self

    # Hidden from type checkers, so that they keep checking the fields' own signature.
    if not TYPE_CHECKING:

        def __init__(self, **fields: Any) -> None:
            try:
                super().__init__(**fields)
            except ValidationError as error:
                raise ConfigError(_explain(error)) from None

        def __setattr__(self, name: str, value: object) -> None:
            raise ConfigError(f"a Config cannot be changed; use config.evolve({name}={value!r})")

    def evolve(self, **changes: Any) -> "Config":
        """A copy with ``changes``, checked like a new one; raises ``ConfigError``."""
        return Config(**{**{name: getattr(self, name) for name in Config.model_fields}, **changes})

    @staticmethod
    def current() -> "Config":
        """The innermost active ``Config`` of this thread or task, or the defaults."""
        stack = _active.get()
        return stack[-1] if stack else Config()

    def __enter__(self) -> Self:
        _active.set((*_active.get(), self))
        return self

    def __exit__(self, *exc_info: object) -> None:
        stack = _active.get()
        # Not always the top: generators may leave their blocks in another order than they entered.
        last = max(i for i, active in enumerate(stack) if active is self)
        _active.set(stack[:last] + stack[last + 1 :])


_active: ContextVar[tuple[Config, ...]] = ContextVar("blade_config", default=())


def _explain(error: ValidationError) -> str:
    """One sentence per problem: field, value, what is allowed."""
    return "; ".join(dict.fromkeys(_explain_one(dict(one)) for one in error.errors()))


def _explain_one(one: Mapping[str, Any]) -> str:
    message = str(one["msg"]).removeprefix("Value error, ")
    if not one["loc"]:
        return f"Config: {message}"
    name, value = str(one["loc"][0]), one["input"]
    if one["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, Config.model_fields, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        known = ", ".join(sorted(Config.model_fields))
        return f"Config has no field {name!r} (given {value!r}): {hint}The fields are: {known}"
    return f"Config.{name}={value!r}: {message}. {Config.model_fields[name].description}"
