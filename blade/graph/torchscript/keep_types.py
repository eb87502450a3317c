# SPDX-License-Identifier: Apache-2.0
"""Writes the type of what a branch returns where TorchScript's file would lose it.

    if bool(c):                                    if bool(c):
        z = (x, y)                     ->              z = annotate(List[Any], [(x, y)])[0]
    else:                                          else:
        z = (x, y, x)                                  z = annotate(List[Any], [(x, y, x)])[0]

Both are of type Any, since that is what ``forward`` is said to return. The source that ``torch.jit.save`` writes does
not say so, and ``torch.jit.load`` refuses it, as the branches have different types.
"""

from __future__ import annotations

from typing import Any

import torch

from blade.core.jit_nodes import blocks_of, nodes_of, outputs_of
from blade.graph.torchscript.insert import Inserter


def keep_types(graph: torch._C.Graph) -> None:
    """Rewrite the branches of ``graph`` in place, nested ones included."""
    for node in list(nodes_of(graph)):
        if node.kind() != "prim::If":
            continue
        for index, output in enumerate(outputs_of(node)):
            if output.type().kind() == "AnyType":
                for branch in blocks_of(node):
                    _widen(graph, branch.returnNode(), index, output.type())


def _widen(graph: torch._C.Graph, end: Any, index: int, any_type: torch._C.JitType) -> None:
    """Give what the return node ``end`` of a branch returns at ``index`` the type of the other branch."""
    value = end.inputsAt(index)
    if value.type().kind() != any_type.kind():
        end.replaceInput(index, Inserter(graph, end).widened(value, any_type))
