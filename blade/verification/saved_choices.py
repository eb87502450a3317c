# SPDX-License-Identifier: Apache-2.0
"""What forward chooses by comparing floats and saves for backward: rounding decides where two nearly tie.

saved_choices(cluster.gm, saved)      # those outputs, by number: masks, and indices of pooling
"""

import operator
from collections.abc import Collection

import torch
from torch.fx import GraphModule, Node

aten = torch.ops.aten
_POOLS = (aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default)
_SAME_PLACES = (
    *(aten.permute.default, aten.clone.default, aten.detach.default, aten.alias.default),
    *(aten._to_copy.default, aten.sub.Tensor),  # in fewer bits (narrow_places.py)
)


def saved_choices(gm: GraphModule, saved: Collection[int]) -> frozenset[int]:
    """Return the numbers of the outputs among ``saved`` that are such choices."""
    if not saved:
        return frozenset()
    outputs = gm.graph.output_node().args[0]
    assert isinstance(outputs, (list, tuple))
    return frozenset(i for i in saved if _is_choice(outputs[i]))


def _is_choice(node: object) -> bool:
    if not isinstance(node, Node):
        return False
    if node.meta["val"].dtype is torch.bool:
        return True
    if node.meta["val"].dtype.is_floating_point:
        return False
    while node.target in _SAME_PLACES and len(node.all_input_nodes) == 1:
        [node] = node.all_input_nodes
    return node.target is operator.getitem and node.all_input_nodes[0].target in _POOLS
