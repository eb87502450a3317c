# SPDX-License-Identifier: Apache-2.0
"""Cut a joint graph into forward and backward with torch's min-cut, after four repairs and four passes.

Results that forward returns for backward alone are marked (``is_saved``): they are freed once backward has run.

The gradient of a batch norm in training takes the running statistics but does not read them. AOTAutograd
passes it the new statistics, which forward would then have to return as well as write to the module.

On a CPU a batch norm of 16-bit values with float32 weights saves its statistics in float32, and torch's function of
shapes and dtypes says 16 bits.

The gradient of attention takes the generator's state but does not read it without dropout. Forward would then
have to return uninitialized memory (of some CPU kernels) as that state.

The gradient of a maximum goes to the elements that equal it. A backward graph that computes these again, rounded
otherwise, finds none and divides by their number: it reads what forward computed.
"""

import operator
from collections.abc import Container, Iterable, Sequence
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from blade.dynamo.cse import eliminate_common_subexpressions
from blade.dynamo.fold_numbers import fold_numbers
from blade.dynamo.gradients_by_results import read_results
from blade.dynamo.index_tables import move_index_tables
from blade.dynamo.narrow_places import narrow_places
from blade.dynamo.recompute import fused_ops_known
from blade.dynamo.recomputed_norms import mark_norms, restore_norms, write_norms_out
from blade.dynamo.saved_layouts import save_channels_last
from blade.graph.shapes.shape_functions import with_wide_statistics

aten = torch.ops.aten
_SAVED = "blade_saved"
_ATTENTION = (
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
)
_EQUALITIES = (aten.eq.Tensor, aten.ne.Tensor)
_RUNNING = (3, 4)  # arguments of native_batch_norm_backward
_TRAIN = 7


def partition(
    joint: GraphModule, inputs: Sequence[Any], **kwargs: Any
) -> tuple[GraphModule, GraphModule]:
    """The ``partition_fn`` of ``aot_autograd``."""
    _forget_running_statistics(joint.graph)
    _widen_statistics(joint.graph)
    forget_states(joint.graph)
    fold_numbers(joint.graph)
    move_index_tables(joint.graph)  # one that is saved for the backward graph, too
    if functorch_config.cse:
        joint.graph.eliminate_dead_code()
        eliminate_common_subexpressions(joint.graph)
    read_results(joint.graph)
    save_compared(joint.graph, kwargs["num_fwd_outputs"])
    mark_norms(joint.graph)
    with functorch_config.patch(cse=False), fused_ops_known():
        forward, backward = min_cut_rematerialization_partition(joint, inputs, **kwargs)
    restore_norms(forward.graph)
    write_norms_out(backward.graph)
    for module in (forward, backward):
        module.recompile()
    narrow_places(forward, backward, kwargs["num_fwd_outputs"])
    save_channels_last(forward, backward, kwargs["num_fwd_outputs"])
    _mark_saved(forward.graph, kwargs["num_fwd_outputs"])
    return forward, backward


def save_compared(joint: Graph, count: int) -> None:
    """Let forward save what backward looks for equal elements in. ``count``: number of results of forward."""
    returned = joint.output_node().args[0]
    assert isinstance(returned, (list, tuple))
    forward = _with_ancestors(node for node in returned[:count] if isinstance(node, Node))
    compared = (
        operand
        for node in joint.nodes
        if node.target in _EQUALITIES and node not in forward
        for operand in node.all_input_nodes
    )
    for node in _with_ancestors(compared, above=forward):
        if node in forward and _holds_floats(node):
            [made] = node.all_input_nodes if node.target is operator.getitem else [node]
            made.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _holds_floats(node: Node) -> bool:
    value = node.meta["val"]
    held = value if isinstance(value, (list, tuple)) else (value,)
    return any(isinstance(one, torch.Tensor) and one.is_floating_point() for one in held)


def _with_ancestors(nodes: Iterable[Node], above: Container[Node] = ()) -> set[Node]:
    """``nodes`` and all that they are computed from; nothing that the ones in ``above`` are computed from."""
    found: set[Node] = set()
    left = list(nodes)
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += () if node in above else node.all_input_nodes
    return found


def is_saved(node: Node) -> bool:
    """Whether ``node`` of a forward graph is returned for the backward graph only."""
    return _SAVED in node.meta


def _mark_saved(forward: Graph, count: int) -> None:
    """``count``: number of results of the model, which come first."""
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


def _widen_statistics(graph: Graph) -> None:
    for node in graph.nodes:
        if node.target is not aten._native_batch_norm_legit_functional.default:
            continue
        x, weight = node.args[:2]
        weight = weight.meta["val"] if isinstance(weight, Node) else None
        node.meta["val"] = with_wide_statistics(node.meta["val"], x.meta["val"], weight)
        for user in node.users:
            user.meta["val"] = node.meta["val"][user.args[1]]


def forget_states(graph: Graph) -> None:
    """Pass zeros as the generator's state to the gradient of attention without dropout."""
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
