# SPDX-License-Identifier: Apache-2.0
"""The tiles of attention: how many queries and keys a program takes at a time, by lengths and depth."""

from dataclasses import dataclass

import torch

from blade.backends.disc.gpu.shapes import power


@dataclass(frozen=True)
class Tile:
    """``queries`` x ``keys`` scores at a time; ``registers``: the most of a thread, 0: as many as it wants."""

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int = 0


@dataclass(frozen=True)
class Tiles:
    """By lengths: for few queries and few keys; for few queries of more keys, which programs may share; and for many
    queries: where there are no more blocks of them than run at once, where keys are few, and where they are many.
    ``large``: in the place of the last where there are more blocks of its queries than run at once, too."""

    few: Tile
    wide: Tile
    alone: Tile
    short: Tile
    long: Tile
    even: Tile | None = None  # for many queries with a bias that is read in vectors
    large: Tile | None = None


def tiles(
    depth: int, columns: int, dtype: torch.dtype, matrix: bool = False, causal: bool = False
) -> Tiles:
    """Measured on an H200, shapes from vision, language and diffusion models.

    Accumulators and scores of a tile are in registers, the keys and values of ``stages`` tiles in shared memory.
    ``matrix``: so is a bias of its own for every score. Tiles that spilled registers took six times as long.
    Of 64 queries at a time, deep heads read more keys and values than the L2 cache delivers; of 128, two programs
    run at once on a multiprocessor if a thread has no more than 128 registers, which spills nothing in the loop.
    """
    widest = max(sum(parts_of(depth)), sum(parts_of(columns)))
    if dtype == torch.float32:
        keys, queries = (32, 64) if widest <= 128 else (16, 32)
        tall, low = Tile(queries, keys, 4 if widest <= 64 else 8, 2), Tile(16, keys, 4, 2)
        return Tiles(low, low, tall, tall, tall)
    if widest <= 64:
        few, wide, long = Tile(16, 32, 4, 2), Tile(16, 128, 4, 2), Tile(64, 64, 4, 3)
        if matrix:
            return Tiles(few, wide, long, long, long, long)
        return Tiles(few, wide, Tile(64, 128, 4, 2), Tile(64, 64, 4, 2), long)
    few, wide, short = Tile(16, 64, 4, 3), Tile(16, 128, 4, 2), Tile(64, 64, 4, 2)
    if widest <= 128 and matrix:
        low = Tile(64, 32, 4, 3)
        return Tiles(few, wide, low, low, low, short)
    if widest <= 128:
        deep, large = Tile(64, 64, 4, 3), Tile(128, 64, 8, 3 if widest < 128 else 2, 128)
        alone, long = (Tile(64, 128, 4, 2), short) if widest < 128 else (deep, deep)
        if causal:
            return Tiles(few, wide, alone, short, deep)
        return Tiles(few, wide, alone, short, long, large=large)
    few = Tile(16, 32, 4, 2)
    long = Tile(64, 32, 8, 2) if matrix else short if widest <= 192 else Tile(128, 64, 8, 2)
    return Tiles(few, few, long, long, long)


def parts_of(size: int) -> tuple[int, int]:
    """Two blocks that are ``size`` columns together, the second one 0 where one that covers them must do."""
    whole = padded(size)
    first = whole // 2
    second = size - first
    exact = first >= 16 and second >= 16 and second < first and second == power(second)
    return (first, second) if exact else (whole, 0)


def padded(size: int) -> int:
    """The block that covers ``size``: a power of two that tensor cores take."""
    return max(16, power(size))
