# SPDX-License-Identifier: Apache-2.0
"""What an ONNX value is while its graph is imported.

Sizes are numbers of the host. ``Shape``, ``Gather``, ``Concat`` and the like compute lists of them, so that
``Reshape`` takes ints, as in PyTorch, and no tensors:

    TensorValue("x", torch.float32, (None, 3))               # a tensor of the text, with what is known of its sizes
    HostValue(array([Number("n0"), 12]), torch.int64)         # a tensor of few numbers that are known, or have a name
    ConstantValue("w", array)                                 # an initializer
    SequenceValue("items", torch.float32)                     # List[Tensor]
    OptionalValue("maybe", ...)                               # Optional[Tensor]
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

Array = np.ndarray[Any, Any]
Kind = Literal["int", "bool"]


@dataclass(frozen=True)
class Number:
    """A number whose value is known at run time: the text of a TorchScript expression.

    ``is_size``: it is at least 0.
    """

    text: str
    kind: Kind = "int"
    is_size: bool = False

    def __str__(self) -> str:
        return self.text


HostNumber = int | float | bool | Number
Dims = tuple[int | None, ...]
Sizes = tuple[int | Number | None, ...]
"""Sizes of a tensor: a number, a name for one, or nothing that is known."""


@dataclass(frozen=True)
class TensorValue:
    """A tensor; ``dtype`` and ``dims`` are ``None`` where they are not known, and so are single sizes."""

    text: str
    dtype: torch.dtype | None = None
    dims: Sizes | None = None


@dataclass(frozen=True, eq=False)
class HostValue:
    """A tensor of few numbers; ``array`` has the dtype object."""

    array: Array
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class ConstantValue:
    """An initializer, or what was computed from initializers."""

    name: str
    array: Array
    dtype: torch.dtype


@dataclass(frozen=True)
class SequenceValue:
    """A list of tensors."""

    text: str
    dtype: torch.dtype | None = None
    dims: Sizes | None = None


@dataclass(frozen=True)
class OptionalValue:
    """An optional tensor or sequence: ``text`` is of type Optional. What is inside has the type of ``inner``."""

    text: str
    inner: TensorValue | SequenceValue
    known: bool | None = field(default=None)
    """Whether there is a value, if that is known."""


AnyTensor = TensorValue | HostValue | ConstantValue
Value = AnyTensor | SequenceValue | OptionalValue


def annotation(value: Value) -> str:
    """The type of ``value`` in TorchScript."""
    if isinstance(value, OptionalValue):
        return f"Optional[{annotation(value.inner)}]"
    return "List[Tensor]" if isinstance(value, SequenceValue) else "Tensor"
