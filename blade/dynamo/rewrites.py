# SPDX-License-Identifier: Apache-2.0
"""Rewrites of a functional graph that let more of it be one cluster.

Dropout draws its mask as ``bernoulli(empty_like(x))``, which needs only the sizes of ``x``. Rewritten as
``empty_strided`` of these sizes, all masks are drawn before a cluster, in their original order, and do not
split it. Values stay bit-identical.

Attention on a GPU arrives as the kernel that torch chose at the sample's sizes, with additional results for
its gradient. If these are unused, it becomes ``scaled_dot_product_attention`` again, which every backend may
implement.

A write to an input that the graph returns is an update in a cluster, and what is returned the input.

Indices that are computed on the CPU move to the GPU that reads them (``index_tables``). Numbers that follow from
constants there become constants (``fold_numbers``).
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from blade.dynamo.fold_numbers import fold_numbers
from blade.dynamo.index_tables import move_index_tables
from blade.graph.fx.random_ops import may_draw

aten = torch.ops.aten
_ATTENTION = (
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
)


def apply_rewrites(graph: Graph) -> None:
    """Change ``graph`` in place."""
    known = {
        node.meta["val"].node.expr: node
        for node in graph.nodes
        if node.op == "placeholder" and isinstance(node.meta.get("val"), torch.SymInt)
    }
    for node in list(graph.nodes):
        if node.target is aten.empty_like.default:
            _of_sizes(graph, node, known)
        elif node.target is aten.copy_.default:
            _return_what_is_written(node)
        elif node.target in _ATTENTION:
            _only_attention(graph, node)
    fold_numbers(graph)
    move_index_tables(graph)
    # even an unused draw advances the generator
    graph.eliminate_dead_code(lambda node: node.is_impure() or may_draw(node))


def _return_what_is_written(write: Node) -> None:
    """Return the input itself, not the result of the write to it, which is the same tensor.

    A model that assigns its cache to an attribute of its own returns it to Dynamo.
    """
    into = write.args[0]
    if isinstance(into, Node) and into.op == "placeholder":
        for user in list(write.users):
            if user.op == "output":
                user.replace_input_with(write, into)


def _of_sizes(graph: Graph, node: Node, known: dict[Any, Node]) -> None:
    """``empty_like(x)`` -> ``empty_strided``, if its sizes are numbers or inputs of the graph."""
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


def _only_attention(graph: Graph, node: Node) -> None:
    """Replace attention by the op that chooses a kernel itself, if only its first result is used."""
    taken = list(node.users)
    if any(user.target is not operator.getitem or user.args[1] != 0 for user in taken):
        return
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    if given.get("dropout_p", 0.0) != 0.0 or given.get("return_debug_mask", False):
        return
    query, key, value = (given[name] for name in ("query", "key", "value"))
    how = {
        "attn_mask": given.get("attn_bias"),
        "is_causal": given.get("is_causal", False),
        "scale": given.get("scale"),
        "enable_gqa": query.meta["val"].shape[1] != key.meta["val"].shape[1],
    }
    for user in taken:
        with graph.inserting_before(user):
            made = graph.call_function(
                aten.scaled_dot_product_attention.default, (query, key, value), how
            )
        made.meta = dict(user.meta)
        user.replace_all_uses_with(made)
        graph.erase_node(user)
    graph.erase_node(node)


def _numbers(sizes: Sequence[Any], known: dict[Any, Node]) -> list[Any] | None:
    """``sizes`` as plain numbers or inputs of the graph; ``None`` if one is neither."""
    found: list[Any] = []
    for size in sizes:
        if not isinstance(size, torch.SymInt) or size.node.expr.is_number:
            found.append(int(size))
        elif size.node.expr in known:
            found.append(known[size.node.expr])
        else:
            return None
    return found
