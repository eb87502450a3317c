# SPDX-License-Identifier: Apache-2.0
"""Residual sums that read the residual as bytes, since another layer needs it as bytes anyway.

    y = relu(conv(q) + x)          x and y are quantized for other layers: the sum also reads x's bytes

The block then stores no floats: the sum is part of the product, and no other op reads ``x`` as floats.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch.fx import GraphModule, Node

if TYPE_CHECKING:
    from blade.backends.quant.analysis.layers import Layer
    from blade.backends.quant.analysis.simulate import Scheme

aten = torch.ops.aten
_ACTIVATIONS = (
    aten.relu.default,
    aten.hardtanh.default,
    aten.hardswish.default,
    aten.silu.default,
    aten.gelu.default,
)


def residuals(
    gm: GraphModule, layers: "Iterable[Layer]", schemes: "Mapping[str, Scheme]"
) -> "dict[str, tuple[int, Scheme]]":
    """Name of a sum -> (the operand to read as bytes, the scheme of an earlier layer that reads it)."""
    static = {
        layer.node: (layer, schemes[layer.name])
        for layer in layers
        if layer.name in schemes
        and schemes[layer.name].activation is not None
        and schemes[layer.name].narrow is None
    }
    quantized = {layer.x for layer, _ in static.values()}
    known: dict[Node, Scheme] = {}
    found: dict[Node, tuple[Node, int, Scheme]] = {}
    for node in gm.graph.nodes:
        if node in static:
            layer, scheme = static[node]
            known.setdefault(layer.x, scheme)
        place = _residual(node, static, known) if _is_quantized(node, quantized) else None
        if place is not None:
            x = node.args[place]
            found[node] = x, place, known[x]
    return {
        node.name: (place, scheme)
        for node, (x, place, scheme) in found.items()
        if _is_only_bytes(x, found, static)
    }


def _residual(
    node: Node, static: Mapping[Node, object], known: Mapping[Node, object]
) -> int | None:
    """The operand of a sum that a layer reads as bytes, if the other is a product read only by the sum."""
    if node.target is not aten.add.Tensor or len(node.args) != 2 or node.kwargs:
        return None
    for place in (0, 1):
        x, product = node.args[place], node.args[1 - place]
        if not isinstance(x, Node) or not isinstance(product, Node):
            return None
        same = x.meta["val"].shape == product.meta["val"].shape
        if x in known and product in static and len(product.users) == 1 and same:
            return place
    return None


def _is_quantized(node: Node, quantized: set[Node]) -> bool:
    """Is ``node``, or the result of its activation function, the input of a quantized layer?"""
    if node in quantized:
        return True
    reader = next(iter(node.users)) if len(node.users) == 1 else None
    return reader is not None and reader.target in _ACTIVATIONS and reader in quantized


def _is_only_bytes(x: Node, sums: Collection[Node], static: Collection[Node]) -> bool:
    """Are all other readers of the residual ``x`` quantized?"""
    return all(user in static or user in sums for user in x.users)
