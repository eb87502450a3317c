# SPDX-License-Identifier: Apache-2.0
"""What the later stages know of a captured graph: ops, edges, order, and what must not move.

    graph_view = view(captured)
    graph_view.nodes[7].target, graph_view.edges, graph_view.effects, graph_view.pinned

A *node* is an op that makes or consumes tensors, in program order. Constants, sizes, scalar
arithmetic and lists are not nodes: whoever needs them gets a copy, and edges pass through them.
``aten::chunk`` and the ``ListUnpack`` of its result are one node: tensor lists never cross a boundary.
"""

from dataclasses import dataclass
from functools import cached_property

from blade.backends.base import OpNode, ValueInfo
from blade.capture.captured import Captured
from blade.graph.alias import Aliases, find_aliases
from blade.graph.cheap import find_cheap
from blade.graph.describe import Facts, describe
from blade.graph.observe import Fact, observe_facts
from blade.graph.order import find_effects
from blade.graph.pins import find_pins
from blade.graph.program import Line, Program, is_tensor_type, read
from blade.reason import Reason

SCALAR_BYTES = 8
"""What an edge weighs over which only sizes or scalars travel."""

RETURN = -1
"""Stands for the block's return among the readers of a value."""


@dataclass(frozen=True)
class Unit:
    """The lines of one node: the op, then whatever takes its tensor list apart.

    ``results`` are the tensors (or other values) others may use. ``picks[k]`` says where result k sits
    in the op's list result; it is empty for an op that returns no list.
    """

    lines: tuple[int, ...]
    results: tuple[int, ...]
    picks: tuple[int, ...] = ()


@dataclass(frozen=True)
class GraphView:
    """A captured graph as the stages see it; everything refers to nodes by their index.

    ``edges`` are (producer, consumer, bytes at the first sample), ``effects`` pairs (before, after)
    that must keep their order, ``pinned`` the nodes no backend may take.
    """

    nodes: tuple[OpNode, ...]
    edges: tuple[tuple[int, int, int], ...]
    effects: tuple[tuple[int, int], ...]
    pinned: dict[int, Reason]
    program: Program
    aliases: Aliases
    cheap: frozenset[int]
    units: tuple[Unit, ...]
    unit_of: dict[int, int]  # line -> node
    facts: tuple[dict[int, Fact], ...]  # per sample, then per probe: value -> fact

    def info(self, value: int) -> ValueInfo:
        """What is known of ``value``."""
        return Facts(self.program, self.facts).info(value)

    @cached_property
    def readers(self) -> dict[int, list[int]]:
        """Value -> non-cheap lines that need it, through cheap lines too; ``RETURN`` is the return."""
        found: dict[int, list[int]] = {}
        for line in self.program.lines:
            if line.index not in self.cheap:
                for value in dict.fromkeys(s for v in line.reads for s in self.sources(v)):
                    found.setdefault(value, []).append(line.index)
        for value in dict.fromkeys(s for v in self.program.returns for s in self.sources(v)):
            found.setdefault(value, []).append(RETURN)
        return found

    def sources(self, value: int) -> tuple[int, ...]:
        """The values ``value`` is computed from through cheap lines alone (itself, if not cheap)."""
        return sources(self.program, self.cheap, value)


def view(captured: Captured) -> GraphView:
    """Read ``captured.module``'s forward and run its samples and probes once each."""
    program = read(captured.module.graph)
    aliases = find_aliases(program)
    cheap = find_cheap(program, aliases)
    units = _find_units(program, aliases, cheap)
    unit_of = {line: index for index, unit in enumerate(units) for line in unit.lines}
    runs = (*captured.samples, *captured.probes)
    facts = tuple(observe_facts(program, captured.module, run) for run in runs)
    known = Facts(program, facts)
    heads = [program.lines[unit.lines[0]] for unit in units]
    nodes = tuple(
        describe(program, known, cheap, head, unit.results)
        for head, unit in zip(heads, units, strict=True)
    )
    reads = [_unit_reads(program, cheap, unit) for unit in units]
    return GraphView(
        nodes=nodes,
        edges=_find_edges(program, units, unit_of, reads, facts),
        effects=find_effects(program, aliases, [u.lines for u in units], reads, nodes),
        pinned=find_pins(program, aliases, known, [u.lines for u in units], reads, nodes),
        program=program,
        aliases=aliases,
        cheap=cheap,
        units=units,
        unit_of=unit_of,
        facts=facts,
    )


