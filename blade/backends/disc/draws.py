# SPDX-License-Identifier: Apache-2.0
"""Ops that draw random numbers, as calls of a program: torch's own, from its default generator.

    %4 = call %3 {target=aten.native_dropout, .., draw=0}
    %9 = call %8 %4 {target=aten.native_dropout, .., draw=1}     after %4, which it does not take

So the same seed draws what the original draws. Each draw is a value of its own, however equal to another; it runs
although nobody may read it, for the generator's sake; and all run in the order of the graph.
"""

from collections.abc import Sequence
from typing import Any

import torch

from blade.backends.arguments import DRAWING, QUIET
from blade.backends.base import OpNode, values_in

aten = torch.ops.aten
# A gradient draws nothing: it is given what the generator was when the numbers were drawn.
_REDRAWING = (aten._scaled_dot_product_cudnn_attention_backward.default,)
# Ops whose CUDA kernels read the generator's state where a graph of CUDA puts it, and leave nothing on the CPU:
# flash and memory-efficient attention keep the state of the generator there, unless they are captured.
_IN_GRAPHS = (*DRAWING, aten._scaled_dot_product_cudnn_attention.default)


def draws(target: Any, args: Sequence[Any]) -> bool:
    """Whether ``target`` draws with ``args``, which are all of its arguments in the schema's order."""
    if torch.Tag.nondeterministic_seeded not in target.tags or target in _REDRAWING:
        return False
    pairs = zip(target._schema.arguments, args, strict=True)
    return not any(arg in QUIET[a.name] for a, arg in pairs if a.name in QUIET)


def may_draw(node: OpNode) -> bool:
    """Whether a program may call the op of ``node``, which is marked as one that draws."""
    if node.target in _REDRAWING:
        return True
    tensors = (*values_in((*node.args, *node.kwargs.values())), *node.outputs)
    devices = {v.device.type for v in tensors if v.kind == "tensor" and v.device is not None}
    return node.target in _IN_GRAPHS and devices == {"cuda"}
