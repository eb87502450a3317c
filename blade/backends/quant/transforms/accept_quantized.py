# SPDX-License-Identifier: Apache-2.0
"""Already quantized models: fake-quantize ops become quantize and dequantize, weights become int8.

    rewritten = accept(cluster)            # None if it has no quantization ops

The model's own scales, zero points and ranges are kept. Q/DQ ops in the graph stay unchanged; those on
constants are evaluated here.
"""

from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from blade.backends.quant.analysis.affine import EPSILON, Affine, Weight
from blade.backends.quant.analysis.layers import (
    CONVOLUTIONS,
    PRODUCTS,
    find_layers,
    tensor_of,
    title_of,
)
from blade.backends.quant.transforms.insert_qdq import (
    QdqWriter,
    finish,
    ops,
    private,
)
from blade.core.cluster import Cluster
from blade.report import LayerPrecision

aten = torch.ops.aten
_PER_TENSOR = (
    aten.fake_quantize_per_tensor_affine.default,
    aten.fake_quantize_per_tensor_affine.tensor_qparams,
)
_PER_CHANNEL = aten.fake_quantize_per_channel_affine.default
_QUANTIZE = (ops.quantize_per_tensor.default, ops.quantize_per_channel.default)

OFF_GRID = 1e-3  # of a step: tolerance for float32 rounding of its multiples

_DEQUANTIZE = {
    ops.dequantize_per_tensor.default,
    ops.dequantize_per_tensor.tensor,
    ops.dequantize_per_token.default,
    ops.dequantize_per_channel.default,
    ops.dequantize_per_channel_group.default,
}


def accept(cluster: Cluster) -> Cluster | None:
    """``cluster`` with Q/DQ in place of fake quantization; ``None`` if it has neither."""
    targets = {node.target for node in cluster.gm.graph.nodes}
    if not targets & {*_PER_TENSOR, _PER_CHANNEL, *_QUANTIZE}:
        return None
    gm = private(cluster.gm)
    writer = QdqWriter(gm)
    for node in list(gm.graph.nodes):
        with gm.graph.inserting_before(node):
            new = _rewritten(writer, node)
        if new is not None:
            new.meta["source"] = node.meta.get("source", "")
            node.replace_all_uses_with(new)
    _quantize_weights(writer, finish(gm))
    return replace(cluster, gm=finish(gm))


def grid_of(weight: torch.Tensor) -> Weight | None:
    """``weight`` [out, ...] in int8 if each row holds float32 multiples of one number, else ``None``.

    Freezing leaves a fake-quantized weight in this form.
    """
    rows = weight.detach().float().flatten(1)
    peaks = rows.abs().amax(1)
    scales = torch.zeros_like(peaks)
    for steps in range(1, 129):  # the fewest steps to a row's largest element
        tried = (peaks / steps).clamp(min=EPSILON)
        levels = rows / tried.unsqueeze(1)
        fits = (levels - levels.round()).abs().amax(1) < OFF_GRID
        scales = torch.where((scales == 0) & fits, tried, scales)
    if not bool((scales > 0).all()):
        return None
    values = (rows / scales.unsqueeze(1)).round()
    if values.abs().max() > 127:
        return None
    return Weight(values.to(torch.int8).view(weight.shape), scales)


def _quantize_weights(writer: QdqWriter, gm: GraphModule) -> None:
    """Quantize weights of layers that read dequantized values: freezing evaluated the fake quantization."""
    for layer in find_layers(gm):
        if layer.x.target not in _DEQUANTIZE:
            continue
        weight = grid_of(layer.weight)
        if weight is None:
            continue
        with gm.graph.inserting_before(layer.node):
            operands = (layer.x, writer.weight(weight), layer.bias)
        layer.node.target, layer.node.args = layer.target, layer.arguments(*operands)


def _rewritten(writer: QdqWriter, node: Node) -> Node | None:
    if node.target in _QUANTIZE:
        held = tensor_of(writer.gm, node.args[0])
        return None if held is None else _folded(writer, node, held)
    if node.target in _PER_TENSOR:
        return _per_tensor(writer, node)
    return _per_channel(writer, node) if node.target is _PER_CHANNEL else None


def _folded(writer: QdqWriter, node: Node, held: torch.Tensor) -> Node | None:
    args = [_number(writer, a) if isinstance(a, Node) else a for a in node.args[1:]]
    return None if any(a is None for a in args) else writer.constant(node.target(held, *args))  # type: ignore[operator]


def _number(writer: QdqWriter, node: Node) -> torch.Tensor | None:
    return tensor_of(writer.gm, node)


def _per_tensor(writer: QdqWriter, node: Node) -> Node | None:
    x, scale, zero_point, low, high = node.args
    scale, zero_point = (_plain(writer, v) for v in (scale, zero_point))
    if scale is None or zero_point is None or not isinstance(x, Node):
        return None
    dtype = _dtype(low, high)
    if dtype is None:
        return None
    affine = Affine(float(scale), int(zero_point), int(low), int(high), dtype)  # type: ignore[arg-type]
    held = tensor_of(writer.gm, x)
    if held is None:
        return writer.per_tensor(x, affine)
    form = (affine.scale, affine.zero_point, affine.low, affine.high, affine.dtype)
    q = writer.constant(affine.quantize(held))
    return writer.call(ops.dequantize_per_tensor.default, q, *form)


def _per_channel(writer: QdqWriter, node: Node) -> Node | None:
    x, scales, zero_points, axis, low, high = node.args
    held, s, z = (tensor_of(writer.gm, a) for a in (x, scales, zero_points))
    dtype = _dtype(low, high)
    if held is None or s is None or z is None or dtype is None:
        return None
    form = (axis, low, high, dtype)
    s, z = s.float(), z.to(torch.int32)
    q = ops.quantize_per_channel.default(held, s, z, *form)
    zero = None if not bool(z.any()) else writer.constant(z)
    return writer.call(
        ops.dequantize_per_channel.default, writer.constant(q), writer.constant(s), zero, *form
    )


def _plain(writer: QdqWriter, value: Any) -> float | None:
    if not isinstance(value, Node):
        return float(value)
    held = tensor_of(writer.gm, value)
    return None if held is None or held.numel() != 1 else float(held.item())


def _dtype(low: Any, high: Any) -> torch.dtype | None:
    """The 8-bit dtype that holds low..high."""
    if low >= -128 and high <= 127:
        return torch.int8
    return torch.uint8 if low >= 0 and high <= 255 else None


def given_layers(gm: GraphModule) -> tuple[LayerPrecision, ...]:
    """The products and convolutions of ``gm``; those that read dequantized values are in 8 bits."""
    found = []
    for node in gm.graph.nodes:
        if node.target in (*PRODUCTS, *CONVOLUTIONS):
            reads = {a.target for a in node.args[:2] if isinstance(a, Node)}
            given = bool(reads & _DEQUANTIZE)
            kind = "conv" if node.target in CONVOLUTIONS else "linear"
            precision = "int8 as given" if given else "fp32"
            why = "" if given else "the model quantizes other layers, and not this one"
            found.append(LayerPrecision(title_of(node), kind, precision, why=why))
    return tuple(found)
