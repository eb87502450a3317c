# SPDX-License-Identifier: Apache-2.0
"""Caches of transformers as tensors: those that a call reads, and what it changes in them.

    facts, tensors = cache_parts(cache)     # of the user's cache, before a call
    twin = twin_of(facts, iter(tensors))    # the same for the trace
    facts, tensors = changes(twin)          # after the model's code ran: what it changed
    apply(cache, facts, iter(tensors))      # now the user's cache is as the model would have left it

Facts are tuples that are equal for calls of one kind: lengths and positions are no part of them, and their last
item is the number of tensors. A position that transformers keeps as a number travels as the size of a tensor
without elements, so that it is a size of the trace like any other.

A static layer of the user's is written when nothing of the call can go wrong any more: a call that the model has to
answer after all finds it as it was. Its twin stops being the user's own with its first update, so that no op of the
trace writes to an argument, and all of a call can be one cluster.
"""

import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch

from blade.dropin.cache_layers import KINDS, Writes
from blade.errors import BladeError

Facts = tuple[Any, ...]

_kinds: dict[type, Any] = {}  # by class of layer; filled once transformers is imported


class NotServed(BladeError):
    """A cache that no optimized call can have; the message ends "a ..."."""


def is_cache(value: Any) -> bool:
    """Whether ``value`` is a cache of transformers, served or not."""
    module = sys.modules.get("transformers.cache_utils")
    return module is not None and isinstance(value, module.Cache)


def cache_parts(cache: Any) -> tuple[Facts, list[torch.Tensor]]:
    """The facts of ``cache``, and its tensors.

    Raises ``NotServed`` for quantized and offloaded caches, and for layers of other classes than in ``KINDS``.
    """
    module: Any = sys.modules["transformers.cache_utils"]
    if type(cache) is module.EncoderDecoderCache:
        own, tensors = cache_parts(cache.self_attention_cache)
        cross, cross_tensors = cache_parts(cache.cross_attention_cache)
        tensors += cross_tensors
        return ("both", own, cross, tuple(sorted(cache.is_updated.items())), len(tensors)), tensors
    _check(cache, module)
    kinds = _kinds or _find_kinds(module)
    tensors = []
    found: list[Facts] = []
    position: int | None = None
    for layer in cache.layers:
        kind = kinds.get(type(layer))
        if kind is None:
            raise NotServed(f"{type(cache).__name__} with a {type(layer).__name__}")
        if kind.needs_position(layer):
            if position not in (None, at := kind.position(layer)):
                raise NotServed(f"{type(cache).__name__} whose layers are at different positions")
            position = at
        found.append(kind.read(layer, tensors))
    if position is not None:
        tensors.append(sized(position))
    return (type(cache).__name__, tuple(found), position is not None, len(tensors)), tensors


def twin_of(facts: Facts, tensors: Sequence[torch.Tensor]) -> Any:
    """A cache of ``facts`` that has ``tensors``."""
    module: Any = sys.modules["transformers.cache_utils"]
    if facts[0] == "both":
        own, cross = facts[1:3]
        split = count_in_cache(own)
        both = twin_of(own, tensors[:split]), twin_of(cross, tensors[split:])
        made = module.EncoderDecoderCache(*both)
        made.is_updated = dict(facts[3])
        return made
    name, layers, has_position, _ = facts
    cache = empty_cache(name)
    position = tensors[-1] if has_position else None
    left = iter(tensors)
    cache.layers = [KINDS[one[0]].twin(one, left, position) for one in layers]
    return cache


def changes(cache: Any) -> tuple[Facts, list[torch.Tensor]]:
    """The facts of what a call left in ``cache``, a twin or a cache that the model made, and the tensors of it."""
    if hasattr(cache, "self_attention_cache"):
        own, tensors = changes(cache.self_attention_cache)
        cross, cross_tensors = changes(cache.cross_attention_cache)
        tensors += cross_tensors
        return ("both", own, cross, tuple(sorted(cache.is_updated.items())), len(tensors)), tensors
    module: Any = sys.modules["transformers.cache_utils"]
    _check(cache, module)
    kinds = _kinds or _find_kinds(module)
    tensors = []
    found = []
    positions = []
    for layer in cache.layers:
        kind = kinds.get(type(layer))
        if kind is None:
            raise NotServed(f"{type(cache).__name__} with a {type(layer).__name__}")
        found.append(kind.changes(layer, tensors))
        if kind.has_position:
            positions.append(kind.position(layer))
    if positions:
        if all(type(one) is int for one in positions) and len(set(positions)) > 1:
            raise NotServed(f"{type(cache).__name__} whose layers are at different positions")
        tensors.append(sized(positions[0]))
    return (type(cache).__name__, tuple(found), bool(positions), len(tensors)), tensors


def apply(cache: Any, facts: Facts, tensors: Iterator[torch.Tensor]) -> Any:
    """Leave ``cache`` as the call did that had these ``changes``; return it."""
    if facts[0] == "both":
        apply(cache.self_attention_cache, facts[1], tensors)
        apply(cache.cross_attention_cache, facts[2], tensors)
        cache.is_updated = dict(facts[3])
        return cache
    _, layers, has_position, count = facts
    if not count:
        return cache
    own = list(islice(tensors, count))
    position = own[-1] if has_position else None
    left = iter(own)
    for one in layers[len(cache.layers) :]:
        cache.layers.append(KINDS[one[0]].new(one))
    writes: Writes = []
    for layer, one in zip(cache.layers, layers):
        KINDS[one[0]].apply(layer, one, left, position, writes)
    _write(writes)
    return cache


def _write(writes: Writes) -> None:
    """All of ``writes``: on a GPU one launch does many of equal dtype."""
    for dtype in {into.dtype for into, _ in writes}:
        into, new = zip(*[pair for pair in writes if pair[0].dtype == dtype])
        torch._foreach_copy_(into, new)


def empty_cache(name: str) -> Any:
    """A cache of the class ``name`` without layers."""
    module: Any = sys.modules["transformers.cache_utils"]
    if name == "both":
        return module.EncoderDecoderCache(module.DynamicCache(), module.DynamicCache())
    if name == "DynamicCache":
        return module.DynamicCache()
    cache = object.__new__(module.StaticCache)
    cache.offloading, cache.layer_class_to_replicate, cache.layers = False, None, []
    return cache


def count_in_cache(facts: Facts) -> int:
    """The number of tensors of a cache with ``facts``."""
    count: int = facts[-1]
    return count


def sized(n: Any) -> torch.Tensor:
    """A tensor without elements whose first size is ``n``."""
    return torch.zeros((n, 0))


def _check(cache: Any, module: Any) -> None:
    name = type(cache).__name__
    if type(cache) is not module.DynamicCache and type(cache) is not module.StaticCache:
        raise NotServed(name)
    if cache.offloading:
        raise NotServed(f"{name} that is offloaded")
    other = cache.layer_class_to_replicate
    if other is not None and other is not module.DynamicLayer:
        raise NotServed(f"{name} of layers {other.__name__}")


def _find_kinds(module: Any) -> dict[type, Any]:
    _kinds.update((getattr(module, kind.name), kind) for kind in KINDS.values())
    return _kinds
