# SPDX-License-Identifier: Apache-2.0
"""Convolutions of bytes brought into a form that there is code for: pixels of whole quads, or single channels.

    fit(b, constants, Convolution(x, weight, zero, attrs)) -> another one | None: it stays one of floats

Depthwise convolutions stay what they are. Pixels of few channels, an image's for instance, get more, which meet
weights of zero, and a border on the left and on the right: then all taps of a row of the kernel lie side by
side, whatever the pixel, and are one piece.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch

from blade.backends.disc.constants import parts_of
from blade.backends.disc.ir import Builder, Value, contiguous_strides, plain

QUAD = 4  # bytes that are multiplied at once
_FEW = 8  # channels up to which a row of the kernel is one piece
WIDEST = 11  # taps along w of a depthwise kernel that code is made for
MOST_TAPS = 256  # of a depthwise kernel: their products' sum is exact in float32


@dataclass(frozen=True)
class Convolution:
    """``x`` [N, *spatial, C] of unsigned bytes, ``weight`` [O, C / groups, *kernel], ``attrs`` of a `conv`."""

    x: Value
    weight: Value
    zero: int
    attrs: dict[str, Any]


def fit(b: Builder, constants: list[torch.Tensor], conv: Convolution) -> Convolution | None:
    """A padded weight is added to ``constants``."""
    channels, groups = conv.x.shape[-1], conv.attrs["groups"]
    if not isinstance(channels, int):
        return None
    if groups > 1:
        return conv if is_depthwise(conv.weight, groups) or channels % QUAD == 0 else None
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


def is_depthwise(weight: Value, groups: int) -> bool:
    """Is it a convolution of images, each channel by itself, with a kernel that code is made for?"""
    count, depth, *kernel = weight.shape
    if count != groups or depth != 1 or len(kernel) > 2:
        return False
    sizes = [k for k in kernel if isinstance(k, int)]
    taps = sizes[0] * sizes[-1] if len(sizes) == 2 else sizes[0]
    return sizes[-1] <= WIDEST and taps <= MOST_TAPS


def _with_channels(
    b: Builder, constants: list[torch.Tensor], weight: Value, more: int
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


def _beside(b: Builder, x: Value, axis: int, before: int, after: int, value: int) -> Value:
    """``x`` with so many entries of ``value`` along ``axis``."""

    def sized(size: Any) -> Sequence[Any]:
        return [size if k == axis else d for k, d in enumerate(x.shape)]

    parts = [x]
    if before:
        parts.insert(0, b.fill(value, sized(before), x.dtype))
    if after:
        parts.append(b.fill(value, sized(after), x.dtype))
    size = plain(sympy.sympify(x.shape[axis]) + before + after)
    return b.make("concat", parts, sized(size), x.dtype, axis=axis)
