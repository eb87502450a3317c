# SPDX-License-Identifier: Apache-2.0
"""Turns constant lists of tensors (weights of recurrent layers, indices of ``x[:, i, j]``, in frozen
graphs) into lists of constants.

    %w : Tensor[] = prim::Constant[value=[<Tensors>]]()
    ->  %a : Tensor = prim::Constant ...;  %w : Tensor[] = prim::ListConstruct(%a, %b, ...)

All later stages expect weights as constants of type Tensor.
"""

from __future__ import annotations

from typing import Any

import torch

from blade.core.jit_nodes import nodes_of
from blade.graph.torchscript.program import is_tensor_type


def unpack_constant_lists(graph: torch._C.Graph) -> None:
    """Rewrite ``graph`` and its nested blocks in place. The tensors stay the same objects."""
    for node in list(nodes_of(graph)):
        if node.kind() == "prim::Constant" and _is_list_of_tensors(node.output().type()):
            _unpack(graph, node)


def _is_list_of_tensors(kind: torch._C.JitType) -> bool:
    return kind.kind() == "ListType" and is_tensor_type(kind.getElementType())


def _unpack(graph: torch._C.Graph, node: torch._C.Node) -> None:
    graph.setInsertPoint(node)
    tensors: Any = node.output().toIValue()
    plain = [None if t is None else t.detach() for t in tensors]
    constants = [graph.insertConstant(tensor) for tensor in plain]  # type: ignore[attr-defined]
    made = graph.create("prim::ListConstruct", constants, 1)
    graph.insertNode(made)
    made.output().setType(node.output().type())
    node.output().replaceAllUsesWith(made.output())
    node.destroy()
    graph.setInsertPoint(graph.block())
