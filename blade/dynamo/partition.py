# SPDX-License-Identifier: Apache-2.0
"""Where a joint graph is cut into forward and backward: torch's min-cut, after one repair.

The gradient of a batch norm in training takes the running statistics and does not look at them. What AOTAutograd
hands it are the new ones, which forward then would have to return beside writing them to the module.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import Graph, GraphModule

_RUNNING = (3, 4)  # arguments of native_batch_norm_backward
_TRAIN = 7


def partition(
    joint: GraphModule, inputs: Sequence[Any], **kwargs: Any
) -> tuple[GraphModule, GraphModule]:
    """What ``aot_autograd`` takes for its ``partition_fn``."""
    _forget_running_statistics(joint.graph)
    return min_cut_rematerialization_partition(joint, inputs, **kwargs)


def _forget_running_statistics(graph: Graph) -> None:
    for node in graph.nodes:
        if node.target is torch.ops.aten.native_batch_norm_backward.default and node.args[_TRAIN]:
            for k in _RUNNING:
                node.update_arg(k, None)
