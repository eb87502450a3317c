# SPDX-License-Identifier: Apache-2.0
"""Equalization of consecutive convolutions, channel by channel, and correction of biases by the mean error.

    gm, pairs = equalize(gm, layers)                     # the same function, weights with equal ranges
    scheme = correct_bias(simulation, layer, scheme)     # the same weights, another bias

Source: Nagel et al., "Data-free quantization through weight equalization and bias correction" (ICCV 2019).
Here the expected error is measured on the samples, not derived.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from blade.backends.quant.analysis.layers import Layer, find_layers, tensor_of
from blade.backends.quant.analysis.simulate import Scheme, Simulation
from blade.backends.quant.transforms.insert_qdq import QdqWriter, finish, private

aten = torch.ops.aten
ROUNDS = 10  # over all pairs; convergence is much faster
CLOSE = 1e-3
_KEEP_SCALES = (aten.relu.default, aten.relu_.default)


@dataclass(frozen=True)
class ConvolutionPair:
    """``second`` is the only reader of ``first``, directly or through a ReLU."""

    first: Layer
    second: Layer


def equalize(gm: GraphModule, layers: Sequence[Layer]) -> tuple[GraphModule, int]:
    """``gm`` with equal channel ranges in consecutive convolutions, and the number of pairs."""
    pairs = find_pairs(layers)
    if not pairs:
        return gm, 0
    involved = {layer.name: layer for p in pairs for layer in (p.first, p.second)}
    weights = {name: layer.weight for name, layer in involved.items()}
    biases = {name: _bias(gm, layer) for name, layer in involved.items()}
    for _ in range(ROUNDS):
        moved = 0.0
        for pair in pairs:
            first, second = pair.first.name, pair.second.name
            scales = scales_of(weights[first], weights[second], groups_of(pair.second))
            weights[first] = weights[first] / _column(scales, weights[first])
            held = biases[first]
            biases[first] = None if held is None else held / scales
            weights[second] = multiply_inputs(weights[second], scales, groups_of(pair.second))
            moved = max(moved, float((scales - 1).abs().max()))
        if moved < CLOSE:
            break
    copy = private(gm)
    writer, nodes = QdqWriter(copy), {node.name: node for node in copy.graph.nodes}
    for layer in find_layers(copy):
        if layer.name in weights:
            writer.reweight(layer, weights[layer.name], biases[layer.name], nodes)
    return finish(copy), len(pairs)


def find_pairs(layers: Sequence[Layer]) -> list[ConvolutionPair]:
    """The pairs in program order."""
    convolutions = {layer.node: layer for layer in layers if layer.kind == "conv"}
    found = []
    for node, layer in convolutions.items():
        reader = _only_reader(node)
        while reader is not None and reader.target in _KEEP_SCALES:
            reader = _only_reader(reader)
        second = convolutions.get(reader) if reader is not None else None
        if second is not None and reader is not None and reader.args[0] is second.x:
            found.append(ConvolutionPair(layer, second))
    return found


def groups_of(layer: Layer) -> int:
    """The groups of a convolution: channels of its input divided by inputs of its weight."""
    channels = int(layer.x.meta["val"].shape[1])
    return channels // int(layer.weight.shape[1])


def scales_of(first: torch.Tensor, second: torch.Tensor, groups: int) -> torch.Tensor:
    """``s = sqrt(range of output / range of input)`` per channel between two weights [out, in, ...]."""
    outputs = first.abs().flatten(1).amax(1)
    inputs = input_ranges(second, groups)
    scales = (outputs / inputs).sqrt()
    usable = (outputs > 0) & (inputs > 0) & torch.isfinite(scales)
    return scales.where(usable, 1.0)


def input_ranges(weight: torch.Tensor, groups: int) -> torch.Tensor:
    """The largest magnitude of the weights of each input channel."""
    grouped: torch.Tensor = (
        weight.unflatten(0, (groups, -1)).abs().flatten(3)
    )  # [groups, out, in, positions]
    return grouped.amax(dim=(1, 3)).flatten()


def multiply_inputs(weight: torch.Tensor, scales: torch.Tensor, groups: int) -> torch.Tensor:
    """``weight`` with each input channel multiplied by its scale."""
    grouped: torch.Tensor = weight.unflatten(0, (groups, -1))
    shape = (groups, 1, -1, *[1] * (weight.dim() - 2))
    return (grouped * scales.view(groups, -1).view(shape)).flatten(0, 1)


def correct_bias(
    simulation: Simulation, layers: Mapping[str, Layer], schemes: Mapping[str, Scheme]
) -> dict[str, Scheme]:
    """``schemes`` with biases that restore the float mean of each channel, on the samples.

    Each layer is corrected alone: its input is that of the original.
    """
    sums: dict[str, torch.Tensor] = {}
    counts: dict[str, int] = {}

    def watch(node: Node, made: Any, alive: Mapping[Node, Any]) -> None:
        scheme = schemes.get(node.name)
        if scheme is None or not made.numel():
            return
        layer = layers[node.name]
        bias = None if layer.bias is None else alive[layer.bias]
        got = layer.run(scheme.seen(alive[layer.x]), simulation.dequantized(scheme.weight), bias)
        missing = _per_channel(made - got, layer)
        sums[node.name] = sums.get(node.name, torch.zeros(len(layer.weight))) + missing.sum(1)
        counts[node.name] = counts.get(node.name, 0) + missing.shape[1]

    for inputs in simulation.samples:
        simulation.run(inputs, {}, watch)
    corrected = dict(schemes)
    for name, total in sums.items():
        own = _bias(simulation.gm, layers[name])
        base = torch.zeros_like(total) if own is None else own
        corrected[name] = replace(schemes[name], bias=(base + total / counts[name]).contiguous())
    return corrected


def _per_channel(tensor: torch.Tensor, layer: Layer) -> torch.Tensor:
    """``tensor`` as [channels, all other axes]."""
    axis = 1 if layer.kind == "conv" else -1
    return tensor.movedim(axis, 0).flatten(1)


def _only_reader(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _bias(gm: GraphModule, layer: Layer) -> torch.Tensor | None:
    return None if layer.bias is None else tensor_of(gm, layer.bias)


def _column(scales: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return scales.view(-1, *[1] * (like.dim() - 1))
