# SPDX-License-Identifier: Apache-2.0
"""Finds the loops that may be one node: a backend that takes all their ops may run them in one engine.

    for t in range(x.size(1)):                  # runs as often as a size says
        h = torch.tanh(x[:, t] @ w + h @ u)     # the state is tensors, every op has no effect but its result

Other loops are TorchScript, and each of their blocks is clustered by itself.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

import torch

from blade.core.cluster import OpNode
from blade.core.reason import Code, Reason, Stage
from blade.graph.torchscript.alias import Aliases
from blade.graph.torchscript.program import Line, Program
from blade.graph.torchscript.scalar_lines import holds_tensor

_LIBRARY = torch.library.Library("blade_graph", "FRAGMENT")
_LIBRARY.define("loop(Tensor[] state, Tensor[] given) -> Tensor[]")

LOOP = torch.ops.blade_graph.loop.default
"""The target of a node that is a loop; ``OpNode.body`` are the ops that it runs."""


@dataclass(frozen=True)
class Collected:
    """A list to which each iteration of a loop appends a tensor, and that is joined after the loop.

    ``made``, ``appended`` and ``joined`` are lines: ``[]``, ``aten::append`` and ``aten::stack`` or ``aten::cat``.
    """

    values: int
    made: int
    appended: int
    joined: int


def find_collected(program: Program) -> dict[int, tuple[Collected, ...]]:
    """Line of a Loop -> the lists that it fills and that nothing else sees."""
    found: dict[int, list[Collected]] = {}
    for line in program.lines:
        if line.kind != "aten::append" or program.users.get(line.outputs[0]):
            continue
        owner = program.blocks[line.block].owner
        if owner is None or program.lines[owner].kind != "prim::Loop":
            continue
        one = _collected(program, program.lines[owner], line)
        if one is not None:
            found.setdefault(owner, []).append(one)
    return {owner: tuple(lists) for owner, lists in found.items()}


def _collected(program: Program, loop: Line, append: Line) -> Collected | None:
    values = append.inputs[0]
    made = program.maker(values)
    if made is None or made.kind != "prim::ListConstruct" or made.inputs:
        return None
    if made.block != loop.block or values in program.returned:
        return None
    users = [program.lines[i] for i in program.users[values]]
    joined = [u for u in users if u.kind in JOINS and u.block == loop.block]
    if len(joined) != 1 or len(users) != 3 or {loop.index, append.index} - {u.index for u in users}:
        return None
    if joined[0].index < loop.index or not program.constant(joined[0].inputs[1]):
        return None
    return Collected(values, made.index, append.index, joined[0].index)


JOINS = ("aten::stack", "aten::cat")


def body_nodes(program: Program, heads: Sequence[Line]) -> dict[int, tuple[int, ...]]:
    """Node of a Loop -> the nodes of its block, those of inner loops included."""
    found: dict[int, list[int]] = {}
    node_of = {head.index: k for k, head in enumerate(heads)}
    for k, head in enumerate(heads):
        owner = program.blocks[head.block].owner
        while owner is not None:
            line = program.lines[owner]
            if line.kind == "prim::Loop":
                found.setdefault(node_of[owner], []).append(k)
            owner = program.blocks[line.block].owner
    return {node: tuple(nodes) for node, nodes in found.items()}


def find_late(program: Program, makers: Iterable[Line]) -> frozenset[int]:
    """The results of ``makers``, whose sizes depend on elements, and all values that are computed from them."""
    returning: dict[int, list[Line]] = {}  # value -> the Ifs and Loops whose blocks return it
    for block in program.blocks:
        if block.owner is None:
            continue
        for value in block.returns:
            returning.setdefault(value, []).append(program.lines[block.owner])
    found = {v for line in makers for v in line.outputs}
    pending = list(found)

    def add(values: Iterable[int]) -> None:
        new = [v for v in values if v not in found]
        found.update(new)
        pending.extend(new)

    while pending:
        value = pending.pop()
        users = program.users_of(value)
        for line in (*users, *returning.get(value, ())):
            add(line.outputs)
            add(v for b in line.blocks for v in program.blocks[b].inputs)
    return frozenset(found)


def why_not_one_node(
    program: Program,
    aliases: Aliases,
    line: Line,
    needs: Mapping[int, bool],
    sources: Mapping[int, Sequence[int]],
    late: Set[int],
    lists: Sequence[Collected] = (),
) -> str | None:
    """``None`` if ``line``, a Loop whose ops may all be in a cluster, may be a node.

    ``needs``: the values that it reads. ``sources``: those that its inputs are computed from.
    ``late``: values with sizes, or made of ints, that may depend on elements. ``lists``: those that it fills.
    """
    [index] = line.blocks
    body = program.blocks[index]
    count, starts, *state = line.inputs
    if not (_is_true(program, starts) and _is_true(program, body.returns[0])):
        return "Whether the loop goes on depends on what it computes."
    if any(not holds_tensor(program.values[v].type()) for v in sources[count]):
        return "How often the loop runs is known only when the model runs."
    if late & {count, *line.reads}:
        return "A size in the loop may depend on elements."
    if any(program.values[v].type().kind() != "TensorType" for v in (*state, *body.inputs[1:])):
        return "The loop carries a value that is no tensor."
    if any(program.values[v].type().kind() != "TensorType" for v in needs):
        return "The loop reads a value that is no tensor."
    own = {one.values for one in lists}
    if aliases.writes.get(line.index, frozenset()) - own or any(
        map(aliases.may_be_written, line.outputs)
    ):
        return "The loop writes in place."
    given = aliases.union(v for v in line.reads if v not in own) | frozenset(body.inputs)
    used = [
        returned
        for returned, last in zip(body.returns[1:], line.outputs, strict=True)
        if program.users.get(last) or last in program.returned
    ]
    if given & aliases.union(used):
        return "An iteration of the loop returns what it was given, or a view of it."
    return None


def _is_true(program: Program, value: int) -> bool:
    return program.constant(value) and program.held(value) is True


def as_loop(node: OpNode, body: Sequence[OpNode]) -> OpNode:
    """``node``, a Loop, as one that a backend may take."""
    return OpNode(node.name, LOOP, node.args, {}, node.outputs, node.source, body=tuple(body))


def stays_apart(node: OpNode, why: str) -> Reason:
    return Reason(Stage.SUPPORT, Code.UNSUPPORTED_OP, None, node.name, why)
