# SPDX-License-Identifier: Apache-2.0
"""What quantizing saves layer by layer, of an engine whose layers are int8 against one that is all float.

    worth = weigh(layers, names, exact, whole, simulation, samples)
    worth.saved["linear_3"]                # seconds per call, one entry per sample
    worth.doubtful(names)                  # the groups of equal layers that do not clearly win

Both engines are profiled: two compilations tell about all layers. What int8 costs besides the products
(quantizing activations) or saves there (bytes that are read instead of floats) is shared by the layers in
proportion to the activations that they read, and by layers that read the same one equally.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from blade.backends.quant.layers import Layer
from blade.backends.quant.shares import Taken, layer_seconds
from blade.backends.quant.simulate import Inputs, Simulation

CLEAR = (
    0.1  # of the float layer's time that a group saves at every sample if nobody has to look closer
)

Profile = Callable[[Any, Mapping[str, torch.Tensor], Inputs], Taken]


@dataclass(frozen=True)
class Worth:
    """By layer and sample, in seconds per call; a layer that no instruction shows is in neither."""

    saved: dict[str, tuple[float, ...]]
    exact: dict[str, tuple[float, ...]]

    def is_clear(self, group: Sequence[Layer]) -> bool:
        """Whether these layers together save enough at every sample."""
        names = [layer.name for layer in group]
        if not all(name in self.saved for name in names):
            return False
        saved = [sum(s) for s in zip(*(self.saved[n] for n in names), strict=True)]
        exact = [sum(s) for s in zip(*(self.exact[n] for n in names), strict=True)]
        return all(s > CLEAR * e for s, e in zip(saved, exact, strict=True))

    def doubtful(self, groups: Sequence[tuple[Layer, ...]]) -> list[tuple[Layer, ...]]:
        """Those that are worth a measurement of their own."""
        return [group for group in groups if not self.is_clear(group)]


def weigh(
    layers: Sequence[Layer],
    int8: Mapping[str, torch.Tensor],
    exact: Any,
    whole: Any,
    simulation: Simulation,
    samples: Sequence[Inputs],
    profile: Profile = layer_seconds,
) -> Worth:
    """``int8``: the weights of the layers that ``whole`` has quantized; ``exact`` has none."""
    quantized = [layer for layer in layers if layer.name in int8]
    floats = {layer.name: layer.weight for layer in quantized}
    saved: dict[str, list[float]] = {}
    before: dict[str, list[float]] = {}
    for inputs in samples:
        was, now = profile(exact, floats, inputs), profile(whole, int8, inputs)
        shares = _shares(quantized, _volumes(quantized, simulation, inputs))
        for name, share in shares.items():
            if name in was.layers and name in now.layers:
                gain = was.layers[name] - now.layers[name] + share * (was.rest - now.rest)
                saved.setdefault(name, []).append(gain)
                before.setdefault(name, []).append(was.layers[name])
    known = [name for name, gains in saved.items() if len(gains) == len(samples)]
    return Worth({n: tuple(saved[n]) for n in known}, {n: tuple(before[n]) for n in known})


def _volumes(layers: Sequence[Layer], simulation: Simulation, inputs: Inputs) -> dict[str, int]:
    """Elements of each activation at ``inputs``."""
    wanted = {layer.x.name for layer in layers}
    found: dict[str, int] = {}

    def watch(node: torch.fx.Node, made: Any, alive: Mapping[torch.fx.Node, Any]) -> None:
        if node.name in wanted:
            found[node.name] = made.numel()

    simulation.run(inputs, {}, watch)
    return found


def _shares(layers: Sequence[Layer], volumes: Mapping[str, int]) -> dict[str, float]:
    """By layer, what part of the rest is its doing; they sum to 1."""
    readers: dict[str, int] = {}
    for layer in layers:
        readers[layer.x.name] = readers.get(layer.x.name, 0) + 1
    total = max(1, sum(volumes[name] for name in readers))
    return {layer.name: volumes[layer.x.name] / readers[layer.x.name] / total for layer in layers}
