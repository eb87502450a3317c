# SPDX-License-Identifier: Apache-2.0
"""Sums over leading axes, of columns, in pieces: more units of work than there are columns.

    %2 f32[1, 1, 64] = reduce %1 {sum, axes=(0, 1)}         %1 [s0, 1024, 64]: 64 columns of s0 * 1024 rows
                                    ->
    %3 f32[2*s0, 64, 512] = permute (reshape %1)            pieces of 512 rows
    %4 f32[2*s0, 64, 1] = reduce %3 {sum, axes=(2,)}
    %5 f32[64, 1] = reduce (permute %4) {sum, axes=(1,)}

The squared differences from the mean, summed the same way, are taken from the mean of their piece in the kernel that
sums the piece, and then moved to the mean of all (Chan, Golub and LeVeque, 1983): the variance reads its operand once
together with the mean, and is as exact as with two passes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import sympy

from blade.backends.disc.ir.graph import IrBuilder, Shape, Value, numel, plain
from blade.backends.disc.ir.kernel import Dim

_FEWEST, _MOST = 32, 512  # rows of a piece
_ENOUGH = 64  # pieces, if it is known how many rows there are
_COLUMNS = range(8, 8192)  # with more columns there is work enough


def rows_of_piece(shape: Shape, axes: Sequence[int]) -> int | None:
    """How many rows a piece of a reduction over ``axes`` of ``shape`` has; ``None``: it is not done in pieces."""
    if any(d != 1 for d in shape[: axes[0]]) or _is_interrupted(shape, axes):
        return None
    columns = numel(shape[axes[-1] + 1 :])
    if not isinstance(columns, int) or columns not in _COLUMNS:
        return None
    total = numel([shape[a] for a in axes])
    most = max(_FEWEST, min(_MOST, total // _ENOUGH)) if isinstance(total, int) else _MOST
    factor = total if isinstance(total, int) else int(total.as_coeff_Mul()[0])
    found = [d for d in sympy.divisors(factor) if _FEWEST <= d <= most]
    if not found or (isinstance(total, int) and total < 2 * found[-1]):
        return None
    return int(found[-1])


def _is_interrupted(shape: Shape, axes: Sequence[int]) -> bool:
    return any(shape[a] != 1 for a in range(axes[0], axes[-1]) if a not in axes)


@dataclass(frozen=True)
class Pieces:
    """``count`` pieces of ``rows`` rows of columns ``rest``.

    ``axes``: those of the operand in the order that ``split`` divides. ``apart``: columns lie apart in memory, each
    with its rows beside each other, as the pixels of an image's channel do.
    """

    count: Dim
    rows: Dim
    rest: Shape
    axes: tuple[int, ...]
    apart: bool

    @property
    def split(self) -> Shape:
        """The shape in the order of memory."""
        return self.shape if self.apart else (self.count, self.rows, *self.rest)

    @property
    def order(self) -> tuple[int, ...]:
        """Where the axes of ``split`` go, so that a piece's rows are the last one."""
        last = len(self.rest) + 1
        return tuple(range(last + 1)) if self.apart else (0, *range(2, last + 1), 1)

    @property
    def shape(self) -> Shape:
        return (self.count, *self.rest, self.rows)


def pieces_of(shape: Shape, axes: Sequence[int]) -> Pieces | None:
    """How a reduction over ``axes`` of ``shape`` is divided; ``None``: it is not."""
    ones = [k for k, d in enumerate(shape) if d == 1]
    axes = [a for a in axes if a not in ones]
    rest = [k for k in range(len(shape)) if k not in (*axes, *ones)]
    sizes = tuple(shape[k] for k in rest)
    if not axes or not rest:
        return None
    before, after = [a for a in axes if a < rest[0]], [a for a in axes if a > rest[-1]]
    if before and after and len(before) + len(after) == len(axes):  # images, channels, pixels
        count, rows = (numel([shape[a] for a in one]) for one in (before, after))
        return Pieces(count, rows, sizes, (*ones, *before, *rest, *after), apart=True)
    rows = rows_of_piece(shape, axes)
    if rows is None:
        return None
    total = numel([shape[a] for a in axes])
    count = total // rows if isinstance(total, int) else plain(sympy.sympify(total) / rows)
    return Pieces(count, rows, sizes, (*ones, *axes, *rest), apart=False)


