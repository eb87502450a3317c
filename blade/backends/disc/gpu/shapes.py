# SPDX-License-Identifier: Apache-2.0
"""The table of tile shapes: rows x columns a program computes at a time, and by how many warps.

    persistent(768, 2)      # Tile(rows=1, columns=1024, warps=4): a row of 768 halves lives in registers

The one place where such numbers are; those here aim at 16-byte accesses and 8 to 32 elements a thread.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """``rows`` and ``columns`` are powers of two."""

    rows: int
    columns: int
    warps: int


ACCESS_BYTES = 16  # the widest load and store
LONGEST = 16384  # columns of a row that still lives in registers

# Longest rows each class takes where the length is known at run time only; the rest is walked.
CLASSES = (256, 1024, 4096)
# The same where rows begin anywhere, so that nothing is vectorized.
UNALIGNED_CLASSES = (1024,)

# Elements in a row that lives in registers -> rows of one program, warps.
_PERSISTENT: dict[int, tuple[int, int]] = {
    **{columns: (1024 // columns, 4) for columns in (1, 2, 4, 8, 16, 32, 64, 128)},
    256: (4, 4),
    512: (2, 4),
    1024: (1, 4),
    2048: (1, 4),
    4096: (1, 8),
    8192: (1, 16),
    16384: (1, 16),
}
WALKED = Tile(1, 4096, 8)
UNALIGNED_WALKED = Tile(1, 2048, 8)
_SIDE_BY_SIDE_BYTES = (
    64  # of rows side by side in memory: few, so that there are programs for every processor
)
_SIDE_BY_SIDE = 8192  # elements, by 16 warps: what is in flight must cover the way to memory
TRANSPOSED = Tile(64, 64, 8)
FLAT = Tile(1, 1024, 4)
_POINTS = 1024  # of a tile of a kernel that reduces nothing


def persistent(length: int, count: int | None) -> Tile:
    """For ``count`` whole rows of at most ``length``, which is at most ``LONGEST``."""
    columns = power(length)
    rows, warps = _PERSISTENT[columns]
    return Tile(rows if count is None else min(rows, power(count)), columns, warps)


def walked(aligned: bool) -> Tile:
    """For rows that are walked in pieces."""
    return WALKED if aligned else UNALIGNED_WALKED


def column_sums(itemsize: int) -> Tile:
    """For rows that lie side by side in memory, the narrowest of their elements of ``itemsize`` bytes."""
    rows = _SIDE_BY_SIDE_BYTES // max(itemsize, 2)
    return Tile(rows, _SIDE_BY_SIDE // rows, 16)


def pointwise(length: int | None, count: int | None) -> Tile:
    """For ``count`` rows of ``length`` (``None``: of some hundred) of which nothing is reduced."""
    if length is None:
        rows = _POINTS // 128
        return Tile(rows if count is None else min(rows, power(count)), 128, 4)
    columns = min(power(length), _POINTS)
    while columns > 128 and length % columns:  # no mask, rather than the fewest pieces
        columns //= 2
    if length % columns:
        columns = min(power(length), _POINTS)
    rows = _POINTS // columns
    return Tile(rows if count is None else min(rows, power(count)), columns, 4)


def power(number: int) -> int:
    """The least power of two that is not below ``number``."""
    return 1 << max(0, number - 1).bit_length()
