# SPDX-License-Identifier: Apache-2.0
"""Operands known when an engine is loaded: constants, views of them, and concatenations of these.

    parts_of(concat(permute(const 3), const 5)) -> (ConstantPart(3, ...), ConstantPart(5, ...))

Such an operand is packed once per loaded engine (``PackedBuffer``), in the layout that a kernel wants.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from blade.backends.disc.ir.graph import Value
from blade.backends.disc.ir.views import view_of


@dataclass(frozen=True)
class ConstantPart:
    """``size`` entries from ``first`` along axis 0, read from a constant; offset and strides in elements."""

    constant: int
    first: int
    size: int
    offset: int
    strides: tuple[int, ...]


def parts_of(value: Value) -> tuple[ConstantPart, ...] | None:
    """Where the elements of ``value`` lie; ``None`` unless all are constants of known sizes.

    ``value`` is a view of a constant, or a concatenation along axis 0 of such views and of zeros. Elements
    that no part covers are zero.
    """
    return parts_in(value.args if value.op == "concat" and value.attrs["axis"] == 0 else (value,))


def parts_in(pieces: Sequence[Value]) -> tuple[ConstantPart, ...] | None:
    """``parts_of`` for ``pieces``, concatenated along axis 0."""
    parts, first = [], 0
    for piece in pieces:
        if not all(isinstance(d, int) and d > 0 for d in piece.shape):
            return None
        size = int(piece.shape[0])
        if not (piece.op == "fill" and piece.attrs["value"] == 0):
            part = _part(piece, first, size)
            if part is None:
                return None
            parts.append(part)
        first += size
    return tuple(parts)


def _part(piece: Value, first: int, size: int) -> ConstantPart | None:
    view = view_of(piece)
    if view is None or view.base.op != "const" or not isinstance(view.offset, int):
        return None
    if view.base.attrs.get("single", False):  # must not be copied
        return None
    strides = tuple(s for s in view.strides if isinstance(s, int))
    if len(strides) != len(piece.shape):
        return None
    return ConstantPart(view.base.attrs["index"], first, size, view.offset, strides)
