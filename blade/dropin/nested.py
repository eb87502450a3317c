# SPDX-License-Identifier: Apache-2.0
"""Take arguments and outputs apart into tensors and a structure that can be compared, and make them again.

    parts = Parts()
    structure = parts.add({"ids": ids, "scale": 2.0})     # parts.tensors == [ids]
    made(structure, iter(parts.tensors), [])              # {"ids": ids, "scale": 2.0}

A structure is a tuple, and equal for values that differ in their tensors alone. Caches of transformers are
containers of tensors that a call changes: they are kept in ``Parts.caches``, in order.
"""

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from blade.errors import BladeError

Structure = tuple[Any, ...]

TENSOR: Structure = ("tensor",)
FIELDS = ("mapping", "dataclass", "namedtuple")  # structures with names of their parts
_CONSTANTS = (type(None), bool, int, float, str, torch.dtype, torch.device)


class NotNested(BladeError):
    """A value is neither a tensor, a constant nor a container of them."""


class Parts:
    """The tensors and caches of the values that were added, in order."""

    def __init__(self, known: Sequence[Any] = ()) -> None:
        self.tensors: list[torch.Tensor] = []
        self.caches: list[Any] = []
        self._known = known

    def add(self, value: Any) -> Structure:
        """The structure of ``value``; a cache among ``known`` is named by its place there.

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
        for place, known in enumerate(self._known):
            if value is known:
                return ("known", place)
        if is_cache(value):
            facts, tensors = cache_parts(value)
            self.caches.append(value)
            self.tensors += tensors
            return ("cache", kind, facts)
        if dataclasses.is_dataclass(value):
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
            return self._fields("dataclass", kind, fields)
        if isinstance(value, Mapping):
            return self._fields("mapping", kind, value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return self._fields("namedtuple", kind, dict(zip(value._fields, value)))
        raise NotNested(f"a value of type {kind.__module__}.{kind.__qualname__}")

    def _fields(self, how: str, kind: type, fields: Mapping[Any, Any]) -> Structure:
        keys = tuple(fields)
        if not all(isinstance(key, str) for key in keys):
            raise NotNested(f"a {kind.__qualname__} with keys that are no strings")
        return (how, kind, keys, tuple([self.add(fields[key]) for key in keys]))


def made(structure: Structure, tensors: Iterator[torch.Tensor], known: Sequence[Any]) -> Any:
    """The value of ``structure`` with the next ``tensors``; ``known`` are the caches that it names by place."""
    how = structure[0]
    if how == "tensor":
        return next(tensors)
    if how == "constant":
        return structure[2]
    if how == "items":
        items = [made(part, tensors, known) for part in structure[2]]
        return items if structure[1] is list else tuple(items)
    if how == "known":
        return known[structure[1]]
    if how == "cache":
        return fill_cache(new_cache(structure[1], structure[2]), structure[2], tensors)
    _, kind, keys, parts = structure
    fields = {key: made(part, tensors, known) for key, part in zip(keys, parts)}
    if kind is dict:
        return fields
    return kind(fields) if how == "mapping" else kind(**fields)


def count_tensors(structure: Structure) -> int:
    """The number of tensors in ``structure``."""
    how = structure[0]
    if how == "tensor":
        return 1
    if how == "items":
        return sum(map(count_tensors, structure[2]))
    if how == "cache":
        return count_in_cache(structure[2])
    return sum(map(count_tensors, structure[3])) if how in FIELDS else 0


# Caches. ``facts`` of a DynamicCache: for each layer, whether it has keys and values. An EncoderDecoderCache has
# the facts of its two caches, and which layers of the second one are filled.


def is_cache(value: Any) -> bool:
    """Whether ``value`` is a cache of transformers whose layers only hold keys and values that grow."""
    module = sys.modules.get("transformers.cache_utils")
    if module is None:
        return False
    if type(value) is module.EncoderDecoderCache:
        return is_cache(value.self_attention_cache) and is_cache(value.cross_attention_cache)
    return (
        type(value) is module.DynamicCache
        and all(type(layer) is module.DynamicLayer for layer in value.layers)
        and not getattr(value, "offloading", False)
        and value.layer_class_to_replicate in (None, module.DynamicLayer)
    )


def cache_parts(cache: Any) -> tuple[Structure, list[torch.Tensor]]:
    """The facts of ``cache``, and its tensors."""
    if hasattr(cache, "self_attention_cache"):
        own, own_tensors = cache_parts(cache.self_attention_cache)
        cross, cross_tensors = cache_parts(cache.cross_attention_cache)
        updated = tuple(sorted(cache.is_updated.items()))
        return (own, cross, updated), [*own_tensors, *cross_tensors]
    filled = tuple([bool(layer.is_initialized) for layer in cache.layers])
    tensors = [
        t for layer in cache.layers if layer.is_initialized for t in (layer.keys, layer.values)
    ]
    return filled, tensors


def new_cache(kind: type, facts: Structure) -> Any:
    """An empty cache of the class ``kind``."""
    module = sys.modules["transformers.cache_utils"]
    dynamic: Any = module.DynamicCache
    return dynamic() if kind is dynamic else module.EncoderDecoderCache(dynamic(), dynamic())


def fill_cache(cache: Any, facts: Structure, tensors: Iterator[torch.Tensor]) -> Any:
    """Put the next ``tensors`` into ``cache``; return it."""
    if hasattr(cache, "self_attention_cache"):
        own, cross, updated = facts
        fill_cache(cache.self_attention_cache, own, tensors)
        fill_cache(cache.cross_attention_cache, cross, tensors)
        cache.is_updated = dict(updated)
        return cache
    layer_class: Any = sys.modules["transformers.cache_utils"].DynamicLayer
    while len(cache.layers) < len(facts):
        cache.layers.append(layer_class())
    for layer, is_filled in zip(cache.layers, facts):
        if is_filled:
            layer.keys, layer.values = next(tensors), next(tensors)
            layer.dtype, layer.device = layer.keys.dtype, layer.keys.device
            layer.is_initialized = True
    return cache


def count_in_cache(facts: Structure) -> int:
    """The number of tensors of a cache with ``facts``."""
    if len(facts) == 3 and isinstance(facts[0], tuple):
        return count_in_cache(facts[0]) + count_in_cache(facts[1])
    return 2 * sum(facts)
