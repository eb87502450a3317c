# SPDX-License-Identifier: Apache-2.0
"""The nodes of an FX graph as values that ``pickle`` takes, and nodes made from them.

calls = tuple(map(encode_node, graph.nodes))
for call in calls:                     # elsewhere, in the same order
    nodes[call.name] = decode_node(call, graph, nodes)

Unlike FX's own pickling, which traces the generated code again, this keeps nodes without operands, such as
draws of random numbers, as nodes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch.fx import Graph, Node

_OPS = "torch.ops."


@dataclass(frozen=True)
class NodeRef:
    """A reference to another node, as an argument."""

    name: str


@dataclass(frozen=True)
class SerializedCall:
    """One FX node. ``target`` is the text of an op of torch, a picklable function, or a name."""

    op: str
    name: str
    target: Any
    args: Any
    kwargs: Any
    source: str | None


def encode_node(node: Node) -> SerializedCall:
    """``node`` without its ``meta``, except for ``source``."""
    args, kwargs = _encode(node.args), _encode(node.kwargs)
    return SerializedCall(
        node.op, node.name, _encode_target(node.target), args, kwargs, node.meta.get("source")
    )


def decode_node(call: SerializedCall, graph: Graph, nodes: Mapping[str, Node]) -> Node:
    """Append the node to ``graph``; ``nodes`` are the earlier ones by name."""
    args, kwargs = _decode((call.args, call.kwargs), nodes)
    return graph.create_node(call.op, _decode_target(call.target), args, kwargs, name=call.name)


def _encode_target(target: Any) -> Any:
    if isinstance(target, torch._ops.OpOverload):
        return f"{_OPS}{target}"
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"{_OPS}higher_order.{target.name()}"
    return target


def _decode_target(target: Any) -> Any:
    if isinstance(target, str) and target.startswith(_OPS):
        return attrgetter(target.removeprefix(_OPS))(torch.ops)
    return target


def _encode(value: Any) -> Any:
    """Encode in plain containers: FX's own would need FX's pickling."""
    if isinstance(value, Node):
        return NodeRef(value.name)
    if isinstance(value, dict):
        return {key: _encode(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return (list if isinstance(value, list) else tuple)(map(_encode, value))
    return value


def _decode(value: Any, nodes: Mapping[str, Node]) -> Any:
    if isinstance(value, NodeRef):
        return nodes[value.name]
    if isinstance(value, dict):
        return {key: _decode(one, nodes) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_decode(one, nodes) for one in value)
    return value
