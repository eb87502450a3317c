# SPDX-License-Identifier: Apache-2.0
"""Which nodes must keep their order although no value passes between them."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from blade.backends.base import OpNode
from blade.graph.alias import OUTSIDE, STRUCTURE, Aliases, schema_of
from blade.graph.pins import is_random
from blade.graph.program import Program, nested


def find_effects(
    program: Program,
    aliases: Aliases,
    units: Sequence[Sequence[int]],
    reads: Sequence[Mapping[int, bool]],
    nodes: Sequence[OpNode],
) -> tuple[tuple[int, int], ...]:
    """Pairs (before, after): memory order around every write, and the chain of visible effects.

    The chain holds random ops (they draw from one generator), raises, prints, calls, and writes that
    a caller can see: an exception must not overtake a mutation.
    """
    effects = dict.fromkeys(_memory_order(program, aliases, units, reads))
    chain = [i for i, unit in enumerate(units) if _is_visible(program, aliases, unit, nodes[i])]
    effects.update(dict.fromkeys(pairwise(chain)))
    return tuple((a, b) for a, b in effects if a != b)


def _memory_order(
    program: Program,
    aliases: Aliases,
    units: Sequence[Sequence[int]],
    reads: Sequence[Mapping[int, bool]],
) -> list[tuple[int, int]]:
    """Read after write, write after read, write after write, per root that is ever written."""
    order: list[tuple[int, int]] = []
    last_write: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    for index, unit in enumerate(units):
        wrote = frozenset[int]().union(*(aliases.writes.get(i, frozenset()) for i in unit))
        read = aliases.union(reads[index]) & aliases.written
        for root in sorted(read | wrote):
            if root in last_write:
                order.append((last_write[root], index))
            if root in wrote:
                order.extend((reader, index) for reader in readers.pop(root, ()))
                last_write[root] = index
            else:
                readers.setdefault(root, []).append(index)
    return order


def _is_visible(program: Program, aliases: Aliases, unit: Sequence[int], node: OpNode) -> bool:
    line = program.lines[unit[0]]
    if OUTSIDE in aliases.writes.get(line.index, frozenset()):
        return True
    inside = [line.node, *nested(line.node)]
    if any(n.isNondeterministic() for n in inside):
        return True
    if schema_of(line.node) is not None:
        return is_random(node)
    blocks = ("prim::If", "prim::Loop")
    return any(schema_of(n) is None and n.kind() not in (*STRUCTURE, *blocks) for n in inside)
