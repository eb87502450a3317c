# SPDX-License-Identifier: Apache-2.0
"""Runs torch's passes on a graph without its constant tensors, which they would compare.

    with detached_constants(graph):
        torch._C._jit_pass_cse(graph)

torch compares the contents of any two constants of equal size; on a GPU each comparison launches a kernel
and waits for it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from blade.core.jit_nodes import nodes_of
from blade.graph.torchscript.program import TENSOR


@contextmanager
def detached_constants(graph: Any) -> Iterator[None]:
    """A context in which constants are inputs of ``graph``; afterwards they are the same constants again."""
    given = len(list(graph.inputs()))
    held: list[tuple[torch.Tensor, str]] = []
    for node in list(nodes_of(graph)):
        constant = node.output() if node.kind() == "prim::Constant" else None
        tensor: Any = None if constant is None else constant.toIValue()
        if constant is not None and isinstance(tensor, torch.Tensor):
            value = graph.addInput()
            value.setType(TENSOR)
            constant.replaceAllUsesWith(value)
            held.append((tensor, constant.debugName()))
            node.destroy()
    yield
    first = next(iter(graph.nodes()), None)  # no nodes: the graph returns a constant
    graph.setInsertPoint(first if held and first is not None else graph.block())
    for weight, name in held:
        value = list(graph.inputs())[given]
        placed = graph.insertConstant(weight.detach())  # one that requires a gradient raises
        placed.setType(TENSOR)
        value.replaceAllUsesWith(placed)
        graph.eraseInput(given)
        if not name.isdecimal():  # numeric names are assigned by the graph
            placed.setDebugName(name)
    graph.setInsertPoint(graph.block())
