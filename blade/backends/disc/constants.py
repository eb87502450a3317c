# SPDX-License-Identifier: Apache-2.0
"""Operands that are known when an engine is loaded: constants, views of them, several side by side.

    parts_of(concat(permute(const 3), const 5)) -> (Part(3, ...), Part(5, ...))

Such an operand is laid out once per loaded engine (``program.Packed``), in whatever form a kernel wants.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from blade.backends.disc.ir import Value
from blade.backends.disc.views import view_of


@dataclass(frozen=True)
class Part:
    """``size`` entries along axis 0 from ``first`` on, in the memory of a constant; all in elements."""

    constant: int
    first: int
    size: int
    offset: int
    strides: tuple[int, ...]


def parts_of(value: Value) -> tuple[Part, ...] | None:
    """Where the elements of ``value`` lie; ``None`` unless all of them are constants with known sizes.

    ``value`` is a view of a constant, or a concatenation of such views and of zeros along axis 0. What
    no part covers is zero.
    """
    return parts_in(value.args if value.op == "concat" and value.attrs["axis"] == 0 else (value,))


def parts_in(pieces: Sequence[Value]) -> tuple[Part, ...] | None:
    """The same of ``pieces`` along axis 0 of one value."""
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


def _part(piece: Value, first: int, size: int) -> Part | None:
    view = view_of(piece)
    if view is None or view.base.op != "const" or not isinstance(view.offset, int):
        return None
    if view.base.attrs.get("single", False):  # is to be in memory once
        return None
    strides = tuple(s for s in view.strides if isinstance(s, int))
    if len(strides) != len(piece.shape):
        return None
    return Part(view.base.attrs["index"], first, size, view.offset, strides)
