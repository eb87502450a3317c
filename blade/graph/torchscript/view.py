# SPDX-License-Identifier: Apache-2.0
"""The view of a captured graph for later stages: nodes, edges, order, and excluded nodes.

    graph_view = view(captured)
    graph_view.nodes[7].target, graph_view.edges, graph_view.effects, graph_view.excluded

A *node* is an op that makes or consumes tensors, in program order. Constants, sizes, scalar arithmetic and
lists are not nodes: their users get copies, and edges pass through them. ``aten::chunk`` and the
``ListUnpack`` of its result are one node, because tensor lists never cross a boundary.

Nodes are numbered through all blocks. Edges and effects stay within a block: to the block around it, an If
or a Loop is one node with the reads and effects of its blocks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

import torch

from blade.core.captured import Captured
from blade.core.cluster import SCALAR_BYTES, OpNode, ValueInfo, makes_sizes
from blade.core.reason import Reason
from blade.graph.shapes.observed_layout import ObservedRun
from blade.graph.torchscript.alias import Aliases, find_aliases
from blade.graph.torchscript.bind_overloads import resolve
from blade.graph.torchscript.boundary_scalars import (
    OPERANDS,
    TENSOR_OVERLOADS,
    number_dtype,
    promotes_alike,
)
from blade.graph.torchscript.describe import ObservedFacts, describe
from blade.graph.torchscript.effects import find_effects
from blade.graph.torchscript.loops import (
    Collected,
    as_loop,
    body_nodes,
    find_collected,
    find_late,
    stays_apart,
    why_not_one_node,
)
from blade.graph.torchscript.observe_values import KeptResults, observe_facts
from blade.graph.torchscript.pinned import find_excluded
from blade.graph.torchscript.program import (
    Line,
    Program,
    is_tensor_type,
    read,
)
from blade.graph.torchscript.scalar_lines import find_scalar_lines, holds_tensor, reads_node

RETURN = -1
"""A block's return, in the list of a value's readers."""


@dataclass(frozen=True)
class NodeUnit:
    """The lines of one node: the op, then the lines that unpack its tensor list.

    Of a loop also the lines around it that make and join lists. ``results`` are the tensors (or other values)
    that others may use. ``picks[k]`` is the position of result k in the op's list; it is empty for an op that
    returns no list.
    """

    lines: tuple[int, ...]
    results: tuple[int, ...]
    picks: tuple[int, ...] = ()


@dataclass(frozen=True)
class GraphView:
    """A captured graph as later stages see it; nodes are referred to by index.

    ``blocks[b]`` are the nodes of block b of the program, ascending. ``edges`` are (producer, consumer,
    bytes at the first sample), ``effects`` pairs (before, after) that must keep their order, ``excluded``
    the nodes that no backend may take. ``scalars[line]`` are the plain numbers that cross as 0-d tensors
    if that line is in a cluster. ``loops``: nodes that are loops, with the nodes that these run; a group has
    both or neither. ``collected``: lists that the loop of a line fills; they are part of its node. ``results``: the
    tensors that the graph returns, at each sample and probe; empty where no run was needed.
    """

    nodes: tuple[OpNode, ...]
    blocks: tuple[tuple[int, ...], ...]
    edges: tuple[tuple[int, int, int], ...]
    effects: tuple[tuple[int, int], ...]
    excluded: dict[int, Reason]
    program: Program
    aliases: Aliases
    scalar_lines: frozenset[int]
    units: tuple[NodeUnit, ...]
    unit_of: dict[int, int]  # line -> node
    scalars: dict[int, frozenset[int]]
    facts: tuple[ObservedRun, ...]  # per sample, then per probe
    loops: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    collected: Mapping[int, tuple[Collected, ...]] = field(default_factory=dict)
    results: Sequence[Mapping[int, torch.Tensor]] = ()

    def outermost(self, nodes: Sequence[int]) -> tuple[int, ...]:
        """``nodes`` without those that a loop among them runs."""
        inside = {inner for node in nodes for inner in self.loops.get(node, ())}
        return tuple(node for node in nodes if node not in inside)

    def with_bodies(self, nodes: Sequence[int]) -> tuple[int, ...]:
        """``nodes`` and those that the loops among them run, ascending."""
        return tuple(sorted({*nodes, *(i for node in nodes for i in self.loops.get(node, ()))}))

    def info(self, value: int) -> ValueInfo:
        """The known facts of ``value``."""
        return ObservedFacts(self.program, self.facts).info(value)

    @cached_property
    def readers(self) -> dict[int, list[int]]:
        """Value -> lines that need it, directly or through scalar lines; ``RETURN`` is a block's return."""
        found: dict[int, list[int]] = {}
        for line in self.program.lines:
            if line.index not in self.scalar_lines:
                for value in dict.fromkeys(s for v in line.reads for s in self.sources(v)):
                    found.setdefault(value, []).append(line.index)
        for value in dict.fromkeys(s for v in self.program.returned for s in self.sources(v)):
            found.setdefault(value, []).append(RETURN)
        return found

    def sources(self, value: int) -> tuple[int, ...]:
        """The values that ``value`` is computed from by scalar lines alone (itself if it is no
        scalar line's).
        """
        return sources(self.program, self.scalar_lines, value)


