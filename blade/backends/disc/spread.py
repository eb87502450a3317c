# SPDX-License-Identifier: Apache-2.0
"""Pointwise ops over a concatenation are computed part by part, and the results concatenated.

    %3 = concat %1 %2               %5 = mul %1 (slice %4)
    %5 = mul %3 %4           ->     %6 = mul %2 (slice %4)
                                    %7 = concat %5 %6

The parts are stored where they belong (places.py), so that the first concatenation never happens: what
rotary embeddings, class tokens and padded caches need. Nothing is computed twice.
"""

from dataclasses import replace

from blade.backends.disc.ir import LEAVES, Builder, Graph, Value, live
from blade.backends.disc.kernel import Dim
from blade.backends.disc.places import starts
from blade.backends.disc.simplify import RULES

_MOST = 4  # parts: more kernels than that cost more than a copy


def spread(graph: Graph) -> Graph:
    """``graph`` with pointwise ops moved into the concatenations that only they read."""
    users, returned = graph.users(), {v.id for v in graph.outputs}
    once = {v.id for v in graph.values if len(users[v.id]) == 1 and v.id not in returned}
    spreader = _Spreader(once)
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


class _Spreader:
    def __init__(self, once: set[int]) -> None:
        self.b = Builder(RULES)
        self.once = once  # old values that one other value reads
        self.new: dict[int, Value] = {}
        self.known: set[int] = set()
        self.private: set[int] = set()  # new values that only the one made now will read

    def step(self, v: Value) -> None:
        args = [self.new[a.id] for a in v.args]
        made = self.parts(v, args) if v.is_pointwise else None
        if made is None:
            made = self.b.make(v.op, args, v.shape, v.dtype, v.strides, **v.attrs)
        if v.id in self.once and made.id not in self.known:
            self.private.add(made.id)
        else:  # read more than once, or equal to an earlier value, which has its own reader
            self.private.discard(made.id)
        self.known.add(made.id)
        self.new[v.id] = made

    def parts(self, v: Value, args: list[Value]) -> Value | None:
        whole = next((a for a in args if a.op == "concat" and a.id in self.private), None)
        if whole is None or len(whole.args) > _MOST:
            return None
        axis, pieces = whole.attrs["axis"], []
        for part, start in zip(whole.args, starts(whole), strict=True):
            size = part.shape[axis]
            operands = [part if a is whole else self.sliced(a, axis, start, size) for a in args]
            pieces.append(self.b.make(v.op, operands, part.shape, v.dtype, **v.attrs))
        return self.b.make("concat", pieces, v.shape, v.dtype, axis=axis)

    def sliced(self, v: Value, axis: int, start: Dim, size: Dim) -> Value:
        """Elements ``start`` to ``start + size`` of ``v``, computed alone where nobody needs the others."""
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
