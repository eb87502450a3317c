# SPDX-License-Identifier: Apache-2.0
"""Finds the loops that may be one node: a backend that takes all their ops may run them in one engine.

    for t in range(x.size(1)):                  # runs as often as a size says
        h = torch.tanh(x[:, t] @ w + h @ u)     # the state is tensors, every op has no effect but its result

Other loops are TorchScript, and each of their blocks is clustered by itself.
"""

from collections.abc import Mapping, Sequence

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


def why_not_one_node(
    program: Program,
    aliases: Aliases,
    line: Line,
    needs: Mapping[int, bool],
    sources: Mapping[int, Sequence[int]],
) -> str | None:
    """``None`` if ``line``, a Loop whose ops may all be in a cluster, may be a node.

    ``needs``: the values that it reads. ``sources``: those that its inputs are computed from.
    """
    [index] = line.blocks
    body = program.blocks[index]
    count, starts, *state = line.inputs
    if not (_is_true(program, starts) and _is_true(program, body.returns[0])):
        return "Whether the loop goes on depends on what it computes."
    if any(not holds_tensor(program.values[v].type()) for v in sources[count]):
        return "How often the loop runs is known only when the model runs."
    if any(program.values[v].type().kind() != "TensorType" for v in (*state, *body.inputs[1:])):
        return "The loop carries a value that is no tensor."
    if any(program.values[v].type().kind() != "TensorType" for v in needs):
        return "The loop reads a value that is no tensor."
    if line.index in aliases.writes or any(map(aliases.may_be_written, line.outputs)):
        return "The loop writes in place."
    given = aliases.union(line.reads) | frozenset(body.inputs)
    if given & aliases.union(body.returns[1:]):
        return "A run of the loop returns what it was given, or a view of it."
    return None


def _is_true(program: Program, value: int) -> bool:
    return program.constant(value) and program.held(value) is True


def as_loop(node: OpNode, body: Sequence[OpNode]) -> OpNode:
    """``node``, a Loop, as one that a backend may take."""
    return OpNode(node.name, LOOP, node.args, {}, node.outputs, node.source, tuple(body))


def stays_apart(node: OpNode, why: str) -> Reason:
    return Reason(Stage.SUPPORT, Code.UNSUPPORTED_OP, None, node.name, why)