def view(
    captured: Captured,
    observe: Callable[[Program, KeptResults], tuple[ObservedRun, ...]] | None = None,
) -> GraphView:
    """Read ``captured.module``'s forward and run its samples and probes once each.

    ``observe`` replaces these runs if their facts are known.
    """
    program = read(captured.module.graph)
    aliases = find_aliases(program)
    cheap = find_scalar_lines(program, aliases)
    collected = find_collected(program)
    units = _find_units(program, aliases, cheap, collected)
    unit_of = {line: index for index, unit in enumerate(units) for line in unit.lines}
    kept = KeptResults(
        frozenset(s for value in program.returned for s in sources(program, cheap, value))
    )
    facts = observe_runs(captured, program, kept) if observe is None else observe(program, kept)
    known = ObservedFacts(program, facts)
    heads = [program.lines[unit.lines[0]] for unit in units]
    scalars = {head.index: _find_scalars(program, cheap, known, head) for head in heads}
    nodes = [
        describe(program, known, cheap, head, unit.results, scalars[head.index])
        for head, unit in zip(heads, units, strict=True)
    ]
    reads = [_unit_reads(program, cheap, unit) for unit in units]
    needs = [_unit_reads(program, cheap, unit, scalars) for unit in units]
    lines = [unit.lines for unit in units]
    blocks = _find_blocks(program, heads)
    effects = tuple(
        effect
        for members in blocks
        for effect in find_effects(program, aliases, lines, reads, nodes, members)
    )
    excluded = find_excluded(program, aliases, cheap, known, lines, needs, nodes)
    loops = _take_loops(program, aliases, known, cheap, units, needs, nodes, excluded, collected)
    return GraphView(
        nodes=tuple(nodes),
        blocks=blocks,
        edges=_find_edges(program, heads, unit_of, reads, facts),
        effects=effects,
        excluded=excluded,
        program=program,
        aliases=aliases,
        scalar_lines=cheap,
        units=units,
        unit_of=unit_of,
        scalars={line: values for line, values in scalars.items() if values},
        facts=facts,
        loops=loops,
        collected=collected,
        results=kept.runs,
    )


