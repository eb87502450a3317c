# SPDX-License-Identifier: Apache-2.0
"""Rid the ops of a frozen graph of the calls that they were inlined from.

Freezing frees the methods of its copies of submodules, which inlined nodes refer to: where one of them raises, torch
looks for the method's name in freed memory (2.11 and 2.13: a segmentation fault).
"""

from typing import Any

import torch

from blade.core.jit_nodes import outputs_of
from blade.graph.torchscript.program import nested


def forget_calls(graph: torch._C.Graph) -> None:
    """Write the ops of ``graph`` anew, in place. Nodes with blocks stay, as they never raise themselves."""
    own: Any = graph
    for node in [*own.nodes(), *(inner for one in own.nodes() for inner in nested(one))]:
        is_op = not node.kind().startswith("prim::") or node.kind() == "prim::RaiseException"
        if not is_op or list(node.blocks()):
            continue
        copied = own.create(node.kind(), list(node.inputs()), node.outputsSize())
        copied.copyAttributes(node)
        copied.insertBefore(node)
        for old, new in zip(outputs_of(node), outputs_of(copied), strict=True):
            new.copyMetadata(old)
            old.replaceAllUsesWith(new)
        node.destroy()
