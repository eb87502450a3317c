# SPDX-License-Identifier: Apache-2.0
"""Recomputes the operand of a reduction over axes other than the last in the reduction's order.

    %2 = mul %1 %1                          %2 = reshape (permute %1)       [s0, 8, s1*s2]
    %3 = reduce %2 {sum, axes=(1, 2)}       %3 = mul %2 %2
                                    ->      %4 = reduce %3 {sum, axes=(2,)}

A kernel has one shape, and a reduction's has the reduced axes, merged into one, at the end. A preceding op
in its own shape would be another kernel, whose result is written and read again. A lookup whose rows are
reduced moves with the rest on a CPU. An op stays where it is if its result is in memory anyway, or if more
would have to be written to compute it again: the places of a pool's maxima.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from blade.backends.disc.frontend.ops.reduction import wide
from blade.backends.disc.ir.graph import (
    Graph,
    IrBuilder,
    Shape,
    Value,
    contiguous_strides,
    live,
    numel,
)
from blade.backends.disc.ir.simplify import RULES
from blade.backends.disc.ir.views import reshape_strides, view_of
from blade.backends.disc.passes.column_pieces import (
    Pieces,
    centre_of,
    joined,
    pieces_of,
    squared_differences,
)

_CHEAP = ("add", "sub", "mul", "neg", "abs", "cast", "fma", "maximum", "minimum")


@dataclass(frozen=True)
class _Known:
    """Ids of values."""

    once: frozenset[int]  # with one reader
    lookups: frozenset[int]  # that move with what reduces them
    stored: frozenset[int]  # in memory, whatever reads them here


def reduce_last_axis(graph: Graph, gathers: bool = False, pieces: bool = False) -> Graph:
    """``graph`` with the operands of reductions over several or leading axes computed row by row.

    ``gathers``: rows of a table that are selected and reduced are read by the reduction. ``pieces``: columns are
    reduced in pieces (column_pieces.py).
    """
    users, returned = graph.users(), {v.id for v in graph.outputs}
    once = frozenset(
        v.id for v in graph.values if len({u.id for u in users[v.id]}) == 1 and v.id not in returned
    )
    lookups = frozenset(
        v.id
        for v in graph.values
        if gathers
        and v.op == "gather"
        and (v.id in once or all(u.is_pointwise and u.id in once for u in users[v.id]))
    )
    read = (*graph.outputs, *(a for v in graph.values if not _reads_registers(v) for a in v.args))
    stored = {_in_memory(a).id for a in read}
    known = _Known(once, lookups, frozenset(stored))
    b = IrBuilder(RULES)
    new: dict[int, Value] = {}
    for v in live(graph):
        made = None
        if v.op == "reduce":
            divided = pieces_of(v.args[0].shape, v.attrs["axes"]) if pieces else None
            if divided is None:
                made = _in_rows(b, v, new, known)
            else:
                made = _in_pieces(b, v, new, known, divided)
        args = [new[a.id] for a in v.args]
        new[v.id] = made or b.make(v.op, args, v.shape, v.dtype, v.strides, **v.attrs)
    rebuilt = replace(
        graph,
        values=b.values,
        outputs=tuple(new[v.id] for v in graph.outputs),
        inputs=tuple(new[v.id] for v in graph.inputs),
    )
    rebuilt.values = live(rebuilt)
    return rebuilt


def _in_rows(b: IrBuilder, v: Value, new: dict[int, Value], known: _Known) -> Value | None:
    x, axes = v.args[0], v.attrs["axes"]
    rest = [k for k in range(len(x.shape)) if k not in axes]
    if not (x.is_pointwise or x.id in known.lookups) or axes == (len(x.shape) - 1,):
        return None
    shape = (*(x.shape[k] for k in rest), numel([x.shape[k] for k in axes]))
    same = range(len(shape))
    moved = _AxisMover(b, new, known, (*rest, *axes), shape, same).computed(x)
    if moved is None:
        return None
    return b.reshape(b.reduce(v.attrs["kind"], moved, [len(rest)]), v.shape)


def _in_pieces(
    b: IrBuilder, v: Value, new: dict[int, Value], known: _Known, pieces: Pieces
) -> Value | None:
    x, axes, kind = v.args[0], v.attrs["axes"], v.attrs["kind"]
    mover = _AxisMover(b, new, known, pieces.axes, pieces.split, pieces.order)

    def summed(one: Value) -> tuple[Value, Value] | None:
        """``one`` in pieces, and what each of them is reduced to."""
        moved = mover.value(one)
        if moved is None:
            return None
        if kind in ("sum", "prod"):  # partial results neither overflow nor lose digits
            moved = b.cast(moved, wide(moved.dtype))
        return moved, b.reduce(kind, moved, [len(pieces.shape) - 1])

    centred = centre_of(x, axes) if kind == "sum" else None
    found = summed(x if centred is None else centred)
    if found is None:
        return None
    if centred is None:
        made = joined(b, kind, found[1], pieces)
    else:
        made = squared_differences(b, *found, pieces, numel([x.shape[a] for a in axes]))
    return b.reshape(b.cast(made, v.dtype), v.shape)


@dataclass(frozen=True)
class _AxisMover:
    """Rebuilds values with the axes in ``order``, merged or split to ``split``, and those then in ``last_order``."""

    b: IrBuilder
    new: dict[int, Value]
    known: _Known
    order: Sequence[int]
    split: Shape
    last_order: Sequence[int]
    made: dict[int, Value | None] = field(default_factory=dict)
    written: dict[int, frozenset[Value]] = field(default_factory=dict)
    """Id of a value that is computed here -> what has to be written for that."""
    left: set[int] = field(
        default_factory=set
    )  # ids of values that it does not pay to compute here

    @property
    def shape(self) -> Shape:
        return tuple(self.split[k] for k in self.last_order)

    def value(self, v: Value) -> Value | None:
        if v.id not in self.made:
            self.made[v.id] = self.computed(v) or self.seen(v)
        return self.made[v.id]

    def computed(self, v: Value) -> Value | None:
        """``v`` recomputed, if that saves writing it or reads no more than its result would take."""
        if v.op in ("fill", "size"):
            return self.b.make(v.op, (), self.shape, v.dtype, **v.attrs)
        if v.op == "gather":
            return self.gathered(v)
        if not v.is_pointwise or not (v.id in self.known.once or _is_cheap(v)):
            return None
        if v.id in self.known.stored and not _widens(v):
            return None
        operands = [self.value(a) for a in v.args]
        known = [o for o in operands if o is not None]
        if len(known) != len(operands) or not self.pays(v):
            return None
        return self.b.make(v.op, known, self.shape, v.dtype, **v.attrs)

    def pays(self, v: Value) -> bool:
        """Whether no more has to be written to compute ``v`` here than one tensor, or as much as ``v`` takes.

        What stays where it is takes the ops after it along, up to one with larger elements: they are written instead.
        """
        found = frozenset[Value]().union(*(self.written_for(a) for a in v.args))
        size = v.dtype.itemsize
        stays = any(a.id in self.left and a.dtype.itemsize >= size for a in v.args)
        much = sum(one.dtype.itemsize for one in found) > size
        if stays or (much and len(found) > 1):
            self.left.add(v.id)
            return False
        self.written[v.id] = found
        return True

    def written_for(self, v: Value) -> frozenset[Value]:
        """What has to be written so that ``v`` can be computed or read here."""
        if v.id in self.written:
            return self.written[v.id]
        v = _in_memory(v)
        made_here = v.is_pointwise or v.op == "gather"
        return frozenset([v] if made_here and v.id not in self.known.stored else [])

    def gathered(self, v: Value) -> Value | None:
        """Rows of a table, read where they lie: an index per row, and each row has an element per result."""
        last = len(v.shape) - 1
        index = v.args[1]
        if (
            v.id not in self.known.lookups
            or len(self.shape) != len(self.order)
            or self.order[-2:-1] != (last,)
            or v.attrs["axes"][-1] != last
            or index.op != "broadcast"
            or last in index.attrs["axes"]
            or v.shape[last] in (1, 2, 3)  # too few for vectors of rows
        ):
            return None
        moved = self.value(index)
        if moved is None:
            return None
        source, _, *checks = (self.new[a.id] for a in v.args)
        axes = tuple(None if a is None else self.order.index(a) for a in v.attrs["axes"])
        attrs = {**v.attrs, "axes": axes}
        return self.b.make("gather", (source, moved, *checks), self.shape, v.dtype, **attrs)

    def seen(self, v: Value) -> Value | None:
        """``v`` as a view of its buffer, if strides can express it."""
        strides = _strides(self.new[v.id])
        if strides is None:
            return None
        shape = tuple(v.shape[k] for k in self.order)
        if reshape_strides(shape, tuple(strides[k] for k in self.order), self.split) is None:
            return None
        split = self.b.reshape(self.b.permute(self.new[v.id], self.order), self.split)
        return self.b.permute(split, self.last_order)


def _strides(v: Value) -> Shape | None:
    """Strides that ``v`` will have; a broadcast without strides will have its operand copied first."""
    view = view_of(v)
    if view is not None or v.op != "broadcast":
        return None if view is None else view.strides
    core = contiguous_strides(v.args[0].shape)
    places = dict(zip(v.attrs["axes"], core, strict=True))
    return tuple(places.get(k, 0) for k in range(len(v.shape)))


def _in_memory(v: Value) -> Value:
    """What ``v`` reads from memory, if it is a layout of it."""
    while v.is_layout and v.op != "broadcast":
        (v,) = v.args
    return v


def _reads_registers(v: Value) -> bool:
    """Whether ``v`` may read values from registers."""
    return v.is_fusible or v.is_layout


def _widens(v: Value) -> bool:
    """Whether ``v`` is larger than what it is computed from."""
    return v.op == "cast" and v.dtype.itemsize > v.args[0].dtype.itemsize


def _is_cheap(v: Value) -> bool:
    """Whether ``v`` does little work on one full-size operand: as cheap as reading the result."""
    wide = [a for a in v.args if a.op not in ("fill", "size", "broadcast")]
    return v.op in _CHEAP and len({a.id for a in wide}) <= 1
