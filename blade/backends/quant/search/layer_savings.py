# SPDX-License-Identifier: Apache-2.0
"""The savings of quantization per layer: an engine with int8 layers against an engine in float.

    savings = measure_savings(layers, int8, exact, whole, simulation, samples)
    savings.saved["linear_3"]              # seconds per call, one entry per sample
    savings.doubtful(groups)               # the groups of equal layers without a clear win

Both engines are profiled, so two compilations measure all layers. The difference outside the products (time
to quantize activations, fewer bytes to read) is split among the layers in proportion to the activations
that they read; layers that read the same activation share equally.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from blade.backends.quant.analysis.layers import Layer
from blade.backends.quant.analysis.simulate import Inputs, Simulation
from blade.backends.quant.search.layer_profile import LayerProfile, profile_layers

CLEAR = 0.1  # a group that saves this fraction of its float time at every sample needs no further timing

Profile = Callable[[Any, Mapping[str, torch.Tensor], Inputs], LayerProfile]


@dataclass(frozen=True)
class LayerSavings:
    """Seconds per call by layer and sample; layers without an own instruction are in neither."""

    saved: dict[str, tuple[float, ...]]
    exact: dict[str, tuple[float, ...]]

    def is_clear(self, group: Sequence[Layer]) -> bool:
        """Do these layers together save enough at every sample?"""
        names = [layer.name for layer in group]
        if not all(name in self.saved for name in names):
            return False
        saved = [sum(s) for s in zip(*(self.saved[n] for n in names), strict=True)]
        exact = [sum(s) for s in zip(*(self.exact[n] for n in names), strict=True)]
        return all(s > CLEAR * e for s, e in zip(saved, exact, strict=True))

    def doubtful(self, groups: Sequence[tuple[Layer, ...]]) -> list[tuple[Layer, ...]]:
        """The groups that need a timing of their own."""
        return [group for group in groups if not self.is_clear(group)]


def measure_savings(
    layers: Sequence[Layer],
    int8: Mapping[str, torch.Tensor],
    exact: Any,
    whole: Any,
    simulation: Simulation,
    samples: Sequence[Inputs],
    profile: Profile = profile_layers,
) -> LayerSavings:
    """``int8``: the weights of the layers that are quantized in ``whole``; ``exact`` is all float."""
    quantized = [layer for layer in layers if layer.name in int8]
    floats = {layer.name: layer.weight for layer in quantized}
    saved: dict[str, list[float]] = {}
    before: dict[str, list[float]] = {}
    for inputs in samples:
        was, now = profile(exact, floats, inputs), profile(whole, int8, inputs)
        shares = _parts_of_rest(quantized, _volumes(quantized, simulation, inputs))
        for name, share in shares.items():
            if name in was.layers and name in now.layers:
                gain = was.layers[name] - now.layers[name] + share * (was.rest - now.rest)
                saved.setdefault(name, []).append(gain)
                before.setdefault(name, []).append(was.layers[name])
    known = [name for name, gains in saved.items() if len(gains) == len(samples)]
    return LayerSavings({n: tuple(saved[n]) for n in known}, {n: tuple(before[n]) for n in known})


def _volumes(layers: Sequence[Layer], simulation: Simulation, inputs: Inputs) -> dict[str, int]:
    """Elements of each activation at ``inputs``."""
    wanted = {layer.x.name for layer in layers}
    found: dict[str, int] = {}

    def watch(node: torch.fx.Node, made: Any, alive: Mapping[torch.fx.Node, Any]) -> None:
        if node.name in wanted:
            found[node.name] = made.numel()

    simulation.run(inputs, {}, watch)
    return found


def _parts_of_rest(layers: Sequence[Layer], volumes: Mapping[str, int]) -> dict[str, float]:
    """The share of each layer in the rest; shares sum to 1."""
    readers: dict[str, int] = {}
    for layer in layers:
        readers[layer.x.name] = readers.get(layer.x.name, 0) + 1
    total = max(1, sum(volumes[name] for name in readers))
    return {layer.name: volumes[layer.x.name] / readers[layer.x.name] / total for layer in layers}
