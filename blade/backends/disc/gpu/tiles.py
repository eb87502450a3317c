# SPDX-License-Identifier: Apache-2.0
"""The table of products: the block for each number of rows, and where it is taken without measuring.

Few rows: the weights are read once, by as many programs as there are multiprocessors, with all of a program's
loads under way at once. Many rows: ATen's product keeps the tensor cores busier, and a block of ours pays
where what follows it saves a launch.
"""

from dataclasses import replace

import torch

from blade.backends.disc.gpu import narrow_tiles
from blade.backends.disc.gpu.gemm import Product, Tile
from blade.backends.disc.gpu.plan import Plan, classes_of, merged
from blade.backends.disc.gpu.target import GpuTarget
from blade.backends.disc.kernel import Compute

_PROGRAM_DEPTH = 768  # what one program walks before it pays to share the depth

# Most rows -> the block of halves (m, n, k), its warps and stages: the fastest of many on an H200.
_BLOCKS: dict[int, Tile] = {
    32: Tile(32, 32, 128, warps=4, stages=4),
    128: Tile(64, 32, 128, warps=4, stages=4),
    512: Tile(64, 64, 64, warps=4, stages=4),
}

# The same of convolutions: in general, of one tap with few pixels, of several with very few and many channels.
_PIXELS = Tile(64, 64, 64, warps=4, stages=4)
_FEW_PIXELS = Tile(32, 32, 64, warps=4, stages=4)
_DEEP_PIXELS = Tile(64, 64, 128, warps=4, stages=3)
_PIXEL_DEPTH = 512  # as _PROGRAM_DEPTH, where rows lie in memory

_PLAIN = {128: Tile(64, 64, 64, warps=4, stages=5)}
"""Where nothing follows."""


def candidates(product: Product, most: int | None, target: GpuTarget) -> tuple[Tile, ...]:
    """What is measured for up to ``most`` rows (``None``: any number)."""
    if product.scales is not None:
        return narrow_tiles.candidates(product, most, target)
    tile = candidate(product, most, target)
    return () if tile is None else (tile,)


def candidate(product: Product, most: int | None, target: GpuTarget) -> Tile | None:
    """The tile for up to ``most`` rows (``None``: any number); ``None`` where ATen's will be faster."""
    if product.conv is not None:
        return None if most is None else _of_pixels(product, most, target)
    if most is None or (most > 128 and not follows(product)):
        return None
    block = next(b for rows, b in _BLOCKS.items() if most <= rows)
    block = _PLAIN.get(most, block) if not follows(product) else block
    k = block.k // 2 if product.x.dtype == torch.float32 else block.k
    programs = -(-most // block.m) * -(-product.columns // block.n)
    split = _split(product.depth, k, target.multiprocessors // programs)
    return replace(block, k=k, split=split)


def unmeasured(product: Product, target: GpuTarget) -> Plan:
    """Of halves the candidate where rows are few; else ATen. Of convolutions, ATen's; of 8 bits, never."""
    if product.scales is not None:
        best = (narrow_tiles.candidates(product, most, target)[-1] for most in classes_of(product))
        return merged(list(zip(classes_of(product), best, strict=True)))
    if product.conv is not None:
        return Plan(((None, None),))
    least = 256 if follows(product) else 128 if product.depth >= 2 * _PROGRAM_DEPTH else 32
    most = 0 if product.x.dtype == torch.float32 else least
    return merged(
        [
            (rows, candidate(product, rows, target) if rows is not None and rows <= most else None)
            for rows in classes_of(product)
        ]
    )


def follows(product: Product) -> bool:
    """Is more computed after the product than a bias added?"""
    return sum(isinstance(s, Compute) for s in product.epilogue.kernel.body) > 1


def _of_pixels(product: Product, most: int, target: GpuTarget) -> Tile:
    """A block of one tap's channels at a time."""
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
    """How many programs share the depth, evenly; at most ``most``, each with ``least`` of it."""
    shares = [s for s in (8, 6, 4, 3, 2) if s <= most and depth % (s * k) == 0]
    return next((s for s in shares if depth // s >= least), 1)
