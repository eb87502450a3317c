# SPDX-License-Identifier: Apache-2.0
"""Pushes pointwise ops through a concatenation: each part is computed, then the results are concatenated.

    %3 = concat %1 %2               %5 = mul %1 (slice %4)
    %5 = mul %3 %4           ->     %6 = mul %2 (slice %4)
                                    %7 = concat %5 %6

The parts are stored in place in the result (concat_placement.py), so the first concatenation disappears.
Rotary embeddings, class tokens and padded caches benefit. Nothing is computed twice.

With ``interleaved``, ops are pushed through pairs that a reshape interleaves, too: every other element of a row is
stored by itself, which GPUs do well.

    %3 = concat %1 %2 {axis=4}      [.., 16, 1] twice
    %4 = reshape %3                 [.., 32]
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


def push_through_concat(graph: Graph, interleaved: bool = False) -> Graph:
    """``graph`` with pointwise ops pushed through concatenations that have no other reader."""
    users, returned = graph.users(), {v.id for v in graph.outputs}
    once = {v.id for v in graph.values if len(users[v.id]) == 1 and v.id not in returned}
    spreader = _ConcatPusher(once, interleaved)
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
    def __init__(self, once: set[int], interleaved: bool) -> None:
        self.b = IrBuilder(RULES)
        self.interleaved = interleaved
        self.once = once  # ids of old values with one reader
        self.new: dict[int, Value] = {}
        self.known: set[int] = set()
        self.private: set[int] = set()  # ids of new values with one reader

    def step(self, v: Value) -> None:
        args = [self.new[a.id] for a in v.args]
        made = self.parts(v, args) if v.is_pointwise else None
        if made is None and v.is_pointwise and self.interleaved:
            made = self.rows(v, args)
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

    def rows(self, v: Value, args: list[Value]) -> Value | None:
        """``v`` where an operand is a row of interleaved parts: computed on the parts."""
        row = next((a for a in args if a.id in self.private and self.is_row(a)), None)
        if row is None:
            return None
        [whole] = row.args
        axis, count, pieces = len(v.shape) - 1, len(whole.args), []
        for start, part in enumerate(whole.args):
            flat = self.b.reshape(part, part.shape[:-1])
            size = part.shape[-2]
            operands = [
                flat if a is row else self.sliced(a, axis, start, size, count) for a in args
            ]
            made = self.b.make(v.op, operands, flat.shape, v.dtype, **v.attrs)
            pieces.append(self.b.reshape(made, part.shape))
        made = self.b.make("concat", pieces, whole.shape, v.dtype, axis=axis + 1)
        self.private.add(made.id)
        return self.b.reshape(made, v.shape)

    def is_row(self, v: Value) -> bool:
        """Whether ``v`` is a reshape that interleaves the parts of a concatenation of single elements."""
        whole = v.args[0] if v.op == "reshape" else None
        if whole is None or whole.op != "concat" or whole.id not in self.private:
            return False
        is_last = whole.attrs["axis"] == len(whole.shape) - 1
        single = len(whole.args) <= _MOST and all(a.shape[-1] == 1 for a in whole.args)
        return is_last and single and v.shape[:-1] == whole.shape[:-2]

    def sliced(self, v: Value, axis: int, start: Dim, size: Dim, step: int = 1) -> Value:
        """``size`` elements of ``v`` from ``start`` on, computed separately if the others are not needed."""
        if v.op == "broadcast":
            return self.sliced_broadcast(v, axis, start, size, step)
        if v.is_pointwise and (v.id in self.private or all(a.op in LEAVES for a in v.args)):
            args = [self.sliced(a, axis, start, size, step) for a in v.args]
            return self.b.make(v.op, args, args[0].shape, v.dtype, **v.attrs)
        return self.b.slice(v, axis, start, step, size)

    def sliced_broadcast(self, v: Value, axis: int, start: Dim, size: Dim, step: int) -> Value:
        core, axes = v.args[0], v.attrs["axes"]
        if axis in axes:
            core = self.b.slice(core, axes.index(axis), start, step, size)
        shape = tuple(size if k == axis else d for k, d in enumerate(v.shape))
        return self.b.make("broadcast", (core,), shape, v.dtype, axes=axes)
