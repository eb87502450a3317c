# SPDX-License-Identifier: Apache-2.0
"""Merge equal nodes of a functional joint graph, so that no activation is saved twice for backward.

torch's own pass does the same, but imports most of Inductor, which takes longer than the whole partitioner.
"""

import operator
from types import BuiltinFunctionType
from typing import Any

import torch
from torch.fx import Graph, Node

from blade.graph.fx.random_ops import BLANK
from blade.graph.shapes.fake_tensors import storages_of

aten = torch.ops.aten


def eliminate_common_subexpressions(graph: Graph) -> None:
    """Change ``graph`` in place. Aliases of results stay: each result has its own memory, as in eager."""
    returned = {s for n in graph.output_node().all_input_nodes for s in storages_of(n)}
    known: dict[Any, Node] = {}
    writes = 0  # so far: reads before and after a write are not equal
    for node in list(graph.nodes):
        target = node.target
        if isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable:
            writes += 1
        elif _is_pure(node) and returned.isdisjoint(storages_of(node)):
            first = known.setdefault((writes, target, _key(node.args), _key(node.kwargs)), node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)


def _is_pure(node: Node) -> bool:
    target, value = node.target, node.meta.get("val")
    if isinstance(target, torch._ops.OpOverload):
        is_drawn = torch.Tag.nondeterministic_seeded in target.tags
        # a number read out of a tensor has a symbol of its own, which other nodes refer to
        return not (is_drawn or target.overloadpacket in BLANK or isinstance(value, torch.SymInt))
    is_arithmetic = isinstance(target, BuiltinFunctionType) and isinstance(value, torch.SymInt)
    return node.op == "call_function" and (target is operator.getitem or is_arithmetic)


def _key(value: Any) -> Any:
    """A hashable key of ``value`` that tells 0.0 from -0.0 and 1 from True."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_key, value))
    if isinstance(value, dict):
        return tuple((name, _key(one)) for name, one in value.items())
    if isinstance(value, (Node, torch.SymInt, torch.SymFloat, torch.SymBool)):
        return id(value)
    return type(value), repr(value)
