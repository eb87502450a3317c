# SPDX-License-Identifier: Apache-2.0
"""Fusion: decides which pointwise ops and reductions run together in one kernel.

    fuse(graph) -> Fused: groups of values and library ops, in execution order

A group has one shape. A *loop* group computes every value at every point. A *row* group also reduces
over the last axis; its row values (sum, maximum and values computed from them) have size 1 there. A row
group with several reductions that depend on each other is a *stitch* group. Groups grow in topological
order: a value joins the group of an operand if the shapes fit and no path leaves the group and returns
to it. A long sum takes several groups: all that one kernel reads has to be in memory when it begins.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from blade.backends.disc.ir.concat_placement import place_operands, repeat_operands
from blade.backends.disc.ir.graph import (
    LEAVES,
    Graph,
    Shape,
    Value,
)
from blade.backends.disc.ir.late_sizes import late_operands
from blade.backends.disc.ir.size_facts import SizeRelations
from blade.backends.disc.ir.views import StridedView, memory_of, view_of

_GIVEN = ("input", "const", *LEAVES)
MOST_TERMS = 4
"""Terms of a sum in one kernel. A weight that all layers share has a gradient from each of them: in one kernel, the
gradients of all layers, and what they are computed from, would wait for the last one."""

MOST_TENSORS = 8
"""Tensors of their shape, leaves aside, that two groups read from memory once they are merged: because a value
connects them, or because both reduce the same rows. A group that grows value by value is not limited, nor are those
whose results go into one concatenation."""


@dataclass(eq=False)
class FusionGroup:
    """Values that one kernel computes over ``shape``; ``row`` is set if one of them is a reduction."""

    shape: Shape
    members: list[Value] = field(default_factory=list)
    row: bool = False

    @property
    def is_scattered(self) -> bool:
        """Whether the last member is a `scatter`, which is complete only after the kernel: nothing joins it."""
        return bool(self.members) and self.members[-1].op == "scatter"

    @property
    def row_shape(self) -> Shape:
        return (*self.shape[:-1], 1)

    @property
    def kind(self) -> str:
        reductions = [m for m in self.members if m.op == "reduce"]
        if not reductions:
            return "loop"
        return "row" if len(reductions) == 1 else "stitch"


FusionUnit = FusionGroup | Value


@dataclass(frozen=True)
class Fused:
    """``units`` in execution order: groups, and values that are library ops."""

    graph: Graph
    units: tuple[FusionUnit, ...]
    group_of: dict[int, FusionGroup]
    stored: frozenset[int]  # ids of members that other units read from memory
    placed: Mapping[int, StridedView] = field(
        default_factory=dict
    )  # stored members that lie in a concatenation
    repeated: Mapping[tuple[int, int], StridedView] = field(
        default_factory=dict
    )  # (concatenation, stored member): where the member is stored a second time

    @cached_property
    def facts(self) -> SizeRelations:
        """The graph's facts, for queries."""
        return SizeRelations(f.relation for f in self.graph.facts)

    def __str__(self) -> str:
        lines = []
        for unit in self.units:
            if isinstance(unit, FusionGroup):
                lines.append(f"{unit.kind} group over [{', '.join(map(str, unit.shape))}]")
                lines += [f"    {m}{'  stored' * (m.id in self.stored)}" for m in unit.members]
            else:
                lines.append(str(unit))
        return "\n".join(lines)


def fuse(graph: Graph, repeats: bool = False) -> Fused:
    """Group the fusible values of a legalized graph.

    ``repeats``: a kernel may store a result twice, for a concatenation and for other readers.
    """
    fuser = _Fuser(graph)
    for value in graph.values:
        if value.is_fusible:
            fuser.place(value)
        else:
            fuser.rank(value)
    fuser.join_reductions()
    fuser.join_siblings()
    made = {
        member.id: group.row
        for group in fuser.groups
        for member in group.members
        if member.op != "scatter"
    }
    copies = {g.members[0].id for g in fuser.groups if is_copy(g)}
    placed = place_operands(graph, list(fuser.reads()), made, copies)
    done = copies & {reader.id for reader, a in fuser.reads() if _base(a) & placed.keys()}
    units = [u for u in fuser.ordered() if isinstance(u, Value) or u.members[0].id not in done]
    stored, reads = fuser.stored(), list(fuser.reads())
    repeated = repeat_operands(graph, reads, made, placed) if repeats else {}
    return Fused(graph, tuple(units), fuser.group_of, stored, placed, repeated)


def is_copy(group: FusionGroup) -> bool:
    """Whether ``group`` only reorders elements."""
    (only, *more) = group.members
    return not more and only.op == "cast" and only.dtype == only.args[0].dtype


