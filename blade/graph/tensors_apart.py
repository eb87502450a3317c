# SPDX-License-Identifier: Apache-2.0
"""A graph without its constant tensors, for passes of torch that would compare them.

    with tensors_apart(graph):
        torch._C._jit_pass_cse(graph)

Torch compares the contents of every two constants of one size; on a GPU in a kernel each time, and waits for it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from blade.graph.lists import nodes_of
from blade.graph.program import TENSOR


@contextmanager
def tensors_apart(graph: Any) -> Iterator[None]:
    """They are inputs of ``graph`` meanwhile, and then constants at its beginning, the same objects."""
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
    graph.setInsertPoint(next(iter(graph.nodes())) if held else graph.block())
    for weight, name in held:
        value = list(graph.inputs())[given]
        placed = graph.insertConstant(weight)
        placed.setType(TENSOR)
        value.replaceAllUsesWith(placed)
        graph.eraseInput(given)
        if not name.isdecimal():  # a number is given by the graph
            placed.setDebugName(name)
    graph.setInsertPoint(graph.block())
