# SPDX-License-Identifier: Apache-2.0
"""The layers of transformers' caches as tensors: a class for each kind of layer (``caches.py`` says what for).

A layer that a call reads becomes facts and tensors (``read``), and from these a twin for the trace (``twin``). What
the model's code left in the twin (``changes``) is put into the user's layer (``apply``).
"""

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

Facts = tuple[Any, ...]
Tensors = Iterator[torch.Tensor]
Position = torch.Tensor | None
"""A tensor whose first size is the position of the layers that keep it as a number."""
Writes = list[tuple[torch.Tensor, torch.Tensor]]
"""Tensors of the user, and what is to be in them."""

PLACE = "blade_was_filled"  # on a twin: whether it had keys before the call
APART = "blade_is_apart"  # on a twin whose keys and values are no longer the user's own


class Dynamic:
    """``DynamicLayer``: keys and values that grow."""

    name = "DynamicLayer"
    has_position = False

    @staticmethod
    def needs_position(layer: Any) -> bool:
        return False

    @staticmethod
    def read(layer: Any, tensors: list[torch.Tensor]) -> Facts:
        if layer.is_initialized:
            tensors += (layer.keys, layer.values)
            return _FILLED
        return _EMPTY

    @staticmethod
    def twin(facts: Facts, tensors: Tensors, position: Position) -> Any:
        layer = _class(Dynamic.name)()
        if facts[1]:
            _hold(layer, next(tensors), next(tensors))
        return layer

    @staticmethod
    def changes(layer: Any, tensors: list[torch.Tensor]) -> Facts:
        return Dynamic.read(layer, tensors)

    @staticmethod
    def apply(
        layer: Any, facts: Facts, tensors: Tensors, position: Position, writes: Writes
    ) -> None:
        if facts[1]:
            _hold(layer, next(tensors), next(tensors))

    @staticmethod
    def new(facts: Facts) -> Any:
        return _class(Dynamic.name)()


class DynamicSliding:
    """``DynamicSlidingWindowLayer``: the last keys and values, and how many there were.

    Facts: the window, whether the past is recorded for ``crop``, whether there are keys, and whether the window is
    full. Until then there are as many keys as positions.
    """

    name = "DynamicSlidingWindowLayer"
    has_position = True

    @staticmethod
    def needs_position(layer: Any) -> bool:
        return bool(layer.cumulative_length >= layer.sliding_window)

    @staticmethod
    def position(layer: Any) -> Any:
        return layer.cumulative_length

    @staticmethod
    def read(layer: Any, tensors: list[torch.Tensor]) -> Facts:
        if layer.is_initialized:
            tensors += (layer.keys, layer.values)
        window = layer.sliding_window
        is_full = layer.cumulative_length >= window
        return ("sliding", layer.is_initialized, window, layer.record_past, is_full)

    @staticmethod
    def twin(facts: Facts, tensors: Tensors, position: Position) -> Any:
        layer = DynamicSliding.new(facts)
        if facts[1]:
            _hold(layer, next(tensors), next(tensors))
            layer.cumulative_length = (
                position.shape[0] if facts[4] and position is not None else layer.keys.shape[-2]
            )
        return layer

    @staticmethod
    def changes(layer: Any, tensors: list[torch.Tensor]) -> Facts:
        if layer.is_initialized:
            tensors += (layer.keys, layer.values)
        return ("sliding", layer.is_initialized, layer.sliding_window, layer.record_past)

    @staticmethod
    def apply(
        layer: Any, facts: Facts, tensors: Tensors, position: Position, writes: Writes
    ) -> None:
        if facts[1]:
            _hold(layer, next(tensors), next(tensors))
            assert position is not None
            layer.cumulative_length = position.shape[0]

    @staticmethod
    def new(facts: Facts) -> Any:
        layer = object.__new__(_class(DynamicSliding.name))
        layer.keys = layer.values = None
        layer.is_initialized = False
        layer.sliding_window, layer.record_past = facts[2:4]
        layer.cumulative_length = 0
        layer._sliding_window_tensor = torch.tensor(facts[2], dtype=torch.long)
        return layer


