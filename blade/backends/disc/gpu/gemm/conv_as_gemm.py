# SPDX-License-Identifier: Apache-2.0
"""A convolution as a product (implicit GEMM): a row is the receptive field of one result pixel, never stored.

    x [N, H, W, C], w [O, C, KH, KW], stored as [O, KH, KW, C]
    row (n, y, x)     the pixels of the image under the kernel at (y, x), one tap (ky, kx) after the other
    depth             (ky, kx, c): KH*KW*C

A block of the depth lies within one tap, so borders are tested per row, once per block. A kernel of one tap
and stride 1 needs no window: its rows are the pixels of the image.
"""

from dataclasses import dataclass
from math import prod

from blade.backends.disc.ir.convolution import operands, to_channels_last
from blade.backends.disc.ir.graph import Value, contiguous_strides
from blade.backends.disc.ir.kernel import Dim
from blade.backends.disc.ir.views import same, view_of

SPATIAL = 2


@dataclass(frozen=True)
class ConvWindow:
    """A row's window; pairs are (y, x). ``pixels``: of the result; ``sizes``, ``strides`` [N, H, W]: of x."""

    channels: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    pixels: tuple[Dim, Dim]
    sizes: tuple[Dim, Dim]
    strides: tuple[Dim, Dim, Dim]

    @property
    def numbers(self) -> dict[str, Dim]:
        """The numbers that the text reads, by name."""
        return {
            "PIXELS_Y": self.pixels[0],
            "PIXELS_X": self.pixels[1],
            "SIZE_Y": self.sizes[0],
            "SIZE_X": self.sizes[1],
            "X_IMAGE": self.strides[0],
            "X_LINE": self.strides[1],
            "X_PIXEL": self.strides[2],
        }

    @property
    def constants(self) -> dict[str, int]:
        pairs = {
            "TAPS": self.kernel,
            "STRIDE": self.stride,
            "PAD": self.padding,
            "GAP": self.dilation,
        }
        named = {f"{k}_{a}": pair[i] for k, pair in pairs.items() for i, a in enumerate("YX")}
        return {"CHANNELS": self.channels, **named}


CORNER = """\
    pixel = tl.minimum(rows, height - 1)
    line = pixel // tl.cast(PIXELS_X, tl.int32)
    corner_x = pixel % tl.cast(PIXELS_X, tl.int32) * STRIDE_X - PAD_X
    corner_y = line % tl.cast(PIXELS_Y, tl.int32) * STRIDE_Y - PAD_Y
    image = (line // tl.cast(PIXELS_Y, tl.int32)).to(tl.int64)
    corner = image * X_IMAGE + corner_y.to(tl.int64) * X_LINE + corner_x.to(tl.int64) * X_PIXEL
"""
"""Per row, the position of its first tap in x, which may be outside."""

START = f"""\
{CORNER}    x_at = x + corner[:, None] + tl.arange(0, BLOCK_K)[None, :]
    first = part * steps * BLOCK_K
"""
"""The start of a program's depth, ``first``."""

STEP = """\
        tap = first // CHANNELS
        down_y = tap // TAPS_X * GAP_Y
        down_x = tap % TAPS_X * GAP_X
        further = tl.cast(down_y, tl.int64) * X_LINE + tl.cast(down_x, tl.int64) * X_PIXEL
        further = (further + first % CHANNELS) // 16 * 16
        inside_y = (corner_y + down_y >= 0) & (corner_y + down_y < SIZE_Y)
        inside_x = (corner_x + down_x >= 0) & (corner_x + down_x < SIZE_X)
        a = tl.load(x_at + further, mask=(inside_y & inside_x)[:, None], other=0.0)
        b = tl.load(w_at)
"""
"""A block of one tap's channels, a multiple of 16; the hint makes loads 16 bytes wide."""


def columns_of(value: Value) -> tuple[int, int] | None:
    """(row stride, element stride) of the weights of ``value`` as a dense matrix [O, taps and channels]."""
    weight = operands(value).weight
    view = view_of(weight)
    if view is None or not all(isinstance(d, int) for d in weight.shape):
        return None
    order = to_channels_last(len(weight.shape))
    shape = tuple(weight.shape[k] for k in order)
    if not same(shape, tuple(view.strides[k] for k in order), contiguous_strides(shape)):
        return None
    return prod(int(d) for d in weight.shape[1:]), 1


def window_of(value: Value) -> ConvWindow | None:
    """The window of ``value``, a `conv` that ``is_served``; ``None``: rows are the pixels of x."""
    a, x = value.attrs, operands(value).x
    weight = operands(value).weight
    kernel = tuple(int(d) for d in weight.shape[2:])
    if is_of_pixels(value):
        return None
    strides = contiguous_strides(x.shape)
    return ConvWindow(
        int(weight.shape[1]),
        (kernel[0], kernel[1]),
        a["stride"],
        a["padding"],
        a["dilation"],
        (value.shape[1], value.shape[2]),
        (x.shape[1], x.shape[2]),
        (strides[0], strides[1], strides[2]),
    )


def is_of_pixels(value: Value) -> bool:
    """Is ``value``, a `conv`, a product of single pixels, which lie in rows?"""
    a, taps = value.attrs, operands(value).weight.shape[2:]
    return {*taps, *a["stride"]} == {1} and set(a["padding"]) == {0}


def is_served(value: Value) -> bool:
    """Can this kernel compute ``value``, a `conv`?"""
    given, a = operands(value), value.attrs
    if len(value.shape) != SPATIAL + 2 or a["transposed"] or a["groups"] != 1:
        return False
    if given.bias is not None or given.residual is not None or a["activation"] is not None:
        return False
    x, view = given.x, view_of(given.x)
    if x.shape[-1] != given.weight.shape[1]:  # equal by a guard: an expression of sizes
        return False
    if view is None or not same(x.shape, view.strides, contiguous_strides(x.shape)):
        return False
    return columns_of(value) is not None
