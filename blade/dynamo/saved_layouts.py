# SPDX-License-Identifier: Apache-2.0
"""Images that forward saves for backward cross with their channels last, as convolutions compute them.

    forward:  return ..., relu                  ->   return ..., clone(permute(relu, [0, 2, 3, 1]))
    backward: convolution_backward(.., relu)    ->   convolution_backward(.., clone(permute(saved, [0, 3, 1, 2])))

Engines hold images with channels last and torch's graph says otherwise: forward would reorder every one of them, and
backward would read them in the other order. In engines the copies above are none.

Rows cross as rows on a GPU, for the same reason. The sum of what a convolution made of patches and an embedding keeps
the convolution's order of axes, and so do all sums of that stream after it; the norms that read it take it row by row.
"""

from collections.abc import Mapping, Sequence

import torch
from torch.fx import Graph, GraphModule, Node

from blade.backends.disc.frontend.ops import activation, activation_backward, pointwise
from blade.backends.disc.ir.convolution import to_channels_first, to_channels_last
from blade.core.dtypes import HALVES
from blade.dynamo.recompute import packets_of
from blade.graph.shapes.fake_tensors import layout_at_hints

aten = torch.ops.aten
Order = tuple[int, ...]

_CONVOLUTION = aten.convolution.default
_POINTWISE = (
    activation,
    activation_backward,
    pointwise,
)  # torch tags not all, and fewer before 2.13
_SAME_IMAGE = (  # beside pointwise ops
    aten._native_batch_norm_legit_functional.default,
    aten._to_copy.default,
    aten.alias.default,
    aten.avg_pool2d.default,
    aten.cat.default,
    aten.constant_pad_nd.default,
    aten.detach.default,
    aten.max_pool2d_with_indices.default,
    aten.native_dropout.default,
    aten.native_batch_norm.default,
    aten.native_group_norm.default,
    aten.upsample_bilinear2d.vec,
    aten.upsample_nearest2d.vec,
)
_NORM_GRADIENTS = (aten.native_layer_norm_backward.default, aten._fused_rms_norm_backward.default)
_RANKS = (3, 4, 5)
_GROUPS = 9  # argument of convolution_backward


def save_channels_last(forward: GraphModule, backward: GraphModule, num_outputs: int) -> None:
    """Reorder, in both graphs, the images that ``forward`` returns behind its ``num_outputs`` results."""
    images = _images(forward.graph)
    images |= {n for image in images for n in _operands(image)}
    into = {n.name: n for n in backward.graph.nodes if n.op == "placeholder"}
    output = forward.graph.output_node()
    (returned,) = output.args
    assert isinstance(returned, (list, tuple))
    results, saved = returned[:num_outputs], returned[num_outputs:]
    made: dict[Node, Node] = {}
    read: dict[Node, tuple[Node, Order, Order]] = {}
    for node in saved:
        if not isinstance(node, Node) or node in results or node in made:
            continue
        if node.name not in into or not (reader := into[node.name]).users:
            continue
        rank = node.meta["val"].dim() if isinstance(node.meta["val"], torch.Tensor) else 0
        if node in images:
            if _is_row_major(node) and not _is_read_in_groups(reader):
                made[node] = _save_reordered(forward.graph, node, to_channels_last(rank))
                read[reader] = made[node], to_channels_first(rank), tuple(range(rank))
        elif order := _order_of_turned_rows(node, reader):
            made[node] = _save_reordered(forward.graph, node, tuple(range(rank)))
            read[reader] = made[node], order, tuple(map(order.index, range(rank)))
    if not made:
        return
    _read_reordered(backward.graph, read)
    crossing = [made.get(node, node) if isinstance(node, Node) else node for node in saved]
    output.args = ((*results, *crossing),)
    for module in (forward, backward):
        module.recompile()


def _images(graph: Graph) -> set[Node]:
    """Results of convolutions, and what has their shape or is pooled, resized or joined of them."""
    found: set[Node] = set()
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.target is _CONVOLUTION:
            found.update([node] if _has_channels_last(value) else [])
        elif node.target in _SAME_IMAGE:
            found.update([node] if found & set(node.all_input_nodes) else [])
        elif isinstance(value, torch.Tensor) and any(
            _is_like(node, one) for one in node.all_input_nodes if one in found
        ):
            found.add(node)
    return found


