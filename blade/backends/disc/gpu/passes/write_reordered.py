# SPDX-License-Identifier: Apache-2.0
"""Pointwise ops whose result is only copied into another order of axes are computed in that order.

    %2 f16[8, 6, 6, 12] = add %1 %b             %2 f16[8, 6, 6, 3, 2, 2] = reshape %1
    %3 f16[8, 6, 6, 3, 2, 2] = reshape %2       %3 f16[8, 6, 2, 6, 2, 3] = permute %2
    %4 f16[8, 6, 2, 6, 2, 3] = permute %3   ->  %4 f16[8, 6, 2, 6, 2, 3] = add %3 %b
    %5 f16[8, 12, 12, 3] = reshape %4           %5 f16[8, 12, 12, 3] = reshape %4

Otherwise the reshape would copy what the op has written: a pixel shuffle after a convolution's bias. The op reads one
tensor against its order, as the copy would. A concatenation whose parts are shuffled is one along an axis of their
own, and what computes the parts writes them between each other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from blade.backends.disc.ir.graph import Graph, IrBuilder, Shape, Value
from blade.backends.disc.ir.rewrite import rewrite_with_builder
from blade.backends.disc.ir.views import blocks, view_of


def write_reordered(graph: Graph) -> Graph:
    """``graph`` with such ops in the order in which their result is copied."""
    users, returned = graph.users(), {v.id for v in graph.outputs}
    once = {v.id for v in graph.values if len(users[v.id]) == 1 and v.id not in returned}
    new: dict[int, Value] = {}

    def step(b: IrBuilder, v: Value, args: list[Value]) -> Value | None:
        made = _reordered(b, v, new, once) if v.op == "reshape" else None
        new[v.id] = made or b.make(v.op, args, v.shape, v.dtype, v.strides, **v.attrs)
        return new[v.id]

    return rewrite_with_builder(graph, step)[1]


def _reordered(b: IrBuilder, v: Value, new: Mapping[int, Value], once: set[int]) -> Value | None:
    """The reshape ``v`` of an op in another order; ``None`` if ``v`` copies nothing, or something else."""
    permuted = v.args[0]
    if view_of(v) is not None or permuted.op != "permute":
        return None
    split = permuted.args[0]
    computed = split.args[0] if split.op == "reshape" else split
    if computed.op == "concat" and computed is not split:
        return _interleaved(b, v, new, once)
    if not computed.is_pointwise or not {permuted.id, split.id, computed.id} <= once:
        return None
    pairs = blocks(computed.shape, split.shape)
    if not pairs or any(len(old) != 1 for old, _ in pairs):
        return None
    into = {old[0]: made for old, made in pairs}
    order = _Reordering(b, new, once, split.shape, into, permuted.attrs["perm"])
    if len(order.crossed(computed)) != 1:
        return None
    return b.reshape(order.value(computed), v.shape)


def _interleaved(b: IrBuilder, v: Value, new: Mapping[int, Value], once: set[int]) -> Value | None:
    """``v``, the reshape of a concatenation with an axis for its parts, which is not the first one any more."""
    permuted, split, joined = v.args[0], v.args[0].args[0], v.args[0].args[0].args[0]
    axis, count = joined.attrs["axis"], len(joined.args)
    if not {permuted.id, split.id, joined.id} <= once:
        return None
    made = next((made for old, made in blocks(joined.shape, split.shape) if old == [axis]), [])
    size = joined.args[0].shape[axis]
    if tuple(split.shape[k] for k in made) != (count, size):
        return None
    if any(part.shape[axis] != size for part in joined.args):
        return None
    shape = tuple(1 if k == made[0] else d for k, d in enumerate(split.shape))
    perm = permuted.attrs["perm"]
    parts = [b.permute(b.reshape(new[part.id], shape), perm) for part in joined.args]
    between = b.make("concat", parts, permuted.shape, v.dtype, axis=perm.index(made[0]))
    return b.reshape(between, v.shape)


@dataclass(frozen=True)
class _Reordering:
    """Rebuilds values with their axes split, ``into`` those of ``split``, and in the order ``perm``."""

    b: IrBuilder
    new: Mapping[int, Value]
    once: set[int]
    split: Shape
    into: Mapping[int, Sequence[int]]
    perm: Sequence[int]

    def crossed(self, v: Value) -> set[int]:
        """Ids of the tensors that ``v``, an op, would read against their order."""
        found: set[int] = set()
        for a in v.args:
            if self.is_moved(a):
                found |= self.crossed(a)
            elif a.op not in ("fill", "size", "broadcast"):
                found.add(a.id)
        return found

    def is_moved(self, v: Value) -> bool:
        return v.is_pointwise and v.id in self.once

    def value(self, v: Value, is_first: bool = True) -> Value:
        shape = tuple(self.split[k] for k in self.perm)
        if is_first or self.is_moved(v):
            operands = [self.value(a, False) for a in v.args]
            return self.b.make(v.op, operands, shape, v.dtype, **v.attrs)
        if v.op in ("fill", "size"):
            return self.b.make(v.op, (), shape, v.dtype, **v.attrs)
        if v.op == "broadcast":
            return self.repeated(v, shape)
        return self.b.permute(self.b.reshape(self.new[v.id], self.split), self.perm)

    def repeated(self, v: Value, shape: Shape) -> Value:
        """The broadcast ``v`` of a core with its axes split and in this order."""
        core = self.new[v.args[0].id]
        axes = [a for k in v.attrs["axes"] for a in self.into.get(k, ())]
        core = self.b.reshape(core, [self.split[a] for a in axes])
        places = [self.perm.index(a) for a in axes]
        ordered = sorted(range(len(places)), key=places.__getitem__)
        core = self.b.permute(core, ordered)
        return self.b.make("broadcast", (core,), shape, v.dtype, axes=tuple(sorted(places)))
