# SPDX-License-Identifier: Apache-2.0
"""Pooling of images on a GPU (`spatial` max_pool2d and avg_pool2d): every pixel is read from memory once.

launches = pool(value, target, facts)       # None: ATen's

A program computes some pixels and channels of the result; pixels that windows share come from the cache.
"""

from math import gcd, prod

import torch

from blade.backends.disc.gpu.compile.triton_unit import LaunchChoice, named_unit
from blade.backends.disc.gpu.emit.device_functions import EARLY
from blade.backends.disc.gpu.emit.library_launch import LibraryLaunch, pointer, starts_aligned
from blade.backends.disc.gpu.emit.specialize_sizes import specialize_sizes
from blade.backends.disc.gpu.emit.tile_table import power
from blade.backends.disc.gpu.emit.tiling import ceil_div
from blade.backends.disc.gpu.gemm.conv_as_gemm import CORNER, ConvWindow
from blade.backends.disc.ir.graph import (
    Value,
    contiguous_strides,
    numel,
    plain,
)
from blade.backends.disc.ir.size_facts import SizeRelations
from blade.backends.disc.ir.views import same, view_of
from blade.backends.disc.target.gpu import GpuTarget

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TAPS = 25  # largest window that is unrolled
POINTS = 1024  # per program
CHANNELS = 64

_TEXT = """\
import triton
import triton.language as tl
%(imports)s

@triton.jit
def kernel(%(names)s, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, EVEN: tl.constexpr):
%(begin)s    height = tl.cast(M, tl.int32)
    across = tl.cdiv(tl.cast(C, tl.int32), BLOCK_C)
    rows = tl.program_id(0) // across * BLOCK_P + tl.arange(0, BLOCK_P)
    channels = tl.program_id(0) %% across * BLOCK_C + tl.arange(0, BLOCK_C)
%(corner)s    x_at = x + (corner // EVEN * EVEN)[:, None] + channels[None, :]
    known = (rows < height)[:, None] & (channels < C)[None, :]
    total = tl.full((BLOCK_P, BLOCK_C), %(first)s, tl.float32)
    count = tl.zeros((BLOCK_P,), tl.float32)
    for tap in tl.static_range(TAPS_Y * TAPS_X):
        down_y = tap // TAPS_X * GAP_Y
        down_x = tap %% TAPS_X * GAP_X
        inside_y = (corner_y + down_y >= 0) & (corner_y + down_y < SIZE_Y)
        inside_x = (corner_x + down_x >= 0) & (corner_x + down_x < SIZE_X)
        seen = known & (inside_y & inside_x)[:, None]
        further = (down_y * X_LINE + down_x * X_PIXEL) // EVEN * EVEN
        value = tl.load(x_at + further, mask=seen, other=%(first)s).to(tl.float32)
        total = %(total)s
%(count)s    y_at = y + rows.to(tl.int64)[:, None] * C + channels[None, :]
    tl.store(y_at, (%(result)s).to(y.dtype.element_ty), mask=known)
"""

_MAX = {
    "first": 'float("-inf")',
    "total": "tl.maximum(total, value, propagate_nan=tl.PropagateNan.ALL)",
    "count": "",
    "result": "total",
}
_SUM = {"first": "0.0", "total": "total + value"}
_INSIDE = "        count += (inside_y & inside_x).to(tl.float32)\n"
_PADDED = """\
        padded_y, padded_x = corner_y + down_y < SIZE_Y + PAD_Y, corner_x + down_x < SIZE_X + PAD_X
        count += (padded_y & padded_x).to(tl.float32)
"""
aten = torch.ops.aten


def pool(value: Value, target: GpuTarget, facts: SizeRelations) -> list[LibraryLaunch] | None:
    """The launches that compute ``value``, a `spatial`; ``None`` if ATen computes it."""
    window = window_of(value)
    if window is None:
        return None
    [x], is_max = value.args, value.attrs["target"] is aten.max_pool2d.default
    rows, channels = numel(value.shape[:-1]), value.shape[-1]
    numbers = specialize_sizes({"M": rows, "C": channels, **window.numbers}, facts)
    block_c = min(CHANNELS, power(channels)) if isinstance(channels, int) else CHANNELS
    block_p = POINTS // block_c
    # pixels begin at multiples of `even`; the hint makes loads that wide
    even = gcd(channels, 16) if isinstance(channels, int) else 1
    constants = {**window.constants, "BLOCK_P": block_p, "BLOCK_C": block_c, "EVEN": even}
    early = target.starts_early
    names = ["x", "y", *numbers.names, *(f"{n}: tl.constexpr" for n in window.constants)]
    text = _TEXT % {
        "imports": EARLY if early else "",
        "names": ", ".join(names),
        "begin": "    gdc_launch_dependents()\n    gdc_wait()\n" if early else "",
        "corner": CORNER,
        **(_MAX if is_max else _average(value)),
    }
    pointers = (("x", pointer(x)), ("y", pointer(value)))
    unit = named_unit(
        "max_pool" if is_max else "avg_pool",
        text,
        (*pointers, *numbers.signature),
        (*numbers.constants, *constants.items()),
        (*(n for n, v in (("x", x), ("y", value)) if starts_aligned(v, facts)), *numbers.aligned),
        early=early,
    )
    blocks = plain(ceil_div(rows, block_p) * ceil_div(channels, block_c))
    return [LibraryLaunch(LaunchChoice(None, unit, (blocks, 1, 1)), (x, value), numbers.values)]


def _average(value: Value) -> dict[str, str]:
    """What a sum is divided by: a number, the taps inside of the padded image, or those inside of the image."""
    *_, padded, divisor = value.attrs["template"]
    if divisor is not None:
        return {**_SUM, "count": "", "result": f"total / {float(divisor)}"}
    count = _PADDED if padded else _INSIDE
    return {**_SUM, "count": count, "result": "total / count[:, None]"}


def window_of(value: Value) -> ConvWindow | None:
    """The pooling window of ``value``; ``None`` if ATen computes it."""
    targets = (aten.max_pool2d.default, aten.avg_pool2d.default)
    if value.attrs["target"] not in targets or value.dtype not in DTYPES:
        return None
    [x], (_, kernel, stride, padding, *rest) = value.args, value.attrs["template"]
    dilation = rest[0] if value.attrs["target"] is targets[0] else (1, 1)
    view = view_of(x)
    if view is None or not same(x.shape, view.strides, contiguous_strides(x.shape)):
        return None
    pairs = (kernel, stride or kernel, padding, dilation)
    if any(len(p) != 2 or not all(isinstance(n, int) for n in p) for p in pairs):
        return None
    if prod(kernel) > TAPS:
        return None
    strides = contiguous_strides(x.shape)
    return ConvWindow(
        0,
        *pairs,
        pixels=(value.shape[1], value.shape[2]),
        sizes=(x.shape[1], x.shape[2]),
        strides=(strides[0], strides[1], strides[2]),
    )