def _operands(node: Node) -> list[Node]:
    """What a convolution reads, if the graph computes it: its image, and a weight of another dtype."""
    if node.target is not _CONVOLUTION:
        return []
    return [n for n in node.all_input_nodes[:2] if n.op != "placeholder"]


def _has_channels_last(image: torch.Tensor) -> bool:
    """Whether engines compute the gradients of such a convolution with channels last."""
    if _is_on_cpu(image):
        return image.dtype == torch.float32 and image.dim() > 3
    return image.dtype in HALVES


def _is_on_cpu(value: torch.Tensor) -> bool:
    return value.device.type == "cpu"


def _is_read_in_groups(saved: Node) -> bool:
    """Whether the gradient of a convolution in groups reads ``saved``: on a CPU it takes images as they lie."""
    return _is_on_cpu(saved.meta["val"]) and any(
        user.target is aten.convolution_backward.default and user.args[_GROUPS] != 1
        for user in saved.users
    )


def _is_like(node: Node, image: Node) -> bool:
    """Whether ``node`` is computed element by element from ``image``, or is one of its results."""
    if isinstance(image.meta["val"], (list, tuple)):
        return True
    return _is_pointwise(node.target) and node.meta["val"].shape == image.meta["val"].shape


def _is_pointwise(target: object) -> bool:
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return torch.Tag.pointwise in target.tags or target._overloadpacket in packets_of(_POINTWISE)


def _is_row_major(node: Node) -> bool:
    """Whether ``node`` is an image whose elements lie channel by channel."""
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor) or value.dim() not in _RANKS:
        return False
    long = all(isinstance(n, torch.SymInt) or n > 1 for n in value.shape[1:])
    return long and layout_at_hints(value).is_contiguous()


def _order_of_turned_rows(node: Node, saved: Node) -> Order | None:
    """The order in memory of the axes of ``node``, rows that a norm's gradient reads, unless it is their own."""
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor) or value.dim() not in _RANKS or _is_on_cpu(value):
        return None
    if not _is_pointwise(node.target) or not all(map(_takes_rows, saved.users)):
        return None
    if not any(user.target in _NORM_GRADIENTS for user in saved.users):
        return None
    here = layout_at_hints(value)
    order = tuple(sorted(range(value.dim()), key=lambda k: -here.stride()[k]))
    if here.stride(-1) == 1 or not here.permute(order).is_contiguous():
        return None
    return order


def _takes_rows(user: Node) -> bool:
    return user.target in _NORM_GRADIENTS or _is_pointwise(user.target)


def _save_reordered(graph: Graph, node: Node, order: Order) -> Node:
    # at once: without engines, what lies in the original order is free early
    with graph.inserting_before(node.next):
        return _reordered(graph, node, order)


def _read_reordered(graph: Graph, saved: Mapping[Node, tuple[Node, Order, Order]]) -> None:
    """Put before their first readers what the placeholders were before they were reordered: as they are now, in an
    order of axes of which a copy is made, and in another one that views it."""
    place = {node: k for k, node in enumerate(graph.nodes)}
    for node, (new, order, view) in saved.items():
        users = sorted(node.users, key=place.__getitem__)
        node.meta["val"] = new.meta["val"]
        with graph.inserting_before(users[0]):
            made = _reordered(graph, node, order)
            if view != tuple(range(len(view))):
                made = _permuted(graph, made, view)
        for user in users:
            user.replace_input_with(node, made)


def _reordered(graph: Graph, node: Node, order: Sequence[int]) -> Node:
    """A row-major tensor with the axes of ``node`` in another order."""
    view = _permuted(graph, node, order)
    made = graph.call_function(
        aten.clone.default, (view,), {"memory_format": torch.contiguous_format}
    )
    made.meta["val"] = view.meta["val"].clone(memory_format=torch.contiguous_format)
    return made


def _permuted(graph: Graph, node: Node, order: Sequence[int]) -> Node:
    view = graph.call_function(aten.permute.default, (node, list(order)))
    view.meta["val"] = node.meta["val"].permute(order)
    return view
