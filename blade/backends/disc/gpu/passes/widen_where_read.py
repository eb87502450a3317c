# SPDX-License-Identifier: Apache-2.0
"""Wide values that kernels would pass through memory are computed again from narrower ones where they are read.

    kernel 1:  %2 f32 = cast %1             stored          kernel 1:  %2 f32 = cast %1
               %3 = reduce %2                        ->                %3 = reduce %2
    kernel 2:  %4 = sub %2 (mean of %3)                     kernel 2:  %5 f32 = cast %1
                                                                       %4 = sub %5 (mean of %3)

The second pass over an image in 16 bits, for its variance, would read a copy in float32 that the first one wrote: five
times the bytes, and twice the image of memory. What has to be stored only fusion tells, so this pass asks it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from blade.backends.disc.fusion.fuse import Fused, FusionGroup, fuse, members
from blade.backends.disc.fusion.shorten_lives import LARGE, bytes_of
from blade.backends.disc.ir.graph import LEAVES, Graph, Value, live
from blade.backends.disc.ir.views import memory_of, view_of

_CHEAP = (
    *("add", "sub", "mul", "neg", "abs", "cast", "fma", "maximum", "minimum"),
    *("where", "eq", "ne", "lt", "le", "gt", "ge"),
)
_MOST = 8  # ops, at most: about the time of a load from memory
_READ = 0.6  # of the bytes that would be stored, at most
_REORDERS = ("permute", "reshape", "slice")
_NUMBERS = ("fill", "size")


def widen_where_read(graph: Graph) -> Graph:
    """``graph`` with such values once per kernel that reads them; fusion then stores none of them."""
    found = _Stored(fuse(graph))
    again = {v.id for v in found.candidates() if found.pays(v)}
    return _Rebuilt(found, again).graph() if again else graph


@dataclass(frozen=True)
class _Read:
    """``reader`` reads ``layouts`` of a value that another kernel stores; the last one is next to the value."""

    reader: Value
    layouts: tuple[Value, ...]


class _Stored:
    """What a fused graph stores, and how it is read."""

    def __init__(self, fused: Fused) -> None:
        self.fused = fused
        self.returned = {memory_of(v).id for v in fused.graph.outputs}
        self.reads: dict[int, list[_Read]] = {}
        for unit in fused.units:
            for reader in members(unit):
                for operand in reader.args:
                    self._note(unit, reader, operand)

    def _note(self, unit: FusionGroup | Value, reader: Value, operand: Value) -> None:
        base = memory_of(operand)
        if base.id in self.fused.stored and self.fused.group_of[base.id] is not unit:
            self.reads.setdefault(base.id, []).append(_Read(reader, layouts_above(operand, base)))

    def candidates(self) -> Iterator[Value]:
        """Large values that other kernels read and nobody else does."""
        for unit in self.fused.units:
            for v in members(unit) if isinstance(unit, FusionGroup) else ():
                kept = v.id in self.returned or v.id in self.fused.placed
                reads = self.reads.get(v.id, ())
                if (
                    not kept
                    and bytes_of(v) >= LARGE
                    and reads
                    and all(map(self._can_compute, reads))
                ):
                    yield v

    def _can_compute(self, read: _Read) -> bool:
        computes = read.reader.is_pointwise or read.reader.op == "reduce"
        return computes and all(a.op in _REORDERS for a in read.layouts)

    def pays(self, v: Value) -> bool:
        """Whether computing ``v`` again reads less than what is stored, wherever it is read."""
        ops, sources = dict[int, Value](), dict[int, Value]()
        if not self._collect(v, v, ops, sources) or len(ops) > _MOST:
            return False
        if sum(bytes_of(memory_of(s)) for s in sources.values()) > _READ * bytes_of(v):
            return False
        return all(
            _can_be_read(source, read.layouts)
            for read in self.reads[v.id]
            for source in sources.values()
        )

    def _collect(
        self, v: Value, root: Value, ops: dict[int, Value], sources: dict[int, Value]
    ) -> bool:
        """Note the ops that compute ``root`` and what they read from memory; ``False`` if it is not worth it."""
        if v.op not in _CHEAP or v.shape != root.shape:
            return False
        ops[v.id] = v
        for a in v.args:
            if a.op in _NUMBERS:
                continue
            view = view_of(a)
            if view is None:
                return False
            if not view.base.is_fusible:
                sources[a.id] = a
            elif a is not view.base:  # of another shape: in memory already, if it is there at all
                if view.base.id not in self.fused.stored:
                    return False
                sources[a.id] = a
            elif not self._collect(a, root, ops, sources):
                return False
        return True


def layouts_above(operand: Value, base: Value) -> tuple[Value, ...]:
    """The layout ops between ``base`` and ``operand``, the last one next to ``base``."""
    found: list[Value] = []
    while operand is not base:
        found.append(operand)
        (operand,) = operand.args
    return tuple(found)


def _can_be_read(source: Value, layouts: Sequence[Value]) -> bool:
    for layout in reversed(layouts):
        source = replace(layout, args=(source,), dtype=source.dtype)
    return view_of(source) is not None


class _Rebuilt:
    """A copy of the graph in which the values ``again`` are computed for each kernel that reads them."""

    def __init__(self, found: _Stored, again: set[int]) -> None:
        self.old, self.group_of, self.again = found.fused.graph, found.fused.group_of, again
        self.values: list[Value] = []
        self.new: dict[int, Value] = {}
        self.made: dict[tuple[object, ...], Value] = {}

    def graph(self) -> Graph:
        for v in self.old.values:
            group = self.group_of.get(v.id)
            args = [self.new[a.id] if group is None else self.operand(a, group) for a in v.args]
            self.new[v.id] = self.add(v, args)
        rebuilt = replace(
            self.old,
            values=self.values,
            outputs=tuple(self.new[v.id] for v in self.old.outputs),
            inputs=tuple(self.new[v.id] for v in self.old.inputs),
        )
        rebuilt.values = live(rebuilt)
        return rebuilt

    def operand(self, a: Value, group: FusionGroup) -> Value:
        """``a`` for a member of ``group``."""
        base = memory_of(a)
        if base.id not in self.again or self.group_of[base.id] is group:
            return self.new[a.id]
        return self.computed(base, layouts_above(a, base), group)

    def computed(self, v: Value, layouts: tuple[Value, ...], group: FusionGroup) -> Value:
        """``layouts`` of ``v``, computed in ``group``: from the same layouts of what ``v`` is computed from."""
        key = (id(group), v.id, *(a.id for a in layouts))
        if key not in self.made:
            args = []
            for a in v.args:
                source = a.op in _NUMBERS or a is not memory_of(a) or not a.is_fusible
                args.append(self.read(a, layouts) if source else self.computed(a, layouts, group))
            shape = layouts[0].shape if layouts else v.shape
            self.made[key] = self.add(replace(v, shape=shape), args)
        return self.made[key]

    def read(self, a: Value, layouts: tuple[Value, ...]) -> Value:
        """``layouts`` of ``a``, which is in memory or a number."""
        if a.op in LEAVES:
            return self.add(replace(a, shape=layouts[0].shape if layouts else a.shape), ())
        now = self.new[a.id]
        for k, layout in reversed(list(enumerate(layouts))):
            key = (a.id, *(one.id for one in layouts[k:]))
            if key not in self.made:
                self.made[key] = self.add(replace(layout, dtype=a.dtype), (now,))
            now = self.made[key]
        return now

    def add(self, like: Value, args: Sequence[Value]) -> Value:
        made = replace(like, id=len(self.values), args=tuple(args))
        self.values.append(made)
        return made
