# SPDX-License-Identifier: Apache-2.0
"""Rewrites of a functional graph that let more of it be one cluster; values stay bit for bit.

Dropout draws its mask as ``bernoulli(empty_like(x))``: that needs the sizes of ``x`` and not ``x``. Written
as ``empty`` of these sizes, all masks can be drawn before a cluster, in the same order as ever, and do not
cut it in two.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

aten = torch.ops.aten


def prepare(graph: Graph) -> None:
    """Change ``graph`` in place."""
    for node in list(graph.nodes):
        rewrite = _REWRITES.get(node.target)
        if rewrite is not None:
            rewrite(graph, node)
    graph.eliminate_dead_code(lambda node: node.is_impure() or _draws(node))


def _draws(node: Node) -> bool:
    """A draw nobody uses still moves the generator on."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags


def _empty(graph: Graph, node: Node) -> None:
    """``empty_like(x)`` -> ``empty_strided`` of sizes that come from graph inputs."""
    fake = node.meta["val"]
    numbers = _numbers(graph, node, (*fake.shape, *fake.stride()))
    if numbers is None:
        return
    rank = fake.dim()
    form = {"dtype": fake.dtype, "device": fake.device}
    with graph.inserting_before(node):
        made = graph.call_function(
            aten.empty_strided.default, (numbers[:rank], numbers[rank:]), form
        )
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def _numbers(graph: Graph, before: Node, sizes: Sequence[Any]) -> list[Any] | None:
    """``sizes`` as numbers or nodes that are there before anything is computed."""
    known = {
        node.meta["val"].node.expr: node
        for node in graph.nodes
        if node.op == "placeholder" and isinstance(node.meta.get("val"), torch.SymInt)
    }
    found: list[Any] = []
    for size in sizes:
        if isinstance(size, torch.SymInt) and not size.node.expr.is_number:
            if size.node.expr not in known:
                return None
            found.append(known[size.node.expr])
        else:
            found.append(int(size))
    return found


def _native_dropout(graph: Graph, node: Node) -> None:
    """``native_dropout(x, p)`` -> the draw it makes, and the arithmetic."""
    x, p, train = node.args
    fake = x.meta["val"]  # type: ignore[union-attr]
    numbers = _numbers(graph, node, (*fake.shape, *fake.stride()))
    if numbers is None or not train or not isinstance(p, float) or not 0 < p < 1:
        return
    parts = {user.args[1]: user for user in node.users}
    values = node.meta["val"]
    rank = fake.dim()
    with graph.inserting_before(node):
        blank = _made(
            graph,
            aten.empty_strided.default,
            (numbers[:rank], numbers[rank:]),
            values[1],
            dtype=torch.bool,
            device=fake.device,
        )
        mask = _made(graph, aten.bernoulli.p, (blank, 1 - p), values[1])
        kept = _made(graph, aten.mul.Tensor, (x, mask), values[0])
        scaled = _made(graph, aten.mul.Tensor, (kept, 1 / (1 - p)), values[0])
    for k, made in enumerate((scaled, mask)):
        if k in parts:
            parts[k].replace_all_uses_with(made)
            graph.erase_node(parts[k])
    graph.erase_node(node)


def _made(graph: Graph, target: Any, args: tuple[Any, ...], value: Any, **kwargs: Any) -> Node:
    node = graph.call_function(target, args, kwargs)
    node.meta["val"] = value
    return node


_REWRITES: dict[Any, Callable[[Graph, Node], None]] = {
    aten.empty_like.default: _empty,
    aten.native_dropout.default: _native_dropout,
}
