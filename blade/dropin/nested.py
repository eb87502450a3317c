# SPDX-License-Identifier: Apache-2.0
"""Take arguments and outputs apart into tensors and a structure that can be compared, and make them again.

    parts = Parts()
    structure = parts.add({"ids": ids, "scale": 2.0})     # parts.tensors == [ids]
    made(structure, iter(parts.tensors))                  # {"ids": ids, "scale": 2.0}

A structure is a tuple, and equal for values that differ in their tensors alone. Caches of transformers
(``caches.py``) are containers of tensors that a call changes: they are kept in ``Parts.caches``, in order.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch

from blade.capture.decisions.traced_number import as_own_number
from blade.dropin.caches import (
    NotServed,
    apply,
    cache_parts,
    changes,
    count_in_cache,
    empty_cache,
    is_cache,
    sized,
    twin_of,
)
from blade.errors import BladeError

Structure = tuple[Any, ...]

TENSOR: Structure = ("tensor",)
NUMBER: Structure = (
    "number",
)  # an int that is no part of the kind, as the size of a tensor without elements
FIELDS = ("mapping", "dataclass", "namedtuple")  # structures with names of their parts
_CONSTANTS = (type(None), bool, int, float, str, torch.dtype, torch.device)


class NotNested(BladeError):
    """A value is neither a tensor, a constant nor a container of them."""


class Parts:
    """The tensors and caches of the values that were added, in order."""

    def __init__(self, known: Sequence[Any] | None = None) -> None:
        self.tensors: list[torch.Tensor] = []
        self.caches: list[Any] = []
        self._known = known

    def add(self, value: Any) -> Structure:
        """The structure of ``value``, an output if there are ``known`` caches; one of these is named by its place.

        Raises ``NotNested``.
        """
        kind = type(value)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            self.tensors.append(value)
            return TENSOR
        if kind in _CONSTANTS:
            return ("constant", kind, value)
        if kind is tuple or kind is list:
            return ("items", kind, tuple([self.add(item) for item in value]))
        if kind is dict:
            return self._fields("mapping", kind, value)
        for place, known in enumerate(self._known or ()):
            if value is known:
                return ("known", place)
        if is_cache(value):
            return self._cache(value)
        if dataclasses.is_dataclass(value):
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
            return self._fields("dataclass", kind, fields)
        if isinstance(value, Mapping):
            return self._fields("mapping", kind, value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return self._fields("namedtuple", kind, dict(zip(value._fields, value)))
        raise NotNested(f"a value of type {kind.__module__}.{kind.__qualname__}")

    def add_number(self, value: int) -> Structure:
        """The structure of ``value``, above 0, as a number that may be another one in the next call."""
        self.tensors.append(sized(value))
        return NUMBER

    def _cache(self, cache: Any) -> Structure:
        try:
            facts, tensors = cache_parts(cache) if self._known is None else changes(cache)
        except NotServed as error:
            raise NotNested(f"a {error}") from error
        self.caches.append(cache)
        self.tensors += tensors
        return ("cache", type(cache), facts)

    def _fields(self, how: str, kind: type, fields: Mapping[Any, Any]) -> Structure:
        keys = tuple(fields)
        if not all(isinstance(key, str) for key in keys):
            raise NotNested(f"a {kind.__qualname__} with keys that are no strings")
        return (how, kind, keys, tuple([self.add(fields[key]) for key in keys]))


def made(
    structure: Structure, tensors: Iterator[torch.Tensor], known: Sequence[Any] | None = None
) -> Any:
    """The value of ``structure`` with the next ``tensors``.

    ``known`` are the caches that an output names by place. Without them it is an argument, and its caches are twins.
    """
    how = structure[0]
    if how == "tensor":
        return next(tensors)
    if how == "constant":
        return structure[2]
    if how == "number":
        number: Any = next(tensors).shape[0]
        return as_own_number(number) if isinstance(number, torch.Tensor) else number
    if how == "items":
        items = [made(part, tensors, known) for part in structure[2]]
        return items if structure[1] is list else tuple(items)
    if how == "known":
        assert known is not None, structure
        return known[structure[1]]
    if how == "cache":
        facts = structure[2]
        if known is None:
            return twin_of(facts, list(islice(tensors, count_in_cache(facts))))
        return apply(empty_cache(facts[0]), facts, tensors)
    _, kind, keys, parts = structure
    fields = {key: made(part, tensors, known) for key, part in zip(keys, parts)}
    if kind is dict:
        return fields
    return kind(fields) if how == "mapping" else kind(**fields)


def count_tensors(structure: Structure) -> int:
    """The number of tensors in ``structure``."""
    how = structure[0]
    if how in ("tensor", "number"):
        return 1
    if how == "items":
        return sum(map(count_tensors, structure[2]))
    if how == "cache":
        return count_in_cache(structure[2])
    return sum(map(count_tensors, structure[3])) if how in FIELDS else 0
