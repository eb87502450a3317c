# SPDX-License-Identifier: Apache-2.0
"""The table of 8-bit products: the blocks to time at each number of rows.

ATen's product (scaled_mm_calls.py), if it exists, is timed with them. From sm_90 on, tensor cores read
blocks of 64 rows or more directly from shared memory (wgmma). Smaller blocks of 8-bit floats are first
widened to 16 bits, which pays only for very few rows.
"""

from dataclasses import replace

import torch

from blade.backends.disc.gpu.emit.tile_table import power
from blade.backends.disc.gpu.gemm.product import GemmProduct, GemmTile
from blade.backends.disc.target.gpu import GpuTarget

EIGHT_BIT = (torch.int8, torch.float8_e4m3fn)


MANY = 4096
"""Rows at which blocks for any number of rows are timed."""

_LEAST_DEPTH = 512  # depth per program of a split, at least
_BYTES_KEPT = 8 << 10  # shared memory reserved for all but operands

_WIDE = GemmTile(64, 64, 128, warps=4, stages=5)
_TALL = GemmTile(64, 128, 128, warps=4, stages=4)
_SQUARE = GemmTile(128, 128, 128, warps=4, stages=3)
_TILES: dict[int | None, tuple[GemmTile, ...]] = {
    16: (GemmTile(16, 64, 256, warps=4, stages=4), GemmTile(16, 32, 256, warps=4, stages=4)),
    64: (GemmTile(64, 32, 256, warps=4, stages=4), _WIDE),
    128: (GemmTile(128, 64, 128, warps=8, stages=4), _WIDE),
    256: (_WIDE, GemmTile(128, 128, 128, warps=8, stages=4)),
    512: (_SQUARE, _TALL),
    1024: (_SQUARE, _TALL, GemmTile(128, 256, 128, warps=8, stages=3)),
    None: (_SQUARE, GemmTile(128, 256, 128, warps=8, stages=4)),
}
"""The fastest of several on an H200, at sizes of BERT and of Llama."""


def candidates(product: GemmProduct, most: int | None, target: GpuTarget) -> tuple[GemmTile, ...]:
    """Tiles for up to ``most`` rows (``None``: any number), the most promising last; at least one."""
    rows = MANY if most is None else most
    found = [_fitted(tile, product, rows, target) for tile in _TILES[most]]
    return tuple(dict.fromkeys(found))


def _fitted(tile: GemmTile, product: GemmProduct, rows: int, target: GpuTarget) -> GemmTile:
    """``tile``, limited to the product's width and depth, with as many stages as shared memory holds."""
    n = min(tile.n, max(16, power(product.columns)))
    k = min(tile.k, max(32, power(product.depth)))
    stage = (tile.m + n) * k
    stages = max(2, min(tile.stages, (target.shared - _BYTES_KEPT) // stage))
    programs = -(-rows // tile.m) * -(-product.columns // n)
    split = _split(product.depth, k, target.multiprocessors // programs)
    return replace(tile, n=n, k=k, stages=stages, split=split)


def _split(depth: int, k: int, most: int) -> int:
    """The number of programs that split the depth evenly, at most ``most``."""
    shares = [s for s in (8, 6, 4, 3, 2) if s <= most and depth % (s * k) == 0]
    return next((s for s in shares if depth // s >= _LEAST_DEPTH), 1)
