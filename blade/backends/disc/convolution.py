# SPDX-License-Identifier: Apache-2.0
"""What a `conv` of the IR means: its operands by name, and the ATen op it is.

    conv x w bias? residual? {stride, padding, dilation, groups, activation}

``x`` is [N, *spatial, C] with 1 to 3 spatial axes, ``w`` [O, C/groups, *kernel] in torch's layout, the
result [N, *out, O]: channels are the last axis of what goes in and comes out. ``bias`` is [O];
``residual`` has the result's shape. result = activation(convolution + bias + residual).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from blade.backends.disc.ir import Value

CLAMPS: Mapping[str, tuple[int, int | None]] = {"relu": (0, None), "relu6": (0, 6)}
"""What ``activation`` may name beside ``None``: the range results are kept in."""


@dataclass(frozen=True)
class Operands:
    """The operands of one `conv`; a bias has one axis, a residual as many as the result."""

    x: Value
    weight: Value
    bias: Value | None
    residual: Value | None


def operands(value: Value) -> Operands:
    """The operands of ``value``, a `conv`, by name."""
    x, weight, *rest = value.args
    bias = next((a for a in rest if len(a.shape) == 1), None)
    return Operands(x, weight, bias, next((a for a in rest if len(a.shape) > 1), None))


def to_channels_first(rank: int) -> list[int]:
    """The permutation of [N, *spatial, C] to [N, C, *spatial]."""
    return [0, rank - 1, *range(1, rank - 1)]


def to_channels_last(rank: int) -> list[int]:
    """The permutation of [N, C, *spatial] to [N, *spatial, C]."""
    return [0, *range(2, rank), 1]


def reference(value: Value, tensors: Sequence[Any]) -> torch.Tensor:
    """``value`` computed by torch from its operands."""
    named = dict(zip((a.id for a in value.args), tensors, strict=True))
    given, a, rank = operands(value), value.attrs, len(value.shape)
    y: torch.Tensor = torch.ops.aten.convolution(
        named[given.x.id].permute(to_channels_first(rank)),
        named[given.weight.id],
        None if given.bias is None else named[given.bias.id],
        a["stride"],
        a["padding"],
        a["dilation"],
        False,
        [0] * (rank - 2),
        a["groups"],
    ).permute(to_channels_last(rank))
    if given.residual is not None:
        y = y + named[given.residual.id]
    return y if a["activation"] is None else torch.clamp(y, *CLAMPS[a["activation"]])
