# SPDX-License-Identifier: Apache-2.0
"""The table of tile shapes: rows x columns a program computes at a time, and by how many warps.

    persistent(768, 2)      # Tile(rows=1, columns=1024, warps=4): a row of 768 halves lives in registers

The one place where such numbers are; those here aim at 16-byte accesses and 8 to 32 elements a thread.
"""

from dataclasses import dataclass, replace

from blade.backends.disc.gpu.target import WARP


@dataclass(frozen=True)
class Tile:
    """``rows`` and ``columns`` are powers of two; there are that many columns in each of ``pieces``, side by side.

    A row that is a piece of as many columns as a warp accesses at once, or several, is one warp's alone: reducing
    it needs no shared memory and no barrier, and columns that are not there cost little.
    """

    rows: int
    columns: int
    warps: int
    pieces: int = 1

    @property
    def elements(self) -> int:
        return self.rows * self.columns * self.pieces


ACCESS_BYTES = 16  # the widest load and store
LONGEST = 16384  # columns of a row that still lives in registers

# Programs that let the next launch start early start one every 1.2 ns, whatever they do (others: one every 0.6 ns):
# where there are more than so many, of loops and of rows (about one for each place on a multiprocessor), each should
# move as much as memory does meanwhile, and spare.
FEW = 2048
FEW_ROWS = 1024
PROGRAM_BYTES = 6000
_MOST = 4096  # elements of a program that was made larger for it
_EACH = 16  # elements of its threads
_HALVES = ACCESS_BYTES // 2  # elements of a vector
_SHORT = _HALVES * WARP  # columns that a warp accesses at once
_PIECES = 1024  # the most columns of rows that are taken in pieces
_MOST_PIECES = 5
_PIECES_WARPS = 4  # of many programs whose rows are
_FEW_PIECES_WARPS = 2  # of few
_PIECES_EACH = 32  # the most elements of a thread that has several rows
_LONG_PIECE = 1024  # columns, by 4 warps, of rows in pieces that are longer
_MOST_LONG_PIECES = 4

# Longest rows each class takes where the length is known at run time only; the rest is walked.
CLASSES = (256, 512, 1024, 4096)
# The same where rows begin anywhere, so that nothing is vectorized.
UNALIGNED_CLASSES = (256, 1024)

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
# The same for rows of any length up to that; and with rows in pieces, of halves.
_UP_TO = {
    256: Tile(8, 256, 4),
    512: Tile(4, 512, 4),
    1024: Tile(2, 1024, 4),
    4096: Tile(1, 4096, 8),
}
_PIECES_UP_TO = {512: Tile(4, 256, 4, 2), 1024: Tile(4, 256, 4, 4)}
WALKED = Tile(1, 4096, 8)
UNALIGNED_WALKED = Tile(1, 2048, 8)
_SIDE_BY_SIDE_ROWS = 16  # few, so that there are programs for every processor
_SIDE_BY_SIDE = 8192  # elements, by 16 warps: what is in flight must cover the way to memory
TRANSPOSED = Tile(64, 64, 8)
FLAT = Tile(1, 1024, 4)
_POINTS = 1024  # of a tile of a kernel that reduces nothing


def persistent(length: int, count: int | None, access: int = 1) -> Tile:
    """For ``count`` whole rows of ``length``, which is at most ``LONGEST``; ``access``: elements of a vector."""
    columns = power(length)
    if _is_in_pieces(columns, access):
        tile = _in_pieces(length, _FEW_PIECES_WARPS)
        if count is None or count >= tile.rows:
            return tile
    rows, warps = _PERSISTENT[columns]
    return Tile(rows if count is None else min(rows, power(count)), columns, warps)


def up_to(longest: int, count: int | None, access: int) -> Tile:
    """For ``count`` whole rows of at most ``longest``, one of the classes; ``access``: elements of a vector."""
    tile = _UP_TO[longest]
    tile = _PIECES_UP_TO.get(longest, tile) if access == _HALVES else tile
    return tile if count is None else replace(tile, rows=min(tile.rows, power(count)))


def grown(tile: Tile, length: int, itemsize: int) -> Tile:
    """Where there would be too many programs: ``tile`` with as many rows as make a program move enough.

    ``length``: the columns of a tile that are there; ``itemsize``: bytes that are moved for each element.
    """
    rows = tile.rows
    while rows * length * itemsize < PROGRAM_BYTES and 2 * rows * tile.columns <= _MOST:
        rows *= 2
    if rows == tile.rows:
        return tile
    return Tile(rows, tile.columns, max(1, rows * tile.columns // (WARP * _EACH)))


def grown_rows(tile: Tile, length: int, itemsize: int, access: int) -> Tile:
    """The same of whole rows; ``access``: elements of a vector."""
    pieces = -(-length // _LONG_PIECE)
    if access == _HALVES and 2 < pieces <= _MOST_LONG_PIECES:
        return Tile(1, _LONG_PIECE, _PIECES_WARPS, pieces)
    if _is_in_pieces(power(length), access):
        return _in_pieces(length, _PIECES_WARPS)
    return grown(tile, length, itemsize)


def _is_in_pieces(columns: int, access: int) -> bool:
    return _SHORT < columns <= _PIECES and access == _HALVES


def _in_pieces(length: int, warps: int) -> Tile:
    """Rows of halves: pieces that leave the fewest columns that are not there, and as few as that allows."""
    widths = [w for w in (_SHORT, _SHORT // 2, _SHORT // 4) if -(-length // w) <= _MOST_PIECES]
    columns = min(widths, key=lambda w: (-(-length // w) * w, -w))
    pieces = -(-length // columns)
    rows = max(1, power(_PIECES_EACH // (pieces * _HALVES) + 1) // 2)
    return Tile(rows * warps * _SHORT // columns, columns, warps, pieces)


def grown_flat(itemsize: int) -> Tile:
    """The same of a kernel of one dimension."""
    columns = FLAT.columns
    while columns * itemsize < PROGRAM_BYTES and 2 * columns <= _MOST:
        columns *= 2
    return Tile(1, columns, FLAT.warps)


def walked(aligned: bool) -> Tile:
    """For rows that are walked in pieces."""
    return WALKED if aligned else UNALIGNED_WALKED


def column_sums() -> Tile:
    """For rows that lie side by side in memory."""
    return Tile(_SIDE_BY_SIDE_ROWS, _SIDE_BY_SIDE // _SIDE_BY_SIDE_ROWS, 16)


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
