# SPDX-License-Identifier: Apache-2.0
"""The table of products of 8 bits: which blocks are tried at each number of rows.

ATen's product (scaled_call.py), where it has one, is measured beside them. From sm_90 on tensor cores read
blocks of 64 rows or more straight from shared memory (wgmma); floats of 8 bits in smaller
blocks are first widened to 16, which pays for very few rows alone.
"""

from dataclasses import replace

from blade.backends.disc.gpu.gemm import Product, Tile
from blade.backends.disc.gpu.shapes import power
from blade.backends.disc.gpu.target import GpuTarget

MANY = 4096
"""Rows at which blocks for any number of rows are measured."""

_LEAST_DEPTH = 512  # what one of the programs that share the depth walks
_BYTES_KEPT = 8 << 10  # of shared memory, for everything but operands

_WIDE = Tile(64, 64, 128, warps=4, stages=5)
_TALL = Tile(64, 128, 128, warps=4, stages=4)
_SQUARE = Tile(128, 128, 128, warps=4, stages=3)
_TILES: dict[int | None, tuple[Tile, ...]] = {
    16: (Tile(16, 64, 256, warps=4, stages=4), Tile(16, 32, 256, warps=4, stages=4)),
    64: (Tile(64, 32, 256, warps=4, stages=4), _WIDE),
    128: (Tile(128, 64, 128, warps=8, stages=4), _WIDE),
    256: (_WIDE, Tile(128, 128, 128, warps=8, stages=4)),
    512: (_SQUARE, _TALL),
    1024: (_SQUARE, _TALL, Tile(128, 256, 128, warps=8, stages=3)),
    None: (_SQUARE, Tile(128, 256, 128, warps=8, stages=4)),
}
"""The fastest of several on an H200, at sizes of BERT and of Llama."""


def candidates(product: Product, most: int | None, target: GpuTarget) -> tuple[Tile, ...]:
    """For up to ``most`` rows (``None``: any number), the most promising last; at least one."""
    rows = MANY if most is None else most
    found = [_fitted(tile, product, rows, target) for tile in _TILES[most]]
    return tuple(dict.fromkeys(found))


def _fitted(tile: Tile, product: Product, rows: int, target: GpuTarget) -> Tile:
    """``tile`` no wider or deeper than the product, with as many stages as shared memory holds."""
    n = min(tile.n, max(16, power(product.columns)))
    k = min(tile.k, max(32, power(product.depth)))
    stage = (tile.m + n) * k
    stages = max(2, min(tile.stages, (target.shared - _BYTES_KEPT) // stage))
    programs = -(-rows // tile.m) * -(-product.columns // n)
    split = _split(product.depth, k, target.multiprocessors // programs)
    return replace(tile, n=n, k=k, stages=stages, split=split)


def _split(depth: int, k: int, most: int) -> int:
    """How many programs share the depth, evenly; at most ``most``."""
    shares = [s for s in (8, 6, 4, 3, 2) if s <= most and depth % (s * k) == 0]
    return next((s for s in shares if depth // s >= _LEAST_DEPTH), 1)