def joined(b: IrBuilder, kind: str, partial: Value, pieces: Pieces) -> Value:
    """[count, *rest, 1], reduced over the pieces: [*rest, 1]."""
    return b.reduce(kind, by_column(b, partial, pieces), [len(pieces.rest)])


def by_column(b: IrBuilder, partial: Value, pieces: Pieces) -> Value:
    """[count, *rest, 1] -> [*rest, count]"""
    flat = b.reshape(partial, (pieces.count, *pieces.rest))
    return b.permute(flat, [*range(1, len(flat.shape)), 0])


def squared_differences(b: IrBuilder, x: Value, total: Value, pieces: Pieces, count: Dim) -> Value:
    """The sum of squared differences of ``x``, [count, *rest, rows], from the mean of its column: [*rest, 1].

    ``total``: the sums of pieces, [count, *rest, 1]; ``count``: the rows of a column.
    """
    own = b.pointwise("div", total, _at_least_one(b, pieces.rows, total))
    centred = b.pointwise("sub", x, b.broadcast(own, x.shape))
    spread = b.reduce("sum", b.pointwise("mul", centred, centred), [len(x.shape) - 1])
    totals, spreads = by_column(b, total, pieces), by_column(b, spread, pieces)
    last = len(pieces.rest)
    column = b.reduce("sum", totals, [last])
    mean = b.pointwise("div", column, _at_least_one(b, count, column))
    rows = _at_least_one(b, pieces.rows, totals)
    apart = b.pointwise("sub", b.pointwise("div", totals, rows), b.broadcast(mean, totals.shape))
    moved = b.pointwise("mul", b.pointwise("mul", apart, apart), rows)
    return b.reduce("sum", b.pointwise("add", spreads, moved), [last])


def _at_least_one(b: IrBuilder, rows: Dim, like: Value) -> Value:
    """``rows``, that sums over none of them are divided by, too: images without pixels."""
    number = b.fill(rows, like.shape, like.dtype)
    if isinstance(rows, int) and rows:
        return number
    return b.pointwise("maximum", number, b.fill(1, like.shape, like.dtype))


def centre_of(v: Value, axes: Sequence[int]) -> Value | None:
    """x, if ``v`` is the square of x minus its mean over ``axes``, at each element that of its own column."""
    if v.op != "mul" or v.args[0] is not v.args[1] or v.args[0].op != "sub":
        return None
    x, mean = v.args[0].args
    axes = [a for a in axes if x.shape[a] != 1]
    if mean.op != "broadcast" or not _is_mean(_unreshaped(mean.args[0]), x, axes):
        return None
    columns = [k for k, d in enumerate(x.shape) if d != 1 and k not in axes]
    into = zip(mean.attrs["axes"], mean.args[0].shape, strict=True)
    return x if [k for k, d in into if d != 1] == columns else None


def _is_mean(v: Value, x: Value, axes: Sequence[int]) -> bool:
    if v.op != "div" or v.args[1].op not in ("fill", "size"):
        return False
    total, count = _unreshaped(v.args[0]), v.args[1]
    if total.op != "reduce" or total.attrs["kind"] != "sum" or total.args[0] is not x:
        return False
    rows = numel([x.shape[a] for a in axes])
    over = [a for a in total.attrs["axes"] if x.shape[a] != 1]
    return over == list(axes) and bool(count.attrs["value"] == rows)


def _unreshaped(v: Value) -> Value:
    while v.op == "reshape":
        (v,) = v.args
    return v