def is_instruction(value: Value) -> bool:
    """Whether ``value`` is an instruction of its own: a library op, a concatenation or a write to an input."""
    return value.op in (
        "linear",
        "int8_linear",
        "int8_conv",
        "weight_only_linear",
        "scaled_linear",
        "matmul",
        "conv",
        "conv_weight_gradient",
        "spatial",
        "attention",
        "group_moments",
        "flash_attention",
        "flash_attention_gradient",
        "call",
        "item",
        "read",
        "loop",
        "carried",
        "concat",
        "written",
    )


def space_of(value: Value) -> Shape:
    """The shape of the points at which ``value`` is computed."""
    if value.op == "reduce":
        return value.args[0].shape
    return value.args[1].shape if value.op == "scatter" else value.shape


def row_source(value: Value) -> Value | None:
    """The [.., 1] value that ``value`` repeats along the last axis; ``None`` if it is not such a
    broadcast.
    """
    if value.op != "broadcast" or not value.shape:
        return None
    core, rank = value.args[0], len(value.shape)
    if value.attrs["axes"] != tuple(range(rank - 1)):
        return None
    if core.op == "reshape" and core.args[0].shape == (*value.shape[:-1], 1):
        return core.args[0]
    return None


class _Fuser:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.users = graph.users()
        self.late = late_operands(graph.values)
        self.dependents: dict[int, list[Value]] = {v.id: [] for v in graph.values}
        for v in graph.values:
            for a in self.operands(v):
                self.dependents[a.id].append(v)
        self.group_of: dict[int, FusionGroup] = {}
        self.groups: list[FusionGroup] = []
        self.ranks: dict[FusionUnit, int] = {}  # larger than those of all units that are read
        self.terms: dict[int, int] = {}  # of the part of a sum that is in the group of its result

    def place(self, v: Value) -> None:
        """Put ``v`` into the group of an operand and merge the groups it connects, or into a new group."""
        home: FusionGroup | None = None
        for group in self.candidates(v):
            if self.terms_of(v, group if home is None else home, group) > MOST_TERMS:
                continue
            if home is None:
                fits = self.fits(v, group) and not self.reached(self.outside(v, group), group)
                home = group if fits and not self.is_for_others(v, group) else None
            elif group is not home and self.may_connect(v, home, group):
                self.merge(home, group)
        if home is None:
            home = FusionGroup(space_of(v))
            self.groups.append(home)
        home.members.append(v)
        home.row |= v.op == "reduce"
        self.group_of[v.id] = home
        self.terms[v.id] = self.terms_of(v, home)
        self.rank(v)

    def terms_of(self, v: Value, *groups: FusionGroup) -> int:
        """How many terms ``v`` sums up in ``groups``; a leaf, or what is looked up in one, is in memory anyway."""
        if v.op != "add":
            return 1
        terms = [_term(a) for a in v.args]
        sums = [t for t in terms if t.op == "add" and self.group_of.get(t.id) in groups]
        others = [t for t in terms if t not in sums and t.op not in (*LEAVES, "gather")]
        return sum(self.terms[t.id] for t in sums) + len(others)

    def unit(self, v: Value) -> FusionUnit:
        return self.group_of.get(v.id, v)

    def rank(self, v: Value) -> None:
        """Rank the unit of ``v`` above what ``v`` reads."""
        above = (self.ranks[self.unit(a)] + 1 for a in self.read_by(v))
        self.raise_to(self.unit(v), max(above, default=0))

    def raise_to(self, unit: FusionUnit, rank: int) -> None:
        """Rank ``unit`` so at least, and the units so far that read it above it."""
        stack = [(unit, rank)]
        while stack:
            unit, rank = stack.pop()
            if rank <= self.ranks.get(unit, -1):
                continue
            self.ranks[unit] = rank
            stack += [
                (self.unit(user), rank + 1)
                for m in members(unit)
                for user in self.dependents[m.id]
                if self.unit(user) in self.ranks and m in self.read_by(user)
            ]

    def candidates(self, v: Value) -> list[FusionGroup]:
        """The groups of operands, the latest first; for a row value those that reduce such rows before."""
        groups = {self.group_of[m.id] for m in self.joined(v)}
        rows = {g for g in groups if g.row and v.op != "reduce" and v.shape == g.row_shape}
        return sorted(groups, key=lambda g: (g not in rows, -g.members[-1].id))

    def joined(self, v: Value) -> Iterator[Value]:
        """Operands of ``v`` that a kernel could pass in a register."""
        for arg in _elements(v):
            source = row_source(arg) or arg
            if source.id in self.group_of:
                yield source

    def fits(self, v: Value, group: FusionGroup) -> bool:
        if group.is_scattered:
            return False
        if v.op == "scatter":
            return space_of(v) == group.shape and not group.row
        if v.op == "reduce":
            return v.args[0].shape == group.shape and len(group.shape) > 0
        if v.shape == group.shape:
            return self.all_rows_fit(v, group)
        return group.row and v.shape == group.row_shape

    def is_for_others(self, v: Value, group: FusionGroup) -> bool:
        """Whether ``v`` only widens a value of ``group`` for readers that cannot join the group.

        Such readers load the narrow value, which is half the size, and widen it themselves.
        """
        if v.op != "cast" or v.dtype.itemsize <= v.args[0].dtype.itemsize or not self.users[v.id]:
            return False
        return all(
            u.is_pointwise
            and self.reached([a for a in self.outside(u, group) if a is not v], group)
            for u in self.users[v.id]
        )

    def all_rows_fit(self, v: Value, group: FusionGroup) -> bool:
        """Whether ``v`` repeats row values only within the rows of their own group."""
        for arg in v.args:
            source = row_source(arg)
            if source is not None and self.group_of.get(source.id) is group and not group.row:
                return False
        return True

    def may_connect(self, v: Value, home: FusionGroup, group: FusionGroup) -> bool:
        """Whether ``v``, which joins ``home``, may make ``group`` part of it: a scatter is in no kernel of rows."""
        if (v.op == "scatter" and group.row) or self.tensors_of(home, group) > MOST_TENSORS:
            return False
        if not self.can_merge(home, group):
            return False
        return not self.reached(self.outside(v, home, group), group)

    def can_merge(self, a: FusionGroup, b: FusionGroup) -> bool:
        """Whether one kernel over the shape of ``a`` may compute both; row values from inputs alone fit, too."""
        fits = a.shape == b.shape or (a.row and a.row_shape == b.shape and self.is_of_inputs(b))
        if not fits or a.is_scattered or b.is_scattered:
            return False
        return not self.reached(self.entries(a, b), b) and not self.reached(self.entries(b, a), a)

    def is_of_inputs(self, group: FusionGroup) -> bool:
        return not group.row and all(
            m.is_pointwise and all(memory_of(o).op in _GIVEN for o in self.outside(m, group))
            for m in group.members
        )

    def entries(self, group: FusionGroup, other: FusionGroup) -> list[Value]:
        """Values that ``group`` would still read from memory after merging with ``other``."""
        return [o for m in group.members for o in self.outside(m, group, other)]

    def tensors_of(self, a: FusionGroup, b: FusionGroup) -> int:
        """How many tensors of their shape the two would read from memory after merging."""
        read = (*self.entries(a, b), *self.entries(b, a))
        return len({v.id for v in read if v.shape == a.shape and v.op not in LEAVES})

    def within(self, v: Value, group: FusionGroup) -> bool:
        source = row_source(v) or v
        return self.group_of.get(source.id) is group

    def merge(self, a: FusionGroup, b: FusionGroup) -> None:
        a.members = sorted([*a.members, *b.members], key=lambda m: m.id)
        a.row |= b.row
        for member in b.members:
            self.group_of[member.id] = a
        self.groups.remove(b)
        self.raise_to(a, max(self.ranks.pop(a), self.ranks.pop(b)))

    def read_by(self, v: Value) -> list[Value]:
        """Operands of ``v`` from outside its own group."""
        group = self.group_of.get(v.id)
        return self.outside(v) if group is None else self.outside(v, group)

    def outside(self, v: Value, *groups: FusionGroup) -> list[Value]:
        """Operands of ``v`` from outside ``groups``; the source of a gather always counts as outside."""
        elements = _elements(v)
        return [
            a
            for a in self.operands(v)
            if a not in elements or not any(self.within(a, group) for group in groups)
        ]

    def operands(self, v: Value) -> tuple[Value, ...]:
        """What ``v`` reads, and what makes its sizes."""
        late = self.late.get(v.id)
        return v.args if late is None else (*v.args, *late)

    def reached(self, start: list[Value], target: FusionGroup) -> bool:
        """Whether any value in ``start`` depends on ``target``."""
        rank = self.ranks[target]
        seen: set[FusionUnit] = set()
        stack = list(start)
        while stack:
            unit = self.unit(stack.pop())
            if unit is target:
                return True
            if unit in seen:
                continue
            seen.add(unit)
            if self.ranks.get(unit, rank + 1) > rank:
                for m in members(unit):
                    stack += self.operands(m)
        return False

    def reads(self) -> Iterator[tuple[Value, Value]]:
        """(reader, operand) for each read from memory."""
        for v in self.graph.values:
            group = self.group_of.get(v.id)
            if group is not None:
                yield from ((v, a) for a in self.outside(v, group))
            elif is_instruction(v):
                yield from ((v, a) for a in v.args)

    def join_reductions(self) -> None:
        """Merge groups that reduce rows of the same tensor, to read it once."""
        readers: dict[
            tuple[Shape, int], Value
        ] = {}  # (shape of rows, id of the operand) -> first reader
        for v in self.graph.values:
            group = self.group_of.get(v.id)
            if group is None or not group.row:
                continue
            for a in v.args:
                outside = a.shape == group.shape and not self.within(a, group)
                if outside and a.op not in (*LEAVES, "broadcast"):
                    twin = self.group_of[readers.setdefault((a.shape, a.id), v).id]
                    if twin is group or self.tensors_of(twin, group) > MOST_TENSORS:
                        continue
                    if self.can_merge(twin, group):
                        self.merge(twin, group)
                        group = twin

    def join_siblings(self) -> None:
        """Merge groups over one shape whose results go into the same concatenation."""
        for v in self.graph.values:
            groups: list[FusionGroup] = []
            for part in v.args if v.op == "concat" else ():
                view = view_of(part)
                group = None if view is None else self.group_of.get(view.base.id)
                if group is None:
                    continue
                twin = next((g for g in groups if g is group or self.can_merge(g, group)), None)
                if twin is None:
                    groups.append(group)
                elif twin is not group:
                    self.merge(twin, group)

    def stored(self) -> frozenset[int]:
        needed: set[int] = set()
        for _, operand in self.reads():
            needed |= _base(operand)
        for v in self.graph.outputs:
            needed |= _base(v)
        return frozenset(needed & set(self.group_of))

    def ordered(self) -> tuple[FusionUnit, ...]:
        """Units sorted so that producers come first, otherwise by their places."""
        begun: set[int] = set()
        order: list[FusionUnit] = []
        places = self.places()
        units = dict.fromkeys(
            self.unit(v) for v in self.graph.values if v.id in self.group_of or is_instruction(v)
        )
        for unit in sorted(units, key=places.__getitem__):
            self.visit(members(unit)[0], begun, order)
        assert self.comes_after_what_it_reads(order), "kernels that wait for each other"
        return tuple(order)

    def places(self) -> dict[FusionUnit, int]:
        """Where in the graph each unit has all that it reads, if no unit comes before its last value.

        At the place of its first value, a group that collects values of many layers would have all layers computed
        before anything else that reads them, such as the gradients of their weights.
        """
        found: dict[FusionUnit, int] = {}
        for unit in sorted(self.ranks, key=self.ranks.__getitem__):
            read = (found[self.unit(a)] for m in members(unit) for a in self.read_by(m))
            found[unit] = max((members(unit)[-1].id, *read))
        return found

    def comes_after_what_it_reads(self, order: Sequence[FusionUnit]) -> bool:
        """Whether ranks, and so kernels, are in an order that computes what is read before it is read."""
        return all(
            self.ranks[self.unit(a)] < self.ranks[unit]
            for unit in order
            for m in members(unit)
            for a in self.read_by(m)
        )

    def visit(self, v: Value, begun: set[int], order: list[FusionUnit]) -> None:
        """Depth-first visit; layouts between members of one group lead back to it and are skipped."""
        stack: list[tuple[Value, bool]] = [(v, False)]
        while stack:
            value, ready = stack.pop()
            group = self.group_of.get(value.id)
            unit = group.members if group is not None else [value]
            if ready:
                if group is not None or is_instruction(value):
                    order.append(group if group is not None else value)
            elif unit[0].id not in begun:
                begun.update(m.id for m in unit)
                stack.append((value, True))
                stack += [(a, False) for m in reversed(unit) for a in reversed(self.operands(m))]


def members(unit: FusionUnit) -> Sequence[Value]:
    """The values that ``unit`` computes."""
    return unit.members if isinstance(unit, FusionGroup) else (unit,)


def _term(v: Value) -> Value:
    while v.op in ("cast", "reshape"):
        (v,) = v.args
    return v


def _elements(v: Value) -> tuple[Value, ...]:
    """Operands that ``v`` reads at its own point."""
    return (v.args[1],) if v.op == "gather" else v.args


def _base(v: Value) -> set[int]:
    view = view_of(v)
    return set() if view is None else {view.base.id}
