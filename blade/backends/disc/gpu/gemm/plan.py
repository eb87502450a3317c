# SPDX-License-Identifier: Apache-2.0
"""The plan of a product: the kernel for each number of rows.

GemmPlan(((64, GemmTile(32, 32, 128)), (None, None)))      # up to 64 rows this tile, above ATen's product
"""

from dataclasses import dataclass

import sympy

from blade.backends.disc.gpu.gemm.product import GemmProduct, GemmTile
from blade.backends.disc.ir.kernel import Dim

CLASSES: tuple[int | None, ...] = (32, 128, 256, 512, None)
"""The most rows of each class, inclusive; sizes of a class share a kernel."""

PIXEL_CLASSES: tuple[int | None, ...] = (64, 256, 1024, 4096, 16384, None)
"""The classes of convolutions, whose rows are pixels."""

EIGHT_BIT_CLASSES: tuple[int | None, ...] = (16, 64, 128, 256, 512, 1024, None)
"""The classes of 8-bit products."""


@dataclass(frozen=True)
class GemmPlan:
    """(most rows, tile) in increasing order, the last without a limit; tile ``None``: ATen's product."""

    ranges: tuple[tuple[int | None, GemmTile | None], ...]

    def __post_init__(self) -> None:
        limits = [most for most, _ in self.ranges]
        assert limits[-1] is None and None not in limits[:-1], self

    @property
    def by_one(self) -> "GemmPlan":
        """The plan with ATen's product for all rows, or for none, as its last range has it.

        ATen allocates the results of convolutions, so that a buffer of ours cannot be written by either.
        """
        tile = self.ranges[-1][1]
        choices: list[tuple[int | None, GemmTile | None]] = []
        for most, own in reversed(self.ranges):
            tile = tile if tile is None or own is None else own
            choices.insert(0, (most, tile))
        return merged(choices)


def classes(rows: Dim, known: tuple[int | None, ...] = CLASSES) -> tuple[int | None, ...]:
    """The classes of ``known`` that can contain ``rows``."""
    if not isinstance(rows, int):
        return known
    return (next(most for most in known if most is None or rows <= most),)


def classes_of(product: GemmProduct) -> tuple[int | None, ...]:
    """The classes that can contain the rows of ``product``."""
    if product.scales is not None:
        return classes(product.rows, EIGHT_BIT_CLASSES)
    return classes(product.rows, CLASSES if product.conv is None else PIXEL_CLASSES)


def merged(choices: list[tuple[int | None, GemmTile | None]]) -> GemmPlan:
    """A plan from one choice per class; equal neighbours are merged, and the last range is open."""
    ranges: list[tuple[int | None, GemmTile | None]] = []
    for most, tile in choices:
        if ranges and ranges[-1][1] == tile:
            ranges.pop()
        ranges.append((most, tile))
    return GemmPlan((*ranges[:-1], (None, ranges[-1][1])))


def between(size: Dim, low: int, most: int | None) -> sympy.Basic:
    """The condition low <= size <= most, for size >= 0."""
    above = sympy.true if low == 0 else sympy.Ge(size, low)
    return above if most is None else sympy.And(above, sympy.Le(size, most))
