# SPDX-License-Identifier: Apache-2.0
"""Updates of a part of an input are written to the input itself, before the new contents are read there.

    %8 = slice %1 {0 .. p}                                %10 = written %7 {input=1, starts=(0, p)}
    %9 = slice %1 {p + 1 .. 256}                          %11 = slice %10 {0 .. p + 1}
    %10 = concat %8 %7 %9          ->                     update %1 %10
    %11 = slice %10 {0 .. p + 1}
    update %1 %10

A cache of keys is not copied for one of them. Nothing may read what is overwritten: whoever has to run the
original after a failure finds an input in which the part is written already, and writes it again.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import sympy

from blade.backends.disc.ir.concat_placement import operand_offsets
from blade.backends.disc.ir.graph import Graph, IrBuilder, Value, live, plain
from blade.backends.disc.ir.kernel import Dim
from blade.backends.disc.ir.late_sizes import late_operands
from blade.backends.disc.ir.rewrite import eliminate_dead_code


def update_in_place(graph: Graph) -> Graph:
    """``graph`` with the updates of parts as `written` values."""
    if not graph.updates or late_operands(graph.values):
        return graph
    if any("draw" in v.attrs for v in graph.values):  # draws keep their order
        return graph
    places = {place.whole.id: place for place in _places(graph)}
    return _rewritten(graph, places) if places else graph


@dataclass(frozen=True)
class _Place:
    """``whole``, the new contents of ``into``, differ from the old ones in ``part`` from ``starts`` on."""

    whole: Value
    into: Value
    part: Value
    starts: tuple[Dim, ...]


def _places(graph: Graph) -> Iterator[_Place]:
    users = graph.users()
    outputs = {v.id for v in graph.outputs}
    for whole, into in graph.updated:
        kept: set[int] = set()
        place = _place(whole, into, kept)
        if place is None or into.id in outputs or _needs(place.part, into):
            continue

        def is_safe(read: Value, kept: Set[int] = kept, place: _Place = place) -> bool:
            """Whether a reader of the old contents, or of a slice of them, finds them in the new ones."""
            if read.id in outputs or read.op != "slice":
                return False
            alone = read.id in kept or _is_apart(read, place)
            return alone or (bool(users[read.id]) and all(map(is_safe, users[read.id])))

        if all(map(is_safe, users[into.id])):
            yield place


def _place(whole: Value, into: Value, kept: set[int]) -> _Place | None:
    """Where ``whole`` differs from what ``into`` has, if that is one part; ``kept`` learns the pieces that do not."""
    part, starts = whole, tuple[Dim, ...](0 for _ in into.shape)
    while part.op == "concat":
        others = []
        for piece, there in _pieces(part, starts):
            if _is_old(piece, into, there):
                kept.add(piece.id)
            else:
                others.append((piece, there))
        if len(others) != 1:
            break
        [(part, starts)] = others
    return None if part is whole else _Place(whole, into, part, starts)


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


def _is_apart(read: Value, place: _Place) -> bool:
    """Whether ``read`` is a slice of the input without any element of the part, as far as numbers tell."""
    if read.args[0] is not place.into or any(step != 1 for step in read.attrs["steps"]):
        return False
    spans = zip(read.attrs["starts"], read.shape, place.starts, place.part.shape, strict=True)
    return any(_precedes(a, n, b) or _precedes(b, m, a) for a, n, b, m in spans)


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


def _rewritten(graph: Graph, places: Mapping[int, _Place]) -> Graph:
    """``graph`` with ``places``; as it is if what one part needs is only known after another one is written."""
    whole_of = {place.into.id: place.whole for place in places.values()}

    def operands(v: Value) -> list[Value]:
        if v.id in places:
            return [places[v.id].part]
        return [whole_of.get(a.id, a) if v.op == "slice" else a for a in v.args]

    order = _ordered(live(graph), operands)
    if order is None:
        return graph
    b = IrBuilder()
    new: dict[int, Value] = {}
    for v in order:
        args = [new[a.id] for a in operands(v)]
        if v.id in places:
            place = places[v.id]
            new[v.id] = b.make(
                "written",
                args,
                v.shape,
                v.dtype,
                input=place.into.attrs["index"],
                starts=place.starts,
            )
        else:
            new[v.id] = b.make(v.op, args, v.shape, v.dtype, v.strides, **v.attrs)
    outs = tuple(new[v.id] for v in graph.outputs)
    ins = tuple(new[v.id] for v in graph.inputs)
    return eliminate_dead_code(replace(graph, values=b.values, outputs=outs, inputs=ins))


def _ordered(
    values: Sequence[Value], operands: Callable[[Value], Sequence[Value]]
) -> list[Value] | None:
    """``values``, each behind its operands; ``None`` if there is a cycle."""
    done: dict[int, Value] = {}
    open_: set[int] = set()
    for root in values:
        stack = [root]
        while stack:
            v = stack[-1]
            missing = [a for a in operands(v) if a.id not in done]
            if v.id in done or not missing:
                stack.pop()
                open_.discard(v.id)
                done.setdefault(v.id, v)
            elif v.id in open_:
                return None
            else:
                open_.add(v.id)
                stack += missing
    return list(done.values())