def _take_loops(
    program: Program,
    aliases: Aliases,
    facts: ObservedFacts,
    cheap: frozenset[int],
    units: Sequence[NodeUnit],
    needs: Sequence[dict[int, bool]],
    nodes: list[OpNode],
    excluded: dict[int, Reason],
    collected: Mapping[int, tuple[Collected, ...]],
) -> dict[int, tuple[int, ...]]:
    """Make nodes of the loops that may be one, inner ones first: they are in ``excluded`` no more."""
    heads = [program.lines[unit.lines[0]] for unit in units]
    bodies = body_nodes(program, heads)
    if not bodies:
        return {}
    counters = {program.blocks[heads[k].blocks[0]].inputs[0] for k in bodies}
    plain = [{v: read for v, read in reads.items() if v not in counters} for reads in needs]
    against = find_excluded(
        program, aliases, cheap, facts, [u.lines for u in units], plain, nodes, in_loop=True
    )
    reading = [
        program.lines[i] for i in sorted(cheap) if reads_node(program, cheap, program.lines[i])
    ]
    makers = [head for head, node in zip(heads, nodes, strict=True) if makes_sizes(node)]
    late = find_late(program, (*reading, *makers))
    taken: dict[int, tuple[int, ...]] = {}
    alone: dict[int, OpNode] = {}  # those of ``taken`` without what they run
    for node in sorted(bodies, reverse=True):
        line, inside = heads[node], bodies[node]
        inner = {i for other in taken if other in inside for i in taken[other]}
        lists = collected.get(line.index, ())
        appended = {one.appended for one in lists}
        own = [k for k in inside if k not in inner and heads[k].index not in appended]
        blamed = next((k for k in own if k not in taken and k in against), None)
        sized = next((k for k in own if makes_sizes(nodes[k])), None)
        known = {v: sources(program, cheap, v) for v in line.inputs}
        why = why_not_one_node(program, aliases, line, plain[node], known, late, lists)
        if blamed is not None:
            why = f"{nodes[blamed].name} in the loop: {against[blamed].detail}"
        elif sized is not None:
            why = f"A size of {nodes[sized].name} in the loop depends on elements."
        if why is not None:
            excluded[node] = stays_apart(nodes[node], why)
            index = program.blocks[line.blocks[0]].inputs[0]
            for other in [k for k in inside if k in taken and index in needs[k]]:
                nodes[other] = alone[other]
                excluded[other] = stays_apart(
                    nodes[other], "It reads the index of a loop around it."
                )
                del taken[other]
            continue
        alone[node] = nodes[node]
        nodes[node] = as_loop(nodes[node], [nodes[k] for k in own])
        del excluded[node]
        taken[node] = inside
    return taken


def observe_runs(
    captured: Captured, program: Program, kept: KeptResults | None = None
) -> tuple[ObservedRun, ...]:
    """The facts of every value of ``program`` at each sample, then at each probe."""
    runs = (*captured.samples, *captured.probes)
    return observe_facts(program, captured.module, runs, kept)


def sources(program: Program, cheap: frozenset[int], value: int) -> tuple[int, ...]:
    """Values (op results, graph inputs) that ``value`` depends on through scalar lines."""
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


def _find_units(
    program: Program,
    aliases: Aliases,
    cheap: frozenset[int],
    collected: Mapping[int, tuple[Collected, ...]],
) -> tuple[NodeUnit, ...]:
    units: list[NodeUnit] = []
    glued = {
        line for lists in collected.values() for one in lists for line in (one.made, one.joined)
    }
    for line in program.lines:
        if line.index in cheap or line.index in glued:
            continue
        unit = _glue(program, aliases, line)
        if line.index in collected:
            unit = _with_lists(program, line, collected[line.index])
        glued.update(unit.lines)
        units.append(unit)
    return tuple(units)


def _glue(program: Program, aliases: Aliases, line: Line) -> NodeUnit:
    """``line`` with the lines that unpack its list of tensors, if the list has no other use."""
    alone = NodeUnit((line.index,), line.outputs)
    if len(line.outputs) != 1 or not _is_tensor_list(program, line.outputs[0]):
        return alone
    made = line.outputs[0]
    users = program.users_of(made)
    if made in program.returned or not users or aliases.may_be_written(made):
        return alone
    results: list[int] = []
    picks: list[int] = []
    for user in users:
        places = _places(program, user, made)
        if places is None:
            return alone
        results.extend(user.outputs)
        picks.extend(places)
    return NodeUnit((line.index, *(u.index for u in users)), tuple(results), tuple(picks))


