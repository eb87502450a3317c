# SPDX-License-Identifier: Apache-2.0
"""Updates of a part of an input are written to the input itself, before the new contents are read there.

    %8 = slice %1 {0 .. p}                                %10 = written %7 {input=1, starts=(0, p)}
    %9 = slice %1 {p + 1 .. 256}                          %11 = slice %10 {0 .. p + 1}
    %10 = concat %8 %7 %9          ->                     update %1 %10
    %11 = slice %10 {0 .. p + 1}
    update %1 %10

A cache of keys is not copied for one of them. The part may also be one that an index selects: a static cache's new
keys. Nothing may read what is overwritten: whoever has to run the original after a failure finds an input in which
the part is written already, and writes it again.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch

from blade.backends.disc.frontend.ops.gather import INDICES
from blade.backends.disc.ir.concat_placement import operand_offsets
from blade.backends.disc.ir.graph import Graph, IrBuilder, Value, live, plain
from blade.backends.disc.ir.kernel import Dim
from blade.backends.disc.ir.late_sizes import late_operands
from blade.backends.disc.ir.rewrite import eliminate_dead_code
from blade.clustering.topological_order import sort_topologically

aten = torch.ops.aten
_IN_PLACE = {
    aten.index_copy.default: aten.index_copy_.default,
    aten.index_put.default: aten.index_put_.default,
    aten._unsafe_index_put.default: aten.index_put_.default,
}


def update_in_place(graph: Graph) -> Graph:
    """``graph`` with the updates of parts as `written` values."""
    if not graph.updates or late_operands(graph.values):
        return graph
    if any("draw" in v.attrs for v in graph.values):  # draws keep their order
        return graph
    places = {place.whole.id: place for place in _places(graph)}
    return _rewritten(graph, places) if places else graph


@dataclass(frozen=True)
class _Region:
    """``whole``, the new contents of ``into``, differ from the old ones in ``part`` from ``starts`` on.

    ``between``: concatenations that contain ``part`` and are contained in ``whole``, and where they begin in it.
    """

    whole: Value
    into: Value
    part: Value
    starts: tuple[Dim, ...]
    between: tuple[tuple[Value, tuple[Dim, ...]], ...]

    @property
    def args(self) -> tuple[Value, ...]:
        return (self.part,)

    @property
    def attrs(self) -> dict[str, Any]:
        return {"starts": self.starts}

    def leaves(self, read: Value) -> bool:
        """Whether ``read`` is a slice of the input without any element of the part, as far as numbers tell."""
        if read.args[0] is not self.into or any(step != 1 for step in read.attrs["steps"]):
            return False
        spans = zip(read.attrs["starts"], read.shape, self.starts, self.part.shape, strict=True)
        return any(_precedes(a, n, b) or _precedes(b, m, a) for a, n, b, m in spans)


@dataclass(frozen=True)
class _Indexed:
    """``whole``: a call that writes at an index along ``axis`` of ``into``; ``target`` does so in place."""

    whole: Value
    into: Value
    target: torch._ops.OpOverload
    axis: int
    negative: bool  # indices from the end are allowed
    between: tuple[()] = ()

    @property
    def args(self) -> tuple[Value, ...]:
        return self.whole.args[1:]

    @property
    def attrs(self) -> dict[str, Any]:
        template = self.whole.attrs["template"]
        how = {"axis": self.axis, "negative": self.negative}
        return {"target": self.target, "template": template, **how}

    def leaves(self, read: Value) -> bool:
        """No: an index may point anywhere."""
        return False


def _places(graph: Graph) -> Iterator[_Region | _Indexed]:
    users = graph.users()
    outputs = {v.id for v in graph.outputs}
    for whole, into in graph.updated:
        kept: set[int] = set()
        place = _indexed(whole, into) or _place(whole, into, kept)
        if place is None or into.id in outputs or any(_needs(one, into) for one in place.args):
            continue

        def is_safe(read: Value, kept: Set[int] = kept, place: _Region | _Indexed = place) -> bool:
            """Whether a reader of the old contents, or of a slice of them, finds them in the new ones."""
            if read is place.whole:
                return True
            if read.id in outputs or read.op != "slice":
                return False
            alone = read.id in kept or place.leaves(read)
            return alone or (bool(users[read.id]) and all(map(is_safe, users[read.id])))

        if all(map(is_safe, users[into.id])):
            yield place


def _indexed(whole: Value, into: Value) -> _Indexed | None:
    """``whole`` if it puts what it is given at one row of indices along one axis of ``into``."""
    if whole.op != "call" or not whole.args or whole.args[0] is not into:
        return None
    target, template = whole.attrs["target"], whole.attrs["template"]
    if (
        target not in _IN_PLACE
        or len(whole.args) != 3
        or torch.are_deterministic_algorithms_enabled()
    ):
        return None
    index = whole.args[1]
    if len(index.shape) != 1 or index.dtype not in INDICES:
        return None
    if target is aten.index_copy.default:
        axis = template[1] % len(into.shape)
        return _Indexed(whole, into, _IN_PLACE[target], axis, negative=False)
    places = template[1]
    found = [k for k, one in enumerate(places) if one is not None]
    if len(found) != 1 or any(template[3:]):  # accumulates
        return None
    return _Indexed(whole, into, _IN_PLACE[target], found[0], negative=True)


def _place(whole: Value, into: Value, kept: set[int]) -> _Region | None:
    """Where ``whole`` differs from what ``into`` has, if that is one part; ``kept`` learns the pieces that do not."""
    part, starts = whole, tuple[Dim, ...](0 for _ in into.shape)
    passed: list[tuple[Value, tuple[Dim, ...]]] = []
    while part.op == "concat":
        others = []
        for piece, there in _pieces(part, starts):
            if _is_old(piece, into, there):
                kept.add(piece.id)
            else:
                others.append((piece, there))
        if len(others) != 1:
            break
        passed.append((part, starts))
        [(part, starts)] = others
    return _Region(whole, into, part, starts, tuple(passed[1:])) if passed else None


def _pieces(concat: Value, starts: Sequence[Dim]) -> Iterator[tuple[Value, tuple[Dim, ...]]]:
    """The operands of ``concat``, which begins at ``starts``, and where they begin."""
    axis = concat.attrs["axis"]
    for piece, offset in zip(concat.args, operand_offsets(concat), strict=True):
        first = plain(sympy.sympify(starts[axis]) + offset)
        yield piece, (*starts[:axis], first, *starts[axis + 1 :])


def _is_old(piece: Value, into: Value, starts: Sequence[Dim]) -> bool:
    """Whether ``piece`` is what ``into`` has from ``starts`` on."""
    first: list[sympy.Basic] = [sympy.Integer(0)] * len(into.shape)
    while piece is not into:
        if piece.op != "slice" or any(step != 1 for step in piece.attrs["steps"]):
            return False
        first = [a + sympy.sympify(b) for a, b in zip(first, piece.attrs["starts"], strict=True)]
        piece = piece.args[0]
    return all(plain(a) == plain(b) for a, b in zip(first, starts, strict=True))


def _precedes(start: Dim, size: Dim, other: Dim) -> bool:
    return all(isinstance(n, int) for n in (start, size, other)) and start + size <= other


def _needs(value: Value, other: Value) -> bool:
    """Whether ``value`` is computed from ``other``."""
    seen, pending = {value.id}, [value]
    while pending:
        one = pending.pop()
        if one is other:
            return True
        for a in one.args:
            if a.id not in seen:
                seen.add(a.id)
                pending.append(a)
    return False


def _rewritten(graph: Graph, places: Mapping[int, _Region | _Indexed]) -> Graph:
    """``graph`` with ``places``; as it is if what one part needs is only known after another one is written."""
    whole_of = {place.into.id: place.whole for place in places.values()}
    cut = {v.id: (p.whole, starts) for p in places.values() for v, starts in p.between}

    def operands(v: Value) -> Sequence[Value]:
        if v.id in places:
            return places[v.id].args
        if v.id in cut:
            return cut[v.id][:1]
        return [whole_of.get(a.id, a) if v.op == "slice" else a for a in v.args]

    values = live(graph)
    at = {v.id: k for k, v in enumerate(values)}
    try:
        order = sort_topologically(
            len(values), [(at[a.id], at[v.id]) for v in values for a in operands(v)]
        )
    except ValueError:  # a cycle
        return graph
    b = IrBuilder()
    new: dict[int, Value] = {}
    for v in (values[k] for k in order):
        args = [new[a.id] for a in operands(v)]
        if v.id in places:
            place = places[v.id]
            into = place.into.attrs["index"]
            new[v.id] = b.make("written", args, v.shape, v.dtype, input=into, **place.attrs)
        elif v.id in cut:
            how = {"starts": cut[v.id][1], "steps": (1,) * len(v.shape)}
            new[v.id] = b.make("slice", args, v.shape, v.dtype, **how)
        else:
            new[v.id] = b.make(v.op, args, v.shape, v.dtype, v.strides, **v.attrs)
    outs = tuple(new[v.id] for v in graph.outputs)
    ins = tuple(new[v.id] for v in graph.inputs)
    return eliminate_dead_code(replace(graph, values=b.values, outputs=outs, inputs=ins))
