# SPDX-License-Identifier: Apache-2.0
"""Brings int8 convolutions into the forms that code exists for: quads of channels, or depthwise.

    fit(b, constants, Convolution(x, weight, zero, attrs)) -> a new one; None: it stays a float convolution

Depthwise convolutions stay unchanged. Other inputs with few channels, such as images, get more channels
(with zero weights) and borders on the left and right: then all taps of a row of the kernel are adjacent in
memory at every pixel and are read as one piece.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch

from blade.backends.disc.ir.constant_parts import parts_of
from blade.backends.disc.ir.convolution import WIDEST
from blade.backends.disc.ir.graph import (
    IrBuilder,
    Value,
    contiguous_strides,
    plain,
)

QUAD = 4  # bytes multiplied per step
_FEW = 8  # most channels for which a row of the kernel is read as one piece
MOST_TAPS = 256  # of a depthwise kernel: the sum of this many products is exact in float32


@dataclass(frozen=True)
class Convolution:
    """``x`` [N, *spatial, C] of uint8, ``weight`` [O, C / groups, *kernel], ``attrs`` of a `conv`."""

    x: Value
    weight: Value
    zero: int
    attrs: dict[str, Any]


def fit(b: IrBuilder, constants: list[torch.Tensor], conv: Convolution) -> Convolution | None:
    """``conv`` in a form with generated code, or ``None``; a padded weight is appended to ``constants``."""
    channels, groups = conv.x.shape[-1], conv.attrs["groups"]
    if not isinstance(channels, int):
        return None
    if groups > 1:
        return conv if is_depthwise_int8(conv.weight, groups) or channels % QUAD == 0 else None
    more = -channels % QUAD
    narrow = channels <= _FEW and conv.weight.shape[-1] != 1 and conv.attrs["dilation"][-1] == 1
    if more:
        weight = _with_channels(b, constants, conv.weight, more)
        if weight is None:
            return None
        x = _beside(b, conv.x, len(conv.x.shape) - 1, 0, more, conv.zero)
        conv = replace(conv, x=x, weight=weight)
    *rest, pad = conv.attrs["padding"]
    if not narrow or not pad:
        return conv
    x = _beside(b, conv.x, len(conv.x.shape) - 2, pad, pad, conv.zero)
    return replace(conv, x=x, attrs={**conv.attrs, "padding": (*rest, 0)})


def is_depthwise_int8(weight: Value, groups: int) -> bool:
    """Whether this is a depthwise convolution of images, with a kernel that code exists for and exact sums."""
    count, depth, *kernel = weight.shape
    if count != groups or depth != 1 or len(kernel) > 2:
        return False
    sizes = [k for k in kernel if isinstance(k, int)]
    taps = sizes[0] * sizes[-1] if len(sizes) == 2 else sizes[0]
    return sizes[-1] <= WIDEST and taps <= MOST_TAPS


def _with_channels(
    b: IrBuilder, constants: list[torch.Tensor], weight: Value, more: int
) -> Value | None:
    parts = parts_of(weight)
    if parts is None or len(parts) != 1:
        return None
    [part] = parts
    held = constants[part.constant].as_strided(
        [int(d) for d in weight.shape], part.strides, part.offset
    )
    made = torch.cat([held, held.new_zeros(len(held), more, *held.shape[2:])], dim=1)
    index = len(constants)
    constants.append(made)
    shape = tuple(made.shape)
    return b.make("const", (), shape, made.dtype, contiguous_strides(shape), index=index)


def _beside(b: IrBuilder, x: Value, axis: int, before: int, after: int, value: int) -> Value:
    """``x`` padded by ``before`` and ``after`` entries of ``value`` along ``axis``."""

    def sized(size: Any) -> Sequence[Any]:
        return [size if k == axis else d for k, d in enumerate(x.shape)]

    parts = [x]
    if before:
        parts.insert(0, b.fill(value, sized(before), x.dtype))
    if after:
        parts.append(b.fill(value, sized(after), x.dtype))
    size = plain(sympy.sympify(x.shape[axis]) + before + after)
    return b.make("concat", parts, sized(size), x.dtype, axis=axis)
