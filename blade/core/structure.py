# SPDX-License-Identifier: Apache-2.0
"""The structure of a model's output, as text that a saved module carries.

    text = structure_of(output)              # '{"dataclass": "models:Output", "keys": ["logits"], "of": ["tensor"]}'
    restored(text, optimized(x))             # Output(logits=...)

A captured module returns tensors and nested tuples of tensors (``capture/outputs.py``). ``None``, names of
fields and the classes of containers are in the structure.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

from blade.errors import InputError

_TENSOR, _NONE = "tensor", "none"


def structure_of(output: Any) -> str | None:
    """Describe ``output``; ``None`` if it holds something else than tensors, ``None`` and containers of them."""
    try:
        return json.dumps(_described(output))
    except _Unknown:
        return None


def restored(structure: str, output: Any) -> Any:
    """Make what ``structure`` describes of the tensors in ``output``, in their order.

    Raises ``InputError`` if a class is not known in this process, or if there are more or fewer tensors.
    """
    tensors = list(_tensors(output))
    made = _made(json.loads(structure), iter(tensors))
    if (count := sum(1 for _ in _tensors(made))) != len(tensors):
        raise InputError(
            f"output: the structure has {count} tensor(s), the output has {len(tensors)}."
        )
    return made


class _Unknown(Exception):
    """There is no text for the value."""


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _TENSOR
    if value is None:
        return _NONE
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        return _with_keys("dataclass", value, fields)
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise _Unknown
        return _with_keys("mapping", value, value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _with_keys("namedtuple", value, dict(zip(value._fields, value)))
    if type(value) in (tuple, list):
        return {type(value).__name__: [_described(item) for item in value]}
    raise _Unknown


def _with_keys(kind: str, value: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    name = f"{type(value).__module__}:{type(value).__qualname__}"
    if "<locals>" in name:
        raise _Unknown
    return {kind: name, "keys": list(fields), "of": [_described(x) for x in fields.values()]}


def _made(described: Any, tensors: Iterator[torch.Tensor]) -> Any:
    if described == _NONE:
        return None
    if described == _TENSOR:
        found = next(tensors, None)
        if found is None:
            raise InputError("output: the structure has more tensors than the output.")
        return found
    kind, named = next(iter(described.items()))
    if kind in ("tuple", "list"):
        parts = [_made(inner, tensors) for inner in named]
        return tuple(parts) if kind == "tuple" else parts
    fields = {
        key: _made(inner, tensors)
        for key, inner in zip(described["keys"], described["of"], strict=True)
    }
    if named == "builtins:dict":
        return fields
    made = class_named(named)
    return made(fields) if kind == "mapping" else made(**fields)


def class_named(name: str, allowed: Collection[str] = ()) -> Any:
    """The class of a container, as ``"module:name"``, or one of the ``allowed`` names; no module is imported because a
    file names it.

    Raises ``InputError``.
    """
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    is_container = isinstance(found, type) and (
        dataclasses.is_dataclass(found) or issubclass(found, (Mapping, tuple)) or path in allowed
    )
    if not is_container:
        raise InputError(
            f"output: the class {path} of the module {module!r} is not known here; import it before the call."
        )
    return found


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name))
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