class Static:
    """``StaticLayer``: keys and values of a fixed length, and a tensor that counts the positions that are taken.

    Facts: whether there are keys. A layer without them has a tensor whose size is the length to allocate. Those of
    ``changes``: whether there are keys that ``apply`` puts into the layer, and whether the layer had none.
    """

    name = "StaticLayer"
    has_position = False

    @staticmethod
    def needs_position(layer: Any) -> bool:
        return False

    @staticmethod
    def read(layer: Any, tensors: list[torch.Tensor]) -> Facts:
        if layer.is_initialized:
            tensors += (layer.keys, layer.values, layer.cumulative_length)
            return _STATIC
        tensors += (torch.empty((layer.max_cache_len, 0)), layer.cumulative_length)
        return _STATIC_EMPTY

    @staticmethod
    def twin(facts: Facts, tensors: Tensors, position: Position) -> Any:
        layer = object.__new__(_class(Static.name))
        layer.keys = layer.values = None
        layer.is_initialized = facts[1]
        if facts[1]:
            _hold_static(layer, next(tensors), next(tensors))
            layer.max_cache_len = layer.keys.shape[2]
            layer.update = partial(_update_apart, layer)
        else:
            layer.max_cache_len = next(tensors).shape[0]
        layer.cumulative_length = next(tensors).clone()
        setattr(layer, PLACE, facts[1])
        return layer

    @staticmethod
    def changes(layer: Any, tensors: list[torch.Tensor]) -> Facts:
        was_filled = getattr(layer, PLACE)
        is_changed = getattr(layer, APART, False) if was_filled else layer.is_initialized
        if is_changed:
            tensors += (layer.keys, layer.values, layer.cumulative_length)
        return ("static", is_changed, is_changed and not was_filled)

    @staticmethod
    def apply(
        layer: Any, facts: Facts, tensors: Tensors, position: Position, writes: Writes
    ) -> None:
        _, is_changed, is_new = facts[:3]
        if not is_changed:
            return
        held = (next(tensors), next(tensors), next(tensors))
        if is_new:
            _hold_new(layer, *held)
        else:
            own = (layer.keys, layer.values, layer.cumulative_length)
            writes.extend(zip(own, held))


class StaticSliding:
    """``StaticSlidingWindowLayer``: as ``StaticLayer`` until the window is full, when all of it moves.

    Facts: whether there are keys, and how full the window is, 0 (empty) to 2 (full).
    """

    name = "StaticSlidingWindowLayer"
    has_position = True

    @staticmethod
    def needs_position(layer: Any) -> bool:
        return bool(layer.cumulative_length_int)

    @staticmethod
    def position(layer: Any) -> Any:
        return layer.cumulative_length_int

    @staticmethod
    def read(layer: Any, tensors: list[torch.Tensor]) -> Facts:
        _, is_filled = Static.read(layer, tensors)
        n = layer.cumulative_length_int
        return ("static_sliding", is_filled, 0 if n == 0 else 1 + (n >= layer.max_cache_len))

    @staticmethod
    def twin(facts: Facts, tensors: Tensors, position: Position) -> Any:
        plain = Static.twin(facts, tensors, position)
        layer = object.__new__(_class(StaticSliding.name))
        vars(layer).update(vars(plain))
        layer._is_croppable = False
        layer.cumulative_length_int = 0
        if facts[2]:
            assert position is not None
            layer.cumulative_length_int = position.shape[0]
        if facts[1]:
            layer.update = partial(_update_apart, layer)
        return layer

    @staticmethod
    def changes(layer: Any, tensors: list[torch.Tensor]) -> Facts:
        return ("static_sliding", *Static.changes(layer, tensors)[1:])

    @staticmethod
    def apply(
        layer: Any, facts: Facts, tensors: Tensors, position: Position, writes: Writes
    ) -> None:
        Static.apply(layer, facts, tensors, position, writes)
        if facts[1]:
            assert position is not None
            layer.cumulative_length_int = position.shape[0]


KINDS: dict[str, Any] = {
    "dynamic": Dynamic,
    "sliding": DynamicSliding,
    "static": Static,
    "static_sliding": StaticSliding,
}
_FILLED, _EMPTY = ("dynamic", True), ("dynamic", False)
_STATIC, _STATIC_EMPTY = ("static", True), ("static", False)


def _update_apart(layer: Any, *args: Any, **kwargs: Any) -> Any:
    """``update`` of a twin, whose keys and values stop being the user's, so that ops without a write take its place
    and the whole call is one cluster.
    """
    if not getattr(layer, APART, False):
        layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
        setattr(layer, APART, True)
    return type(layer).update(layer, *args, **kwargs)


def _hold(layer: Any, keys: torch.Tensor, values: torch.Tensor) -> None:
    layer.keys, layer.values = keys, values
    layer.dtype, layer.device = keys.dtype, keys.device
    layer.is_initialized = True


def _hold_static(layer: Any, keys: torch.Tensor, values: torch.Tensor) -> None:
    layer.keys, layer.values, layer.device = keys, values, keys.device
    layer.batch_size, layer.num_heads = keys.shape[:2]
    layer.k_head_dim, layer.v_head_dim = keys.shape[-1], values.shape[-1]
    layer.is_initialized = True


def _hold_new(layer: Any, keys: torch.Tensor, values: torch.Tensor, counter: torch.Tensor) -> None:
    """What ``lazy_initialization`` and the first ``update`` do."""
    _hold_static(layer, keys, values)
    if counter.device == layer.cumulative_length.device:
        layer.cumulative_length.copy_(counter)
    else:
        layer.cumulative_length = counter
    for tensor in (keys, values, layer.cumulative_length):
        torch._dynamo.mark_static_address(tensor)


def _class(name: str) -> Any:
    return getattr(sys.modules["transformers.cache_utils"], name)
