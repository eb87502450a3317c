# SPDX-License-Identifier: Apache-2.0
"""Places of maxima that pooling saves for backward cross in 16 bits where the image allows it, else in 32.

    y, places = max_pool2d_with_indices(x, [2, 2])             i64, four times the memory of y in 16 bits
    max_pool2d_with_indices_backward(g, x, .., places)

    ->  saved = _to_copy(places - 32768, int16)
        max_pool2d_with_indices_backward(g, x, .., _to_copy(saved, int64) + 32768)

Engines convert where they compute the maxima and where they read their places. ATen's kernels on a CPU take 64 bits.
"""

import math
import operator

import torch
from torch.fx import Graph, GraphModule, Node

aten = torch.ops.aten
_HALF = 1 << 15  # numbers of int16 on each side of 0


def narrow_places(forward: GraphModule, backward: GraphModule, num_outputs: int) -> None:
    """Narrow, in both graphs, the places that ``forward`` returns behind its ``num_outputs`` results."""
    into = {n.name: n for n in backward.graph.nodes if n.op == "placeholder"}
    (returned,) = forward.graph.output_node().args
    assert isinstance(returned, (list, tuple))
    for node in dict.fromkeys(returned[num_outputs:]):
        image = _image_of(node)
        if image is None or _is_on_cpu(image) or node.name not in into:
            continue
        if node not in returned[:num_outputs]:
            _cross(forward.graph, node, backward.graph, into[node.name], image)
    for module in (forward, backward):
        module.recompile()


def _image_of(node: object) -> torch.Tensor | None:
    """What was pooled, if ``node`` is where its maxima lie."""
    if not isinstance(node, Node) or node.target is not operator.getitem or node.args[1] != 1:
        return None
    pool = node.args[0]
    assert isinstance(pool, Node)
    if pool.target is not aten.max_pool2d_with_indices.default:
        return None
    image: torch.Tensor = pool.all_input_nodes[0].meta["val"]
    return image


def _is_on_cpu(image: torch.Tensor) -> bool:
    return image.device.type == "cpu"


def _cross(forward: Graph, places: Node, backward: Graph, saved: Node, image: torch.Tensor) -> None:
    """Return ``places`` of ``forward``, which ``backward`` takes as ``saved``, in fewer bits."""
    pixels = image.shape[-2:]
    known = all(isinstance(size, int) for size in pixels)
    is_short = known and math.prod(pixels) <= 2 * _HALF
    shift = _HALF if is_short and math.prod(pixels) > _HALF else 0
    with forward.inserting_before(places):
        given = forward.call_function(operator.getitem, places.args)
        given.meta = dict(places.meta)
        places.replace_all_uses_with(given, delete_user_cb=lambda user: user.op != "output")
        given = _made(forward, aten.sub.Tensor, given, shift) if shift else given
    # the node stays: backward knows it by its name
    dtype = torch.int16 if is_short else torch.int32
    places.target, places.args, places.kwargs = aten._to_copy.default, (given,), {"dtype": dtype}
    places.meta["val"] = saved.meta["val"] = given.meta["val"].to(dtype)
    readers = list(saved.users)
    if readers:
        order = {node: k for k, node in enumerate(backward.nodes)}
        with backward.inserting_before(min(readers, key=order.__getitem__)):
            wide = _converted(backward, saved, torch.int64)
            wide = _made(backward, aten.add.Tensor, wide, shift) if shift else wide
        for reader in readers:
            reader.replace_input_with(saved, wide)


def _converted(graph: Graph, node: Node, dtype: torch.dtype) -> Node:
    made = graph.call_function(aten._to_copy.default, (node,), {"dtype": dtype})
    made.meta["val"] = node.meta["val"].to(dtype)
    return made


def _made(graph: Graph, target: torch._ops.OpOverload, node: Node, number: int) -> Node:
    made = graph.call_function(target, (node, number))
    made.meta["val"] = target(node.meta["val"], number)
    return made
