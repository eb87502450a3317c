# SPDX-License-Identifier: Apache-2.0
"""Ops that draw random numbers become calls of torch's ops, with torch's default generator.

    %4 = call %3 {target=aten.native_dropout, .., draw=0}
    %9 = call %8 %4 {target=aten.native_dropout, .., draw=1}     after %4, which is no argument of the op

So the same seed draws the same numbers as in the original. Equal draws are separate values, draws run even
if their results are unused, because they advance the generator, and all run in the order of the graph.
"""

from collections.abc import Sequence
from typing import Any

import torch

from blade.core.cluster import OpNode, values_in
from blade.graph.fx.random_ops import DRAWING, QUIET

aten = torch.ops.aten
# Gradients draw nothing: they receive the generator's state of the forward draw.
_REDRAWING = (aten._scaled_dot_product_cudnn_attention_backward.default,)
# Ops whose CUDA kernels read the generator's state from where a CUDA graph puts it, and store nothing on the CPU.
# Flash and memory-efficient attention store the generator's state on the CPU unless they are captured.
_IN_GRAPHS = (*DRAWING, aten._scaled_dot_product_cudnn_attention.default)


def draws(target: Any, args: Sequence[Any]) -> bool:
    """Whether ``target`` draws with ``args``, all of its arguments in the schema's order."""
    if torch.Tag.nondeterministic_seeded not in target.tags or target in _REDRAWING:
        return False
    pairs = zip(target._schema.arguments, args, strict=True)
    return not any(arg in QUIET[a.name] for a, arg in pairs if a.name in QUIET)


def may_draw(node: OpNode) -> bool:
    """Whether a program may call the op of ``node``, which is tagged as random."""
    if node.target in _REDRAWING:
        return True
    tensors = (*values_in((*node.args, *node.kwargs.values())), *node.outputs)
    devices = {v.device.type for v in tensors if v.kind == "tensor" and v.device is not None}
    return node.target in _IN_GRAPHS and devices == {"cuda"}