def sources(program: Program, cheap: frozenset[int], value: int) -> tuple[int, ...]:
    """Non-cheap values (op results, graph inputs) that ``value`` depends on through cheap lines."""
    found: dict[int, None] = {}
    seen: set[int] = set()
    pending = [value]
    while pending:
        current = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        line = program.maker(current)
        if line is not None and line.index in cheap:
            pending.extend(reversed(line.reads))
        else:
            found[current] = None
    return tuple(found)


def _find_units(program: Program, aliases: Aliases, cheap: frozenset[int]) -> tuple[Unit, ...]:
    units: list[Unit] = []
    glued: set[int] = set()
    for line in program.lines:
        if line.index in cheap or line.index in glued:
            continue
        unit = _glue(program, aliases, line)
        glued.update(unit.lines)
        units.append(unit)
    return tuple(units)


def _glue(program: Program, aliases: Aliases, line: Line) -> Unit:
    """``line`` with the lines that take its list of tensors apart, if that is all that happens."""
    alone = Unit((line.index,), line.outputs)
    if len(line.outputs) != 1 or not _is_tensor_list(program, line.outputs[0]):
        return alone
    made = line.outputs[0]
    users = [program.lines[i] for i in program.users.get(made, ())]
    if made in program.returns or not users or aliases.may_be_written(made):
        return alone
    results: list[int] = []
    picks: list[int] = []
    for user in users:
        places = _places(program, user, made)
        if places is None:
            return alone
        results.extend(user.outputs)
        picks.extend(places)
    return Unit((line.index, *(u.index for u in users)), tuple(results), tuple(picks))


def _places(program: Program, user: Line, made: int) -> tuple[int, ...] | None:
    """Which elements of the list ``made`` are ``user``'s outputs; ``None`` if it does more."""
    if user.free or user.inputs[0] != made:
        return None
    if user.kind == "prim::ListUnpack":
        return tuple(range(len(user.outputs)))
    if user.kind == "aten::__getitem__" and program.constant(user.inputs[1]):
        return (int(program.held(user.inputs[1])),)
    return None


def _is_tensor_list(program: Program, value: int) -> bool:
    kind = program.values[value].type()
    return kind.kind() == "ListType" and is_tensor_type(kind.getElementType())


def _unit_reads(program: Program, cheap: frozenset[int], unit: Unit) -> dict[int, bool]:
    """Values the unit needs from other units or the caller -> whether it needs their elements."""
    own = {v for index in unit.lines for v in program.lines[index].outputs}
    reads: dict[int, bool] = {}
    for index in unit.lines:
        for value in program.lines[index].reads:
            direct = not program.is_tensor(value) and not _is_tensor_list(program, value)
            for source in sources(program, cheap, value):
                if source not in own:
                    elements = not direct or not program.is_tensor(source)
                    reads[source] = reads.get(source, False) or elements
    return reads


def _find_edges(
    program: Program,
    units: tuple[Unit, ...],
    unit_of: dict[int, int],
    reads: list[dict[int, bool]],
    facts: tuple[dict[int, Fact], ...],
) -> tuple[tuple[int, int, int], ...]:
    edges: dict[tuple[int, int], int] = {}
    for consumer, needs in enumerate(reads):
        for value, elements in needs.items():
            index = program.producer.get(value)
            if index is None:
                continue
            fact = facts[0].get(value) if facts else None
            weight = fact.bytes if fact is not None and elements else SCALAR_BYTES
            key = (unit_of[index], consumer)
            edges[key] = edges.get(key, 0) + weight
    return tuple((a, b, weight) for (a, b), weight in edges.items())