def _with_lists(program: Program, loop: Line, lists: Sequence[Collected]) -> NodeUnit:
    """A loop with the lines that make the lists it fills, and that join them."""
    joined = tuple(program.lines[one.joined].outputs[0] for one in lists)
    made = tuple(one.made for one in lists)
    lines = (loop.index, *made, *(one.joined for one in lists))
    return NodeUnit(lines, (*loop.outputs, *joined))


def _places(program: Program, user: Line, made: int) -> tuple[int, ...] | None:
    """Positions in the list ``made`` of ``user``'s outputs; ``None`` if ``user`` does more than unpack."""
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


def _find_blocks(program: Program, heads: Sequence[Line]) -> tuple[tuple[int, ...], ...]:
    members: list[list[int]] = [[] for _ in program.blocks]
    for index, head in enumerate(heads):
        members[head.block].append(index)
    return tuple(map(tuple, members))


def _find_scalars(
    program: Program, cheap: frozenset[int], facts: ObservedFacts, line: Line
) -> frozenset[int]:
    """Numbers known only at run time that ``line`` can take as 0-d tensors (boundary_scalars.py)."""
    overload = resolve(line.node)
    if overload not in TENSOR_OVERLOADS:
        return frozenset()
    beside = facts.info(line.inputs[0])
    names = (argument.name for argument in overload._schema.arguments)
    return frozenset(
        value
        for name, value in zip(names, line.inputs, strict=True)
        if name in OPERANDS
        and (number := number_dtype(program, value)) is not None
        and _is_plain(program, cheap, value)
        and promotes_alike(beside, number)
    )


def _is_plain(program: Program, cheap: frozenset[int], value: int) -> bool:
    """Whether ``value`` is not constant and does not depend on a tensor's size."""
    found = sources(program, cheap, value)
    return bool(found) and not any(holds_tensor(program.values[v].type()) for v in found)


def _unit_reads(
    program: Program,
    cheap: frozenset[int],
    unit: NodeUnit,
    without: Mapping[int, frozenset[int]] = MappingProxyType({}),
) -> dict[int, bool]:
    """Values the unit needs from other units or the caller -> whether it needs their elements.

    ``without[line]`` are arguments that do not count.
    """
    own = {v for index in unit.lines for v in program.lines[index].outputs}
    reads: dict[int, bool] = {}
    for index in unit.lines:
        for value in program.lines[index].reads:
            if value in without.get(index, ()):
                continue
            direct = not program.is_tensor(value) and not _is_tensor_list(program, value)
            for source in sources(program, cheap, value):
                if source not in own:
                    elements = not direct or not program.is_tensor(source)
                    reads[source] = reads.get(source, False) or elements
    return reads


def _find_edges(
    program: Program,
    heads: Sequence[Line],
    unit_of: dict[int, int],
    reads: Sequence[dict[int, bool]],
    facts: Sequence[ObservedRun],
) -> tuple[tuple[int, int, int], ...]:
    """Edges between nodes of one block; a value that a nested block reads is an edge to its If or Loop."""
    edges: dict[tuple[int, int], int] = {}
    for consumer, needs in enumerate(reads):
        for value, elements in needs.items():
            index = program.producer.get(value)
            if index is None or program.lines[index].block != heads[consumer].block:
                continue
            weight = _bytes(facts, value) if elements else SCALAR_BYTES
            key = (unit_of[index], consumer)
            edges[key] = edges.get(key, 0) + weight
    return tuple((a, b, weight) for (a, b), weight in edges.items())


def _bytes(facts: Sequence[ObservedRun], value: int) -> int:
    """Size of ``value`` in bytes when first observed."""
    return next((seen[value][0].bytes for seen in facts if value in seen), SCALAR_BYTES)
