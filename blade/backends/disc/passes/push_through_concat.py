# SPDX-License-Identifier: Apache-2.0
"""Pushes pointwise ops through a concatenation: each part is computed, then the results are concatenated.

    %3 = concat %1 %2               %5 = mul %1 (slice %4)
    %5 = mul %3 %4           ->     %6 = mul %2 (slice %4)
                                    %7 = concat %5 %6

The parts are stored in place in the result (concat_placement.py), so the first concatenation disappears.
Rotary embeddings, class tokens and padded caches benefit. Nothing is computed twice.
"""

from dataclasses import replace

from blade.backends.disc.ir.concat_placement import operand_offsets
from blade.backends.disc.ir.graph import (
    LEAVES,
    Graph,
    IrBuilder,
    Value,
    live,
)
from blade.backends.disc.ir.kernel import Dim
from blade.backends.disc.ir.simplify import RULES

_MOST = 4  # parts: more kernels than this cost more than a copy


def push_through_concat(graph: Graph) -> Graph:
    """``graph`` with pointwise ops pushed through concatenations that have no other reader."""
    users, returned = graph.users(), {v.id for v in graph.outputs}
    once = {v.id for v in graph.values if len(users[v.id]) == 1 and v.id not in returned}
    spreader = _ConcatPusher(once)
    for v in live(graph):
        spreader.step(v)
    new = spreader.new
    rebuilt = replace(
        graph,
        values=spreader.b.values,
        outputs=tuple(new[v.id] for v in graph.outputs),
        inputs=tuple(new[v.id] for v in graph.inputs),
    )
    rebuilt.values = live(rebuilt)
    return rebuilt


class _ConcatPusher:
    def __init__(self, once: set[int]) -> None:
        self.b = IrBuilder(RULES)
        self.once = once  # ids of old values with one reader
        self.new: dict[int, Value] = {}
        self.known: set[int] = set()
        self.private: set[int] = set()  # ids of new values with one reader

    def step(self, v: Value) -> None:
        args = [self.new[a.id] for a in v.args]
        made = self.parts(v, args) if v.is_pointwise else None
        if made is None:
            made = self.b.make(v.op, args, v.shape, v.dtype, v.strides, **v.attrs)
        if v.id in self.once and made.id not in self.known:
            self.private.add(made.id)
        else:  # several readers, or equal to an earlier value, which has a reader
            self.private.discard(made.id)
        self.known.add(made.id)
        self.new[v.id] = made

    def parts(self, v: Value, args: list[Value]) -> Value | None:
        whole = next((a for a in args if a.op == "concat" and a.id in self.private), None)
        if whole is None or len(whole.args) > _MOST:
            return None
        axis, pieces = whole.attrs["axis"], []
        for part, start in zip(whole.args, operand_offsets(whole), strict=True):
            size = part.shape[axis]
            operands = [part if a is whole else self.sliced(a, axis, start, size) for a in args]
            pieces.append(self.b.make(v.op, operands, part.shape, v.dtype, **v.attrs))
        return self.b.make("concat", pieces, v.shape, v.dtype, axis=axis)

    def sliced(self, v: Value, axis: int, start: Dim, size: Dim) -> Value:
        """Elements ``start`` to ``start + size`` of ``v``, computed separately if the others are
        not needed.
        """
        if v.op == "broadcast":
            return self.sliced_broadcast(v, axis, start, size)
        if v.is_pointwise and (v.id in self.private or all(a.op in LEAVES for a in v.args)):
            args = [self.sliced(a, axis, start, size) for a in v.args]
            return self.b.make(v.op, args, args[0].shape, v.dtype, **v.attrs)
        return self.b.slice(v, axis, start, 1, size)

    def sliced_broadcast(self, v: Value, axis: int, start: Dim, size: Dim) -> Value:
        core, axes = v.args[0], v.attrs["axes"]
        if axis in axes:
            core = self.b.slice(core, axes.index(axis), start, 1, size)
        shape = tuple(size if k == axis else d for k, d in enumerate(v.shape))
        return self.b.make("broadcast", (core,), shape, v.dtype, axes=axes)
