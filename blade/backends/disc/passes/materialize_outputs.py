# SPDX-License-Identifier: Apache-2.0
"""The last pass over the IR: outputs own their memory, with the strides that torch would give them.

Simplification may leave an input as an output (``x * 1``), or one value as two outputs, and the caller may
write into any output. Only views of the same tensor share memory, as in the model.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations

from blade.backends.disc.ir.graph import (
    Graph,
    IrBuilder,
    Shape,
    Value,
    contiguous_strides,
)
from blade.backends.disc.ir.rewrite import eliminate_dead_code, rewrite_with_builder
from blade.backends.disc.ir.views import StridedView, memory_of, same, view_of
from blade.backends.disc.passes.legalize import copy

_KEPT = ("const", "packed", "carried", "written")
"""Live as long as the engine, lie wherever a loop's last iteration left them, or are an input: callers get copies."""


def materialize_outputs(graph: Graph) -> Graph:
    """``graph`` with copies of the outputs that must not share the memory they lie in."""
    b, graph = rewrite_with_builder(graph, lambda b, v, args: None)
    placed = _OutputPlacement(b, graph)
    returned = tuple(placed.next(i) for i in range(len(graph.outputs)))
    return eliminate_dead_code(replace(graph, values=b.values, outputs=returned))


class _OutputPlacement:
    """Chooses the memory of the outputs in order; memory that one owns is not given to another."""

    def __init__(self, b: IrBuilder, graph: Graph) -> None:
        self.b, self.graph = b, graph
        # storage of each output in the model
        self.storages: Sequence[int | None] = graph.storages or [None] * len(graph.outputs)
        assert len(self.storages) == len(graph.output_strides) == len(graph.outputs)
        self.owner = {
            v.id: k for k, v in enumerate(graph.inputs)
        }  # id of a base -> the storage of the model that owns it
        self.moved: dict[
            int | None, tuple[object, Value]
        ] = {}  # storage -> (location before, the copy)

    def next(self, i: int) -> Value:
        """Output ``i``, or the value to return in its place."""
        v, storage = self.graph.outputs[i], self.storages[i]
        if i >= len(self.graph.returned):
            return self._written(i)
        places = None if view_of(v) is None else _places(v)
        if storage in self.moved and places == self.moved[storage][0]:
            return self.b.reshape(self.moved[storage][1], v.shape)
        own = self._returned(i)
        if own is not v and places is not None and self._is_new(i):
            self.moved[storage] = places, own
        return own

    def _written(self, i: int) -> Value:
        """The new contents of an input: a copy if they lie in an input, because that may be written first."""
        v = self.graph.outputs[i]
        view = view_of(v)
        is_elsewhere = view is not None and view.base.op != "input"
        return v if is_elsewhere else _own(self.b, v, i, self.graph.output_strides[i])

    def _returned(self, i: int) -> Value:
        v, strides = self.graph.outputs[i], self.graph.output_strides[i]
        view = view_of(v)
        if view is None or not self._may_stay(v, view, i):
            return _own(self.b, v, i, strides)
        if same(v.shape, view.strides, strides):
            return v
        if self._is_alone(i):
            return _restrided(self.b, v, i, strides)
        # Shared memory: an input is returned in place; a computed value is copied to get the right strides.
        return v if self._is_of_an_input(i) else _own(self.b, v, i, strides)

    def _may_stay(self, v: Value, view: StridedView, i: int) -> bool:
        """Whether output ``i`` may live in ``view``'s base; if so, its storage in the model owns
        that base.
        """
        if view.base.op in _KEPT or _is_wider(v, view.strides, self.graph.output_strides[i]):
            return False
        storage = self.storages[i]
        return storage is None or self.owner.setdefault(view.base.id, storage) == storage

    def _is_new(self, i: int) -> bool:
        """Whether output ``i`` is the first one in its storage, and that is not an input's."""
        return self.storages[i] == i + len(self.graph.inputs)

    def _is_of_an_input(self, i: int) -> bool:
        storage = self.storages[i]
        return storage is not None and storage < len(self.graph.inputs)

    def _is_alone(self, i: int) -> bool:
        """Whether output ``i`` shares memory with no input and no other output."""
        storage = self.storages[i]
        return storage is None or (self._is_new(i) and self.storages.count(storage) == 1)


def _own(b: IrBuilder, v: Value, output: int, strides: Shape) -> Value:
    """A copy for this output alone: its number is part of the value, because equal values are shared."""
    if view_of(v) is None:
        return b.make("cast", [v], v.shape, v.dtype, output=output)
    order = _memory_order(v.shape, strides)
    if order is None and (part := _part(b, v, output, strides)) is not None:
        return part
    return _stored(b, v, order or tuple(range(len(v.shape))), output)


def _stored(b: IrBuilder, v: Value, order: Sequence[int], output: int | None = None) -> Value:
    """A copy of ``v`` whose axes lie in ``order``, from outermost to innermost; for this ``output`` alone."""
    v = b.permute(v, order)
    stored = copy(b, v) if output is None else b.make("cast", [v], v.shape, v.dtype, output=output)
    return b.permute(stored, [order.index(k) for k in range(len(order))])


def _part(b: IrBuilder, v: Value, output: int, strides: Shape) -> Value | None:
    """``v``, a part of its base such as a slice, with ``strides``: the same part of a copy of the base whose axes
    lie in another order. ``None`` if no order gives them.
    """
    base = memory_of(v)
    for order in _orders(len(base.shape)):
        part = _viewed_in(b, v, base, _stored(b, base, order, output))
        view = view_of(part)
        if view is not None and same(v.shape, view.strides, strides):
            return part
    return None


def _viewed_in(b: IrBuilder, v: Value, base: Value, instead: Value) -> Value:
    """``v``, a view of ``base``, as a view of ``instead``."""
    if v.id == base.id:
        return instead
    inner = _viewed_in(b, v.args[0], base, instead)
    return b.make(v.op, [inner, *v.args[1:]], v.shape, v.dtype, v.strides, **v.attrs)


def _places(v: Value) -> object:
    """The location of ``v``'s elements, equal for shapes that differ only in axes of size 1."""
    view = view_of(v)
    assert view is not None, v
    axes = zip(v.shape, view.strides, strict=True)
    return view.base.id, view.offset, tuple((d, s) for d, s in axes if d != 1)


def _is_wider(v: Value, strides: Shape, wanted: Shape) -> bool:
    """Whether elements of ``v`` share memory (stride 0) that are separate in torch's result."""
    return any(
        s == 0 and w != 0 and d != 1 for s, w, d in zip(strides, wanted, v.shape, strict=True)
    )


def _restrided(b: IrBuilder, v: Value, output: int, strides: Shape) -> Value:
    """``v`` in the memory order of ``strides`` if they are those of a dense permutation or of a part of one."""
    order = _memory_order(v.shape, strides)
    if order is None:
        return _part(b, v, output, strides) or v
    return _stored(b, v, order)


def _memory_order(shape: Shape, strides: Shape) -> tuple[int, ...] | None:
    """The axes from outermost to innermost if ``strides`` are those of a dense permutation, else ``None``."""
    for order in _orders(len(shape)):
        dense: list[object] = [0] * len(shape)
        for axis, step in zip(order, contiguous_strides([shape[p] for p in order]), strict=True):
            dense[axis] = step
        if same(shape, tuple(dense), strides):
            return order
    return None


def _orders(rank: int) -> list[tuple[int, ...]]:
    return list(permutations(range(rank))) if rank <= 5 else []
