# SPDX-License-Identifier: Apache-2.0
"""The table of tile shapes: rows x columns that a program computes at a time, and its number of warps.

    persistent(768, 2)      # KernelTile(rows=1, columns=1024, warps=4): a row of 768 halves in registers

All tile shapes of generated kernels are here; they aim at 16-byte accesses and 8 to 32 elements per thread.
"""

from dataclasses import dataclass, replace

from blade.backends.disc.target.gpu import WARP


@dataclass(frozen=True)
class KernelTile:
    """``rows`` and ``columns``, powers of two; a row has ``pieces`` adjacent pieces of ``columns`` columns.

    If a piece has as many columns as a warp accesses at once, a row belongs to one warp: its reduction
    needs no shared memory and no barrier, and missing columns cost little.
    """

    rows: int
    columns: int
    warps: int
    pieces: int = 1

    @property
    def elements(self) -> int:
        return self.rows * self.columns * self.pieces


ACCESS_BYTES = 16  # the widest load and store
LONGEST = 16384  # columns of the longest row that stays in registers

# With programmatic dependent launch, programs start every 1.2 ns (without: every 0.6 ns). With more programs
# than FEW (loops) or FEW_ROWS (rows; about one per slot of the multiprocessors), each program should move
# PROGRAM_BYTES, a little more than memory delivers in that time.
FEW = 2048
FEW_ROWS = 1024
PROGRAM_BYTES = 6000
_MOST = 4096  # elements per program that was enlarged to PROGRAM_BYTES
_EACH = 16  # elements per thread of such a program
_HALVES = ACCESS_BYTES // 2  # elements of a vector
_SHORT = _HALVES * WARP  # columns that a warp accesses at once
_PIECES = 1024  # longest rows that are split into pieces
_MOST_PIECES = 5
_PIECES_WARPS = 4  # warps per program with rows in pieces, if programs are many
_FEW_PIECES_WARPS = 2  # the same if programs are few
_PIECES_EACH = 32  # most elements per thread with several rows
_LONG_PIECE = 1024  # columns per piece of longer rows, by 4 warps
_MOST_LONG_PIECES = 4

# Longest row of each class if the length is known only at run time; longer rows are walked.
CLASSES = (256, 512, 1024, 4096)
# The same for unaligned rows, whose accesses are not vectorized.
UNALIGNED_CLASSES = (256, 1024)

# Elements of a row in registers -> rows per program, warps.
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
# Tiles for rows of any length up to the key; then those for rows of halves, in pieces.
_UP_TO = {
    256: KernelTile(8, 256, 4),
    512: KernelTile(4, 512, 4),
    1024: KernelTile(2, 1024, 4),
    4096: KernelTile(1, 4096, 8),
}
_PIECES_UP_TO = {512: KernelTile(4, 256, 4, 2), 1024: KernelTile(4, 256, 4, 4)}
WALKED = KernelTile(1, 4096, 8)
UNALIGNED_WALKED = KernelTile(1, 2048, 8)
_SIDE_BY_SIDE_ROWS = 16  # few, so that every multiprocessor has programs
_SIDES = (64, 32)  # rows of a tile where there are programs enough
_SIDE_BY_SIDE = 8192  # elements, by 16 warps: loads in flight must cover the latency of memory
_SIDE = 64  # of a tile that is read along one side and written along the other
_LONG_SIDE = 1024  # where the other one is shorter
FLAT = KernelTile(1, 1024, 4)
_POINTS = 1024  # elements per tile of a kernel without reductions


def persistent(length: int, count: int | None, access: int = 1) -> KernelTile:
    """The tile for ``count`` whole rows of ``length`` <= ``LONGEST``; ``access``: elements per vector."""
    columns = power(length)
    if _is_in_pieces(columns, access):
        tile = _in_pieces(length, _FEW_PIECES_WARPS)
        if count is None or count >= tile.rows:
            return tile
    rows, warps = _PERSISTENT[columns]
    return KernelTile(rows if count is None else min(rows, power(count)), columns, warps)


def up_to(longest: int, count: int | None, access: int) -> KernelTile:
    """The tile for ``count`` whole rows up to ``longest``, a class; ``access``: elements per vector."""
    tile = _UP_TO[longest]
    tile = _PIECES_UP_TO.get(longest, tile) if access == _HALVES else tile
    return tile if count is None else replace(tile, rows=min(tile.rows, power(count)))


