# SPDX-License-Identifier: Apache-2.0
"""Where a joint graph is cut into forward and backward: torch's min-cut, after two repairs and a pass of our own.

What forward returns for backward alone is marked (``is_saved``): nobody holds it longer than until backward ran.

The gradient of a batch norm in training takes the running statistics and does not look at them. What AOTAutograd
hands it are the new ones, which forward then would have to return beside writing them to the module.

The gradient of attention takes the state that the generator had, and does not look at it where nothing was dropped.
Forward would have to return what is no state then: memory nobody wrote to, some kernels' on the CPU.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import Graph, GraphModule, Node

from blade.dynamo.share import share_equal

aten = torch.ops.aten
_SAVED = "blade_saved"
_ATTENTION = (
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
)
_RUNNING = (3, 4)  # arguments of native_batch_norm_backward
_TRAIN = 7


def partition(
    joint: GraphModule, inputs: Sequence[Any], **kwargs: Any
) -> tuple[GraphModule, GraphModule]:
    """What ``aot_autograd`` takes for its ``partition_fn``."""
    _forget_running_statistics(joint.graph)
    forget_states(joint.graph)
    if functorch_config.cse:
        joint.graph.eliminate_dead_code()
        share_equal(joint.graph)
    with functorch_config.patch(cse=False):
        forward, backward = min_cut_rematerialization_partition(joint, inputs, **kwargs)
    _mark_saved(forward.graph, kwargs["num_fwd_outputs"])
    return forward, backward


def is_saved(node: Node) -> bool:
    """Whether ``node``, of a forward graph, is returned for the backward graph and to nobody else."""
    return _SAVED in node.meta


def _mark_saved(forward: Graph, count: int) -> None:
    """``count``: results of the model, which come first."""
    returned = forward.output_node().args[0]
    assert isinstance(returned, (list, tuple))
    seen = set(returned[:count])
    for node in returned[count:]:
        if isinstance(node, Node) and node not in seen:
            node.meta[_SAVED] = True


def _forget_running_statistics(graph: Graph) -> None:
    for node in graph.nodes:
        if node.target is aten.native_batch_norm_backward.default and node.args[_TRAIN]:
            for k in _RUNNING:
                node.update_arg(k, None)


def forget_states(graph: Graph) -> None:
    """Attention that drops nothing hands zeros to its gradient for the state of the generator."""
    for node in list(graph.nodes):
        if node.target not in _ATTENTION:
            continue
        names = [a.name for a in node.target._schema.arguments]
        given = dict(zip(names, node.args, strict=False))
        if given["dropout_p"] != 0:
            continue
        query = given["query"].meta["val"]
        for name in ("philox_seed", "philox_offset"):
            node.update_arg(names.index(name), _zero(graph, node, query))


def _zero(graph: Graph, before: Node, query: torch.Tensor) -> Node:
    form: dict[str, Any] = {"dtype": torch.int64, "device": query.device, "pin_memory": False}
    with graph.inserting_before(before):
        made = graph.call_function(aten.full.default, ([], 0), form)
    made.meta = {**before.meta, "val": query.new_zeros((), dtype=torch.int64)}
    return made
