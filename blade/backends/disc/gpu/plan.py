# SPDX-License-Identifier: Apache-2.0
"""Which kernel computes a product at which number of rows: the choices, and those taken without measuring.

Plan(((64, Tile(32, 32, 128)), (None, None)))      # up to 64 rows this tile, beyond them ATen's product
"""

from dataclasses import dataclass

import sympy

from blade.backends.disc.gpu.gemm import Product, Tile
from blade.backends.disc.kernel import Dim

CLASSES: tuple[int | None, ...] = (32, 128, 256, 512, None)
"""The most rows of each class, inclusive; sizes of one class share a choice."""

PIXEL_CLASSES: tuple[int | None, ...] = (64, 256, 1024, 4096, 16384, None)
"""The same of convolutions, whose rows are pixels."""

NARROW_CLASSES: tuple[int | None, ...] = (16, 64, 128, 256, 512, 1024, None)
"""The same of products of 8 bits."""


@dataclass(frozen=True)
class Plan:
    """(most rows, tile) in rising order, the last one without a limit; no tile: ATen's product."""

    ranges: tuple[tuple[int | None, Tile | None], ...]

    def __post_init__(self) -> None:
        limits = [most for most, _ in self.ranges]
        assert limits[-1] is None and None not in limits[:-1], self


def classes(rows: Dim, known: tuple[int | None, ...] = CLASSES) -> tuple[int | None, ...]:
    """Those of ``known`` that ``rows`` can be in."""
    if not isinstance(rows, int):
        return known
    return (next(most for most in known if most is None or rows <= most),)


def classes_of(product: Product) -> tuple[int | None, ...]:
    """Those that its rows can be in."""
    if product.scales is not None:
        return classes(product.rows, NARROW_CLASSES)
    return classes(product.rows, CLASSES if product.conv is None else PIXEL_CLASSES)


def merged(choices: list[tuple[int | None, Tile | None]]) -> Plan:
    """A plan of one choice per class; neighbours that agree are one range, and the last one has no end."""
    ranges: list[tuple[int | None, Tile | None]] = []
    for most, tile in choices:
        if ranges and ranges[-1][1] == tile:
            ranges.pop()
        ranges.append((most, tile))
    return Plan((*ranges[:-1], (None, ranges[-1][1])))


def between(size: Dim, low: int, most: int | None) -> sympy.Basic:
    """low <= size <= most, sizes being at least 0."""
    above = sympy.true if low == 0 else sympy.Ge(size, low)
    return above if most is None else sympy.And(above, sympy.Le(size, most))
