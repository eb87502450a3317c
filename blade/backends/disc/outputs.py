# SPDX-License-Identifier: Apache-2.0
"""The last pass over the IR: returned values own their memory, with the strides torch would give them.

Simplifying may leave an input as the result (``x * 1``), or one value for two results; the caller may write into any
of them. Only views of the same tensor share memory, as they did in the model.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations

from blade.backends.disc.ir import Builder, Graph, Shape, Value, contiguous_strides
from blade.backends.disc.legalize import copy
from blade.backends.disc.rebuild import finished, rebuilt
from blade.backends.disc.views import View, same, view_of

_KEPT = ("const", "packed")  # as long as the engine: no caller may write there


def outputs(graph: Graph) -> Graph:
    """``graph`` with a copy of every returned value that is not the caller's to keep as it is."""
    b, graph = rebuilt(graph, lambda b, v, args: None)
    placed = _Outputs(b, graph)
    returned = tuple(placed.next(i) for i in range(len(graph.outputs)))
    return finished(replace(graph, values=b.values, outputs=returned))


class _Outputs:
    """Where each output lives, decided one after the other: what one owns is not another's."""

    def __init__(self, b: Builder, graph: Graph) -> None:
        self.b, self.graph = b, graph
        # of each output, in the model
        self.storages: Sequence[int | None] = graph.storages or [None] * len(graph.outputs)
        assert len(self.storages) == len(graph.output_strides) == len(graph.outputs)
        self.owner = {
            v.id: k for k, v in enumerate(graph.inputs)
        }  # base -> the one storage that may live in it
        self.moved: dict[
            int | None, tuple[object, Value]
        ] = {}  # by storage: where it was, and the copy

    def next(self, i: int) -> Value:
        """Output ``i``, or what is returned for it."""
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
        """What is written to an input: copied from wherever it lies, but from no other input."""
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
            return _restrided(self.b, v, strides)
        # others share it: an input stays where it is, and of what is made here strides matter more
        return v if self._is_of_an_input(i) else _own(self.b, v, i, strides)

    def _may_stay(self, v: Value, view: View, i: int) -> bool:
        """Whether output ``i`` may live in ``view``'s base, which its storage in the model then owns."""
        if view.base.op in _KEPT or _is_wider(v, view.strides, self.graph.output_strides[i]):
            return False
        storage = self.storages[i]
        return storage is None or self.owner.setdefault(view.base.id, storage) == storage

    def _is_new(self, i: int) -> bool:
        """Whether output ``i`` is the first one in its storage, which is no input's."""
        return self.storages[i] == i + len(self.graph.inputs)

    def _is_of_an_input(self, i: int) -> bool:
        storage = self.storages[i]
        return storage is not None and storage < len(self.graph.inputs)

    def _is_alone(self, i: int) -> bool:
        """Whether output ``i``'s memory is that of no input and of no other output."""
        storage = self.storages[i]
        return storage is None or (self._is_new(i) and self.storages.count(storage) == 1)


def _own(b: Builder, v: Value, output: int, strides: Shape) -> Value:
    """A copy for this output alone: equal values are shared, so the output's number is part of it."""
    if view_of(v) is None:
        return b.make("cast", [v], v.shape, v.dtype, output=output)
    order = _memory_order(v.shape, strides) or tuple(range(len(v.shape)))
    v = b.permute(v, order)
    stored = b.make("cast", [v], v.shape, v.dtype, output=output)
    return b.permute(stored, [order.index(k) for k in range(len(order))])


def _places(v: Value) -> object:
    """Where the elements of ``v`` lie, equal for shapes that differ by axes of size 1 alone."""
    view = view_of(v)
    assert view is not None, v
    axes = zip(v.shape, view.strides, strict=True)
    return view.base.id, view.offset, tuple((d, s) for d, s in axes if d != 1)


def _is_wider(v: Value, strides: Shape, wanted: Shape) -> bool:
    """Whether elements of ``v`` share memory (stride 0) that are apart in torch's result."""
    return any(
        s == 0 and w != 0 and d != 1 for s, w, d in zip(strides, wanted, v.shape, strict=True)
    )


def _restrided(b: Builder, v: Value, strides: Shape) -> Value:
    """``v`` in memory order given by dense ``strides`` (a permutation), if that is what they are."""
    order = _memory_order(v.shape, strides)
    if order is None:
        return v
    stored = copy(b, b.permute(v, order))
    return b.permute(stored, [order.index(k) for k in range(len(order))])


def _memory_order(shape: Shape, strides: Shape) -> tuple[int, ...] | None:
    """The axes from outermost to innermost if ``strides`` are those of a dense permutation."""
    for order in _orders(len(shape)):
        dense: list[object] = [0] * len(shape)
        for axis, step in zip(order, contiguous_strides([shape[p] for p in order]), strict=True):
            dense[axis] = step
        if same(shape, tuple(dense), strides):
            return order
    return None


def _orders(rank: int) -> list[tuple[int, ...]]:
    return list(permutations(range(rank))) if rank <= 5 else []
