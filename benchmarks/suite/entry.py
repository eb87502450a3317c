# SPDX-License-Identifier: Apache-2.0
"""What a model of the suite is: a name, a family, and a function that builds it for a CPU or for a GPU.

    entry = Entry("bert", "huggingface", build, needs=("transformers",))
    model = entry.build("small")                # a zoo.model.Model; "large" for GPUs

Weights are random. "small" suits one core (a call takes well under half a second), "large" has the sizes that are
published, or near them.
"""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from zoo.model import Axis, Model, Shape, Tensors, generator, initialized

Size = Literal["small", "large"]
SIZES: tuple[Size, ...] = ("small", "large")
FAMILIES = ("huggingface", "vision", "misc")


@dataclass(frozen=True)
class Entry:
    """``needs``: packages without which it is skipped. ``rank``: on a GPU, those of rank 0 come first.

    ``trained``: whether it is trained, too. ``half``: whether 16 bits suit it on a GPU.
    """

    name: str
    family: str
    build: Callable[[Size], Model]
    needs: tuple[str, ...] = ()
    rank: int = 1
    trained: bool = True
    half: bool = True

    def missing(self) -> list[str]:
        return [name for name in self.needs if importlib.util.find_spec(name) is None]


@dataclass(frozen=True)
class Both:
    """A setting at the two sizes."""

    small: Any
    large: Any


def at(size: Size, value: Any) -> Any:
    """``value`` with every ``Both`` in it, or in the values of a mapping, settled."""
    if isinstance(value, Both):
        return value.small if size == "small" else value.large
    if isinstance(value, Mapping):
        return {key: at(size, one) for key, one in value.items()}
    return value


class Answers(nn.Module):
    """A library's model as a function of tensors, which answers a tuple of tensors.

    ``names``: the keywords of its positional arguments; none: it takes them by position. ``outputs``: the attributes
    of its answer that count; none: all tensors with floating point.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str] = (),
        outputs: Sequence[str] = (),
        fixed: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.model, self.names, self.outputs = model, tuple(names), tuple(outputs)
        self.fixed = dict(fixed or {})

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.names:
            out = self.model(**dict(zip(self.names, inputs)), **self.fixed)
        else:
            out = self.model(*inputs, **self.fixed)
        if self.outputs:
            return tuple(getattr(out, name) for name in self.outputs)
        return tuple(_tensors(out))


def _tensors(out: Any) -> list[torch.Tensor]:
    if isinstance(out, torch.Tensor):
        return [out] if out.is_floating_point() else []
    if isinstance(out, Mapping):
        out = list(out.values())
    if isinstance(out, (tuple, list)):
        return [t for one in out for t in _tensors(one)]
    return []


BATCH = Axis("batch", 1, 8)


def made(
    module: nn.Module,
    inputs: Callable[[Shape, int], Tensors],
    shapes: Sequence[Shape],
    axes: Sequence[Axis] = (BATCH,),
    names: Sequence[str] = (),
    sample: bool = False,
    strong: bool = False,
) -> Model:
    """A ``Model``; ``sample``: running statistics of batch norms become those of its last shape.

    ``strong``: weights keep the size of what goes through them; a library's own let it vanish beside the biases.
    """
    _fill(module, strong)
    draw = (lambda: inputs(shapes[-1], 0)) if sample else None
    names = names or [f"input_{k}" for k in range(len(inputs(shapes[0], 0)))]
    return Model(initialized(module, draw), tuple(names), tuple(axes), tuple(shapes), inputs)


def _fill(module: nn.Module, strong: bool) -> None:
    """Matrices that are born zero, as heads of timm are, would make answers that no input changes."""
    rng = generator(2)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1 and (strong or not parameter.any()):
                scale = parameter[0].numel() ** -0.5 if strong else 0.02
                parameter.copy_(scale * torch.randn(parameter.shape, generator=rng))


def noise(*rest: int) -> Callable[[Shape, int], Tensors]:
    """Inputs: one tensor of the shape with ``rest`` behind it."""

    def inputs(shape: Shape, seed: int) -> Tensors:
        return (torch.randn(*shape, *rest, generator=generator(seed)),)

    return inputs
