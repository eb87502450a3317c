# SPDX-License-Identifier: Apache-2.0
"""Memory-bound patterns that models are full of, whose speed is that of moving their bytes once.

pattern = PATTERNS["layer_norm"]
pattern.module(); pattern.inputs((8, 128, 768), generator)
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from zoo.model import Shape, Tensors

WIDTH = 768


class LayerNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(x)
        return y


class ResidualNorm(nn.Module):
    """What follows a product in a transformer: bias, residual, layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(x + self.bias + residual)
        return y


class MaskedSoftmax(nn.Module):
    """Scores (batch, heads, length, length) and an additive mask (batch, 1, 1, length)."""

    def forward(self, scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.softmax(scores * 0.125 + mask, dim=-1)


class BiasGelu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.gelu(x + self.bias)


class Chain(nn.Module):
    """Seven ops without a product among them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.shift = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = torch.tanh(x * self.scale + self.shift)
        return torch.relu(z * torch.sigmoid(y) + x)


@dataclass(frozen=True)
class Pattern:
    """``inputs(shape, generator)`` on the CPU in float32; ``small`` and ``large`` are shapes of it."""

    module: Callable[[], nn.Module]
    inputs: Callable[[Shape, torch.Generator], Tensors]
    small: tuple[Shape, ...]
    large: tuple[Shape, ...]


def _one(shape: Shape, rng: torch.Generator) -> Tensors:
    return (torch.randn(shape, generator=rng),)


def _two(shape: Shape, rng: torch.Generator) -> Tensors:
    return torch.randn(shape, generator=rng), torch.randn(shape, generator=rng)


def _scores(shape: Shape, rng: torch.Generator) -> Tensors:
    batch, _, _, length = shape
    hidden = torch.rand(batch, 1, 1, length, generator=rng) < 0.2
    hidden[..., 0] = False
    return torch.randn(shape, generator=rng), hidden * torch.tensor(-1e4)


ROWS: tuple[Shape, ...] = ((1, 128, WIDTH), (8, 128, WIDTH), (32, 128, WIDTH))
MANY: tuple[Shape, ...] = ((64, 512, WIDTH),)
SCORES: tuple[Shape, ...] = ((1, 12, 128, 128), (8, 12, 128, 128))

PATTERNS: dict[str, Pattern] = {
    "layer_norm": Pattern(LayerNorm, _one, ROWS, MANY),
    "bias_residual_layer_norm": Pattern(ResidualNorm, _two, ROWS, MANY),
    "masked_softmax": Pattern(MaskedSoftmax, _scores, SCORES, ((16, 12, 384, 384),)),
    "bias_gelu": Pattern(BiasGelu, _one, ROWS, MANY),
    "chain_of_7": Pattern(Chain, _two, ROWS, MANY),
}