def grown(tile: KernelTile, length: int, itemsize: int) -> KernelTile:
    """The tile if programs are too many: ``tile`` with enough rows that a program moves PROGRAM_BYTES.

    ``length``: existing columns of a tile; ``itemsize``: bytes moved per element.
    """
    rows = tile.rows
    while rows * length * itemsize < PROGRAM_BYTES and 2 * rows * tile.columns <= _MOST:
        rows *= 2
    if rows == tile.rows:
        return tile
    return KernelTile(rows, tile.columns, max(1, rows * tile.columns // (WARP * _EACH)))


def grown_rows(tile: KernelTile, length: int, itemsize: int, access: int) -> KernelTile:
    """``grown`` for whole rows; ``access``: elements per vector."""
    pieces = -(-length // _LONG_PIECE)
    if access == _HALVES and 2 < pieces <= _MOST_LONG_PIECES:
        return KernelTile(1, _LONG_PIECE, _PIECES_WARPS, pieces)
    if _is_in_pieces(power(length), access):
        return _in_pieces(length, _PIECES_WARPS)
    return grown(tile, length, itemsize)


def _is_in_pieces(columns: int, access: int) -> bool:
    return _SHORT < columns <= _PIECES and access == _HALVES


def _in_pieces(length: int, warps: int) -> KernelTile:
    """Rows of halves: pieces with the fewest missing columns, then the fewest pieces."""
    widths = [w for w in (_SHORT, _SHORT // 2, _SHORT // 4) if -(-length // w) <= _MOST_PIECES]
    columns = min(widths, key=lambda w: (-(-length // w) * w, -w))
    pieces = -(-length // columns)
    rows = max(1, power(_PIECES_EACH // (pieces * _HALVES) + 1) // 2)
    return KernelTile(rows * warps * _SHORT // columns, columns, warps, pieces)


def grown_flat(itemsize: int) -> KernelTile:
    """``grown`` for a kernel of one dimension."""
    columns = FLAT.columns
    while columns * itemsize < PROGRAM_BYTES and 2 * columns <= _MOST:
        columns *= 2
    return KernelTile(1, columns, FLAT.warps)


def walked(aligned: bool) -> KernelTile:
    """The tile for rows that are walked in pieces."""
    return WALKED if aligned else UNALIGNED_WALKED


def column_sums(rows: int | None, length: int | None, pieces: bool) -> KernelTile:
    """The tile for ``rows`` rows of ``length`` that are adjacent in memory.

    ``pieces``: there are many such sets of rows, so a tile takes whole lines of memory.
    """
    side = _SIDE_BY_SIDE_ROWS
    if pieces and rows is not None:
        side = next((s for s in _SIDES if rows % s == 0), side)
    tile = KernelTile(side, _SIDE_BY_SIDE // side, 16)
    if rows is not None and rows < side:
        tile = replace(tile, rows=power(rows))
    if length is not None and length <= tile.columns:
        columns = power(length)
        return replace(tile, columns=columns, warps=_warps(tile.rows * columns, tile.warps))
    return tile


def _warps(elements: int, most: int) -> int:
    return max(1, min(most, elements // (WARP * _EACH)))


def transposed(rows: int | None, length: int | None) -> KernelTile:
    """The tile of a kernel that is contiguous along the tile's rows and along its columns: images of 3 channels have
    one short side.
    """
    height, width = _side(rows, _SIDE), _side(length, _SIDE)
    area = _SIDE * _SIDE
    if width < _SIDE:
        height = min(area // width, _side(rows, _LONG_SIDE))
    elif height < _SIDE:
        width = min(area // height, _side(length, _LONG_SIDE))
    return KernelTile(height, width, max(1, height * width // (WARP * _EACH)))


def _side(size: int | None, most: int) -> int:
    return most if size is None else min(most, power(size))


def pointwise(length: int | None, count: int | None) -> KernelTile:
    """The tile for ``count`` rows of ``length`` (``None``: some hundred) without reductions."""
    if length is None:
        rows = _POINTS // 128
        return KernelTile(rows if count is None else min(rows, power(count)), 128, 4)
    columns = min(power(length), _POINTS)
    while columns > 128 and length % columns:  # prefer tiles without masks to few pieces
        columns //= 2
    if length % columns:
        columns = min(power(length), _POINTS)
    rows = _POINTS // columns
    return KernelTile(rows if count is None else min(rows, power(count)), columns, 4)


def power(number: int) -> int:
    """The smallest power of two >= ``number``."""
    return 1 << max(0, number - 1).bit_length()
