# SPDX-License-Identifier: Apache-2.0
"""Depthwise convolutions on a GPU, with the pointwise group after them: a sum over the taps of a window.

    x [N, H, W, C] or [N, L, C], w [C, 1, taps]       result (n, y, x, c) = sum of w[c, tap] * x[pixel of tap, c]

A program computes some pixels and channels of the result; the pixels that windows share come from the cache.
Products and sums are in float32. There is nothing to multiply on tensor cores: cuDNN's kernels are slow for halves
in channels-last memory, where a tap is one load of consecutive channels.
"""

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

import torch

from blade.backends.disc.gpu.gemm.conv_as_gemm import CORNER, ConvWindow, columns_of
from blade.backends.disc.gpu.gemm.template import head_of
from blade.backends.disc.ir.convolution import has_own_channels, operands
from blade.backends.disc.ir.graph import Value, contiguous_strides
from blade.backends.disc.ir.views import same, view_of

if TYPE_CHECKING:
    from blade.backends.disc.gpu.gemm.product import GemmTile

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MOST_TAPS = 25  # more are arithmetic alone, which cuDNN has special kernels for
RANKS = (3, 4)
_TEXT = """\
@triton.jit
def kernel(
    %(names)s,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVEN_N: tl.constexpr,
):
    height = tl.cast(M, tl.int32)
    down = tl.cdiv(N, BLOCK_N)
    block_m = tl.program_id(0) // down
    block_n = tl.program_id(0) %% down
    rows = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
%(begin)s%(corner)s    x_at = x + corner[:, None] + columns[None, :]
    w_at = w + columns * W_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for tap in tl.static_range(TAPS_Y * TAPS_X):
        down_y = tap // TAPS_X * GAP_Y
        down_x = tap %% TAPS_X * GAP_X
        inside_y = (corner_y + down_y >= 0) & (corner_y + down_y < SIZE_Y)
        inside_x = (corner_x + down_x >= 0) & (corner_x + down_x < SIZE_X)
        further = tl.cast(down_y, tl.int64) * X_LINE + tl.cast(down_x, tl.int64) * X_PIXEL
        inside = (inside_y & inside_x)[:, None]
        if EVEN_N:
            a = tl.load(x_at + further, mask=inside, other=0.0)
            b = tl.load(w_at + tap * W_K)
        else:
            a = tl.load(x_at + further, mask=inside & (columns < N)[None, :], other=0.0)
            b = tl.load(w_at + tap * W_K, mask=columns < N, other=0.0)
        acc += a.to(tl.float32) * b.to(tl.float32)[None, :]
"""


def depthwise_window(value: Value) -> ConvWindow | None:
    """The window of ``value``, a `conv`; ``None`` if it is not depthwise, or this kernel cannot compute it."""
    given, a = operands(value), value.attrs
    if len(value.shape) not in RANKS or a["transposed"] or value.dtype not in DTYPES:
        return None
    if given.bias is not None or given.residual is not None or a["activation"] is not None:
        return None
    x, weight, view = given.x, given.weight, view_of(given.x)
    if not has_own_channels(value):
        return None
    if {x.dtype, weight.dtype} != {value.dtype} or columns_of(value) is None:
        return None
    strides = contiguous_strides(x.shape)
    if view is None or not same(x.shape, view.strides, strides):
        return None
    kernel = [int(d) for d in weight.shape[2:]]
    if prod(kernel) > MOST_TAPS:
        return None
    lines = (1,) * (len(value.shape) == 3)  # one per image

    def pair(numbers: Sequence[int], across: int) -> tuple[int, int]:
        y, x = (*(across for _ in lines), *numbers)
        return y, x

    return ConvWindow(
        1,
        pair(kernel, 1),
        pair(a["stride"], 1),
        pair(a["padding"], 0),
        pair(a["dilation"], 1),
        pixels=(*lines, *value.shape[1:-1]),  # type: ignore[arg-type]
        sizes=(*lines, *x.shape[1:-1]),  # type: ignore[arg-type]
        strides=(strides[0], strides[0 if lines else 1], strides[-2]),
    )


def depthwise_text(
    names: list[str], epilogue: str, tile: "GemmTile", window: ConvWindow, early: bool
) -> str:
    """The module; ``names``: the pointers, sizes and strides; ``epilogue``: its lines, which read ``acc``."""
    body = _TEXT % {
        "names": ", ".join([*names, *(f"{name}: tl.constexpr" for name in window.constants)]),
        "begin": "    gdc_launch_dependents()\n    gdc_wait()\n" if early else "",
        "corner": CORNER,
    }
    return f"{head_of(epilogue, early)}{body}{epilogue}"
