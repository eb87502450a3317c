# SPDX-License-Identifier: Apache-2.0
"""What a measured model is: a module with tensors in and a tuple of tensors out, and its sizes.

model = resnet50()
model.module(*model.inputs((1, 224, 224), seed=0))           # batch, height, width
model.module(*model.random_inputs(random.Random(0)))
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

Tensors = tuple[torch.Tensor, ...]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Axis:
    """A free size of a model: random values are ``low``, ``low + step``, ... up to ``high``."""

    name: str
    low: int
    high: int
    step: int = 1


@dataclass(frozen=True)
class Model:
    """``module`` in eval mode; ``inputs(shape, seed)`` makes its positional arguments, called ``names``.

    A shape has one size per axis of ``axes``. ``fixed`` are the shapes to measure at, the first one
    also the sample to compile from. ``declared`` (input, axis, size) are sizes that the model would let
    vary and its trace does not; whoever compiles it is told.
    """

    module: nn.Module
    names: tuple[str, ...]
    axes: tuple[Axis, ...]
    fixed: tuple[Shape, ...]
    inputs: Callable[[Shape, int], Tensors]
    declared: dict[str, dict[int, int]] = field(default_factory=dict)

    def random_shape(self, rng: random.Random) -> Shape:
        return tuple(rng.randrange(a.low, a.high + 1, a.step) for a in self.axes)

    def random_inputs(self, rng: random.Random) -> Tensors:
        return self.inputs(self.random_shape(rng), rng.randrange(2**31))

    def dynamic_axes(self) -> list[tuple[int, ...]]:
        """Per input, which of its axes follow the shape, found by making inputs of two shapes."""
        pair = [tuple(a.low + k * a.step for a in self.axes) for k in (1, 2)]
        first, second = (self.inputs(shape, 0) for shape in pair)
        return [
            tuple(d for d in range(a.dim()) if a.shape[d] != b.shape[d])
            for a, b in zip(first, second, strict=True)
        ]


def label(shape: Shape) -> str:
    """``8x64``"""
    return "x".join(map(str, shape))


def initialized(module: nn.Module, sample: Callable[[], Tensors] | None = None) -> nn.Module:
    """``module`` in eval mode with weights unlike those it is born with.

    Biases of 0, norm weights of 1 and running statistics of 0 and 1 hide errors, so vectors get noise;
    with a ``sample``, running statistics become those of the sample, which keeps deep networks in range.
    """
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=rng))
        if sample is not None:
            _set_statistics(module, sample())
    return module.eval()


def _set_statistics(module: nn.Module, sample: Tensors) -> None:
    module.eval()
    norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
        norm.train()
    module(*sample)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(shape: Shape, seed: int) -> Tensors:
    """Noise at batch, height and width."""
    batch, height, width = shape
    return (torch.randn(batch, 3, height, width, generator=generator(seed)),)


def token_ids(size: Shape, seed: int, vocabulary: int) -> torch.Tensor:
    return torch.randint(0, vocabulary, size, generator=generator(seed))


def padding_mask(batch: int, length: int) -> torch.Tensor:
    """int64 ones; in every second row the last third is padding."""
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[1::2, length - length // 3 :] = 0
    return mask
