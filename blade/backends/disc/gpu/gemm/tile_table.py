# SPDX-License-Identifier: Apache-2.0
"""The table of products: the block for each number of rows, and the plan without timings.

With few rows, one program per multiprocessor reads the weights once, with all its loads in flight. With many
rows, ATen's product uses tensor cores better, and our block pays if its epilogue saves a launch.
"""

from dataclasses import replace

import torch

from blade.backends.disc.gpu.emit.tile_table import power
from blade.backends.disc.gpu.gemm import tile_table_8bit as narrow_tiles
from blade.backends.disc.gpu.gemm.plan import GemmPlan, classes_of, merged
from blade.backends.disc.gpu.gemm.product import GemmProduct, GemmTile
from blade.backends.disc.ir.kernel import Compute
from blade.backends.disc.target.gpu import GpuTarget

_PROGRAM_DEPTH = 768  # depth per program from which a split pays

# Most rows -> the block of halves (m, n, k), its warps and stages: the fastest of many on an H200.
_BLOCKS: dict[int, GemmTile] = {
    32: GemmTile(32, 32, 128, warps=4, stages=4),
    128: GemmTile(64, 32, 128, warps=4, stages=4),
    512: GemmTile(64, 64, 64, warps=4, stages=4),
}

# Blocks of convolutions: in general; one tap and few pixels; several taps, very few pixels, many channels.
_PIXELS = GemmTile(64, 64, 64, warps=4, stages=4)
_FEW_PIXELS = GemmTile(32, 32, 64, warps=4, stages=4)
_DEEP_PIXELS = GemmTile(64, 64, 128, warps=4, stages=3)
_PIXEL_DEPTH = 512  # _PROGRAM_DEPTH for rows that are stored in memory

_ODD = GemmTile(128, 256, 64, warps=8, stages=3)
"""The block of products whose rows begin at any multiple of 2 bytes, for which ATen has no fast kernel."""

_CHANNELS = 64  # of a depthwise convolution
_POINTS = 2048  # of a program of a depthwise convolution

_PLAIN = {128: GemmTile(64, 64, 64, warps=4, stages=5)}
"""The blocks of products without an epilogue."""


def candidates(product: GemmProduct, most: int | None, target: GpuTarget) -> tuple[GemmTile, ...]:
    """The tiles to time for up to ``most`` rows (``None``: any number)."""
    if product.scales is not None:
        return narrow_tiles.candidates(product, most, target)
    tile = candidate(product, most, target)
    return () if tile is None else (tile,)


def candidate(product: GemmProduct, most: int | None, target: GpuTarget) -> GemmTile | None:
    """The tile for up to ``most`` rows (``None``: any number); ``None`` if ATen's product is faster."""
    if product.depthwise:
        return _of_channels(product, most, target)
    if product.conv is not None:
        return None if most is None else _of_pixels(product, most, target)
    if is_odd(product) and (most is None or most > 128):
        return _ODD
    if most is None or (most > 128 and not follows(product)):
        return None
    block = next(b for rows, b in _BLOCKS.items() if most <= rows)
    block = _PLAIN.get(most, block) if not follows(product) else block
    k = block.k // 2 if product.x.dtype == torch.float32 else block.k
    programs = -(-most // block.m) * -(-product.columns // block.n)
    split = _split(product.depth, k, target.multiprocessors // programs)
    return replace(block, k=k, split=split)


def unmeasured(product: GemmProduct, target: GpuTarget) -> GemmPlan:
    """The plan without timings: a tile for 8 bits and for few rows of halves, otherwise ATen."""
    if product.scales is not None:
        best = (narrow_tiles.candidates(product, most, target)[-1] for most in classes_of(product))
        return merged(list(zip(classes_of(product), best, strict=True)))
    if product.conv is not None:
        return GemmPlan(((None, None),))
    least = 256 if follows(product) else 128 if product.depth >= 2 * _PROGRAM_DEPTH else 32
    most = 0 if product.x.dtype == torch.float32 else least
    return merged(
        [
            (rows, candidate(product, rows, target) if rows is not None and rows <= most else None)
            for rows in classes_of(product)
        ]
    )


def follows(product: GemmProduct) -> bool:
    """Does the epilogue do more than add a bias?"""
    return sum(isinstance(s, Compute) for s in product.epilogue.kernel.body) > 1


def is_odd(product: GemmProduct) -> bool:
    """Are the rows of the result no multiples of 16 bytes, as those of most vocabularies?"""
    return product.x.dtype.itemsize == 2 and product.columns % 8 != 0 and product.columns > _ODD.n


def _of_channels(product: GemmProduct, most: int | None, target: GpuTarget) -> GemmTile:
    """The tile of a depthwise convolution: fewer pixels where there would be too few programs."""
    whole = (n for n in (_CHANNELS, _CHANNELS // 2) if product.columns % n == 0)
    n = next(whole, min(_CHANNELS, power(product.columns)))
    m, across = max(1, _POINTS // n), -(-product.columns // n)
    while most is not None and m > 8 and -(-most // m) * across < 2 * target.multiprocessors:
        m //= 2
    return GemmTile(m, n, 1)


def _of_pixels(product: GemmProduct, most: int, target: GpuTarget) -> GemmTile:
    """The tile of a convolution; its depth lies within one tap's channels."""
    window, block = product.window, _PIXELS
    channels = product.depth if window is None else window.channels
    if window is None and most <= 256 and product.columns <= product.depth:
        block = _FEW_PIXELS
    elif most <= 64 and product.depth > channels and channels % _DEEP_PIXELS.k == 0:
        block = _DEEP_PIXELS
    k = block.k if channels % block.k == 0 else 32
    n = block.n if product.columns > 32 else 32
    programs = -(-most // block.m) * -(-product.columns // n)
    least = _PIXEL_DEPTH if window is None else _PROGRAM_DEPTH
    split = _split(product.depth, k, target.multiprocessors // programs, least)
    return replace(block, n=n, k=k, split=split)


def _split(depth: int, k: int, most: int, least: int = _PROGRAM_DEPTH) -> int:
    """The number of programs that split the depth evenly: at most ``most``, each with at least ``least``."""
    shares = [s for s in (8, 6, 4, 3, 2) if s <= most and depth % (s * k) == 0]
    return next((s for s in shares if depth // s >= least), 1)
