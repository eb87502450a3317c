# SPDX-License-Identifier: Apache-2.0
"""Finds nodes that must keep their order although no value passes between them."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch

from blade.core.cluster import OpNode, is_random
from blade.graph.torchscript.alias import (
    OUTSIDE,
    STRUCTURE,
    Aliases,
    schema_of,
)
from blade.graph.torchscript.bind_overloads import resolve
from blade.graph.torchscript.decision_checks import check_of
from blade.graph.torchscript.program import Program, nested


def find_effects(
    program: Program,
    aliases: Aliases,
    units: Sequence[Sequence[int]],
    reads: Sequence[Mapping[int, bool]],
    nodes: Sequence[OpNode],
    members: Sequence[int],
) -> tuple[tuple[int, int], ...]:
    """Pairs (before, after) among ``members``, the units of one block: memory order around every
    write, and the chain of visible effects.

    The chain holds random ops (they draw from one generator), raises, prints, calls, and writes that
    a caller can see: an exception must not overtake a mutation.
    """
    effects = dict.fromkeys(_memory_order(aliases, units, reads, members))
    chain = [i for i in members if _is_visible(program, aliases, units[i], nodes[i])]
    effects.update(dict.fromkeys(pairwise(chain)))
    effects.update(dict.fromkeys(_behind_checks(program, units, members)))
    return tuple((a, b) for a, b in effects if a != b)


def _behind_checks(
    program: Program, units: Sequence[Sequence[int]], members: Sequence[int]
) -> list[tuple[int, int]]:
    """Pairs that keep what follows a check of a decision behind it: it may belong to another path."""
    order: list[tuple[int, int]] = []
    last: int | None = None
    for index in members:
        if last is not None:
            order.append((last, index))
        if check_of(program.lines[units[index][0]].node) is not None:
            last = index
    return order


def _memory_order(
    aliases: Aliases,
    units: Sequence[Sequence[int]],
    reads: Sequence[Mapping[int, bool]],
    members: Sequence[int],
) -> list[tuple[int, int]]:
    """Read after write, write after read, write after write, per root that is ever written."""
    order: list[tuple[int, int]] = []
    last_write: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    for index in members:
        wrote = frozenset[int]().union(*(aliases.writes.get(i, frozenset()) for i in units[index]))
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
    if resolve(line.node) is not None and is_random(node):
        return True
    return _has_side_effects(line.node) or any(
        _has_side_effects(n) or _may_draw(n) for n in nested(line.node)
    )


def _has_side_effects(node: torch._C.Node) -> bool:
    """Whether ``node`` has effects besides its results: raises, prints, asserts, calls."""
    if node.kind() in (*STRUCTURE, "prim::If", "prim::Loop"):
        return False
    schema = schema_of(node)
    return schema is None or not schema.returns


def _may_draw(node: torch._C.Node) -> bool:
    overload = resolve(node)
    return overload is not None and torch.Tag.nondeterministic_seeded in overload.tags
