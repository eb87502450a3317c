# SPDX-License-Identifier: Apache-2.0
"""The tiles of attention: queries and keys that a program takes at a time, by lengths and depth."""

from dataclasses import dataclass, replace

import torch

from blade.backends.disc.gpu.emit.tile_table import power


@dataclass(frozen=True)
class AttentionTile:
    """``queries`` x ``keys`` scores at a time; ``registers``: limit per thread, 0: no limit."""

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int = 0


@dataclass(frozen=True)
class AttentionTiles:
    """Tiles by lengths: few queries and few keys; few queries and more keys, which programs may split; many
    queries whose blocks all run at once; many queries and few keys; many queries and many keys. ``large``
    replaces the last one if there are more blocks of ``large`` than run at once."""

    few: AttentionTile
    wide: AttentionTile
    alone: AttentionTile
    short: AttentionTile
    long: AttentionTile
    even: AttentionTile | None = None  # for many queries, with a bias read by vector loads
    large: AttentionTile | None = None

    def fitted(self, depth: int, columns: int, dtype: torch.dtype, shared: int) -> "AttentionTiles":
        """These tiles with as many queries as ``shared`` bytes of shared memory hold in one stage."""
        widest = max(sum(parts_of(depth)), sum(parts_of(columns)))
        elements = shared // dtype.itemsize

        def fit(tile: AttentionTile) -> AttentionTile:
            while tile.queries > 16 and _least(tile, widest) > elements:
                tile = replace(tile, queries=tile.queries // 2)
            return tile

        return AttentionTiles(
            fit(self.few),
            fit(self.wide),
            fit(self.alone),
            fit(self.short),
            fit(self.long),
            self.even and fit(self.even),
            self.large and fit(self.large),
        )


def _least(tile: AttentionTile, widest: int) -> int:
    """Elements of shared memory in one stage: the queries, a block of keys or of values, the scores."""
    return (tile.queries + tile.keys) * widest + tile.queries * tile.keys


def tiles(
    depth: int, columns: int, dtype: torch.dtype, matrix: bool = False, causal: bool = False
) -> AttentionTiles:
    """The tiles for a head size, measured on an H200 with shapes of vision, language and diffusion models.

    Registers hold a tile's accumulators and scores; shared memory holds the keys and values of ``stages``
    tiles and, with ``matrix``, a bias per score. Tiles that spill registers take six times as long. With 64
    queries per tile, deep heads need more bandwidth for keys and values than L2 has. With 128 queries, two
    programs share a multiprocessor if a thread has at most 128 registers, which does not spill in the loop.
    """
    widest = max(sum(parts_of(depth)), sum(parts_of(columns)))
    if dtype == torch.float32:
        keys, queries = (32, 64) if widest <= 128 else (16, 32)
        tall, low = (
            AttentionTile(queries, keys, 4 if widest <= 64 else 8, 2),
            AttentionTile(16, keys, 4, 2),
        )
        return AttentionTiles(low, low, tall, tall, tall)
    if widest <= 64:
        few, wide, long = (
            AttentionTile(16, 32, 4, 2),
            AttentionTile(16, 128, 4, 2),
            AttentionTile(64, 64, 4, 3),
        )
        if matrix:
            return AttentionTiles(few, wide, long, long, long, long)
        return AttentionTiles(
            few, wide, AttentionTile(64, 128, 4, 2), AttentionTile(64, 64, 4, 2), long
        )
    few, wide, short = (
        AttentionTile(16, 64, 4, 3),
        AttentionTile(16, 128, 4, 2),
        AttentionTile(64, 64, 4, 2),
    )
    if widest <= 128 and matrix:
        low = AttentionTile(64, 32, 4, 3)
        return AttentionTiles(few, wide, low, low, low, short)
    if widest <= 128:
        deep, large = (
            AttentionTile(64, 64, 4, 3),
            AttentionTile(128, 64, 8, 3 if widest < 128 else 2, 128),
        )
        alone, long = (AttentionTile(64, 128, 4, 2), short) if widest < 128 else (deep, deep)
        if causal:
            return AttentionTiles(few, wide, alone, short, deep)
        return AttentionTiles(few, wide, alone, short, long, large=large)
    few = AttentionTile(16, 32, 4, 2)
    long = (
        AttentionTile(64, 32, 8, 2)
        if matrix
        else short
        if widest <= 192
        else AttentionTile(128, 64, 8, 2)
    )
    return AttentionTiles(few, few, long, long, long)


def parts_of(size: int) -> tuple[int, int]:
    """Two blocks that sum to ``size`` columns; or one block that covers them, and 0."""
    whole = padded(size)
    first = whole // 2
    second = size - first
    exact = first >= 16 and second >= 16 and second < first and second == power(second)
    return (first, second) if exact else (whole, 0)


def padded(size: int) -> int:
    """The block that covers ``size``: a power of two that tensor cores take."""
    return max(16, power(size))
