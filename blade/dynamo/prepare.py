# SPDX-License-Identifier: Apache-2.0
"""A rewrite of a functional graph that lets more of it be one cluster; values stay bit for bit.

Dropout draws its mask as ``bernoulli(empty_like(x))``: that needs the sizes of ``x`` and not ``x``. Written
as ``empty_strided`` of these sizes, all masks can be drawn before a cluster, in the same order as ever, and do
not cut it in two.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

aten = torch.ops.aten


def prepare(graph: Graph) -> None:
    """Change ``graph`` in place."""
    known = {
        node.meta["val"].node.expr: node
        for node in graph.nodes
        if node.op == "placeholder" and isinstance(node.meta.get("val"), torch.SymInt)
    }
    for node in list(graph.nodes):
        if node.target is aten.empty_like.default:
            _of_sizes(graph, node, known)
    graph.eliminate_dead_code(lambda node: node.is_impure() or _draws(node))


def _draws(node: Node) -> bool:
    """A draw nobody uses still moves the generator on."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _of_sizes(graph: Graph, node: Node, known: dict[Any, Node]) -> None:
    """``empty_like(x)`` -> ``empty_strided``, if its sizes are there before anything is computed."""
    fake = node.meta["val"]
    sizes, strides = _numbers(fake.shape, known), _numbers(fake.stride(), known)
    if sizes is None or strides is None:
        return
    form = {"dtype": fake.dtype, "device": fake.device}
    with graph.inserting_before(node):
        made = graph.call_function(aten.empty_strided.default, (sizes, strides), form)
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def _numbers(sizes: Sequence[Any], known: dict[Any, Node]) -> list[Any] | None:
    """As plain numbers, or inputs of the graph; ``None`` if one is neither."""
    found: list[Any] = []
    for size in sizes:
        if not isinstance(size, torch.SymInt) or size.node.expr.is_number:
            found.append(int(size))
        elif size.node.expr in known:
            found.append(known[size.node.expr])
        else:
            return None
    return found
