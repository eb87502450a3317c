# SPDX-License-Identifier: Apache-2.0
"""Replaces ops of a traced graph that return their argument although their schemas say that they make a tensor.

    dropout(x, p, False).add_(1)  ->  x.add_(1)             type_as(x, y).add_(1)  ->  to(x, y).add_(1)

Torch takes what such an op returns for new memory. A write to it is then no reason against folding what makes the
argument into a constant, which each call would write to: ``x = self.dropout(self.encoding.sin()); x += y``.
"""

from typing import Any

import torch

from blade.core.jit_nodes import nodes_of

_DROPOUTS = frozenset(
    f"aten::{name}"
    for name in ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
)


def show_identities(graph: torch._C.Graph) -> None:
    """Change ``graph`` in place, where such a result is written to."""
    nodes = [node for node in nodes_of(graph) if _is_identity(node)]
    while nodes:
        aliases: Any = graph.alias_db()
        written = [node for node in nodes if aliases.has_writers(node.output())]
        nodes = [node for node in nodes if node not in written] if written else []
        for node in written:
            if node.kind() == "aten::type_as":
                _convert(graph, node)
            else:
                node.output().replaceAllUsesWith(node.inputsAt(0))
                node.destroy()


def _is_identity(node: torch._C.Node) -> bool:
    if node.kind() == "aten::type_as":
        return True
    is_on: Any = node.inputsAt(2).toIValue() if node.kind() in _DROPOUTS else None
    return is_on is False


def _convert(graph: Any, node: Any) -> None:
    graph.setInsertPoint(node)
    no = graph.insertConstant(False)
    nothing = graph.insertConstant(None)
    made = graph.create("aten::to", [*node.inputs(), no, no, nothing], 1)
    graph.insertNode(made)
    made.output().copyMetadata(node.output())
    node.output().replaceAllUsesWith(made.output())
    node.destroy()
    graph.setInsertPoint(graph.block())
