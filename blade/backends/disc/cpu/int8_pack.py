# SPDX-License-Identifier: Apache-2.0
"""The constants of int8 products as their code reads them, laid out once per loaded engine.

Columns lie in panels. A grouped convolution's go group by group, in whole panels each; several groups of few
channels are one group here, whose weights are zero between one's channels and another's columns.
"""

import itertools
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from blade.backends.disc.constants import Part, parts_of
from blade.backends.disc.cpu import int8_conv, int8_gemm
from blade.backends.disc.cpu.dot import QUAD
from blade.backends.disc.ir import Value
from blade.backends.disc.steps import Fill, Packed

Code = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Columns:
    """``count`` columns in ``groups``, of which ``merged`` are one; panels of ``width``."""

    width: int
    count: int
    groups: int = 1
    merged: int = 1

    @property
    def blocks(self) -> int:
        """Groups, merged ones being one."""
        return self.groups // self.merged

    @property
    def own(self) -> int:
        """Columns of such a group."""
        return self.count // self.blocks

    @property
    def panels(self) -> int:
        """Of such a group."""
        return -(-self.own // self.width)

    @property
    def padded(self) -> int:
        """Of all, those included that fill panels up."""
        return self.blocks * self.panels * self.width

    def place(self, column: int) -> int:
        """Where a column is among the padded ones."""
        return column // self.own * self.panels * self.width + column % self.own

    def runs(self, part: Part, whole: int) -> Iterator[tuple[int, int]]:
        """Columns of ``part`` that lie side by side: the first, and how many; ``whole``: that may, at most."""
        at, end = part.first, part.first + part.size
        while at < end:
            size = min(end, (at // whole + 1) * whole) - at
            yield at, size
            at += size


def packing(width: int) -> Code:
    """What lays out the constants of a product."""
    return (
        (int8_gemm.pack_name(width), int8_gemm.pack_text(width)),
        (int8_gemm.SUMS, int8_gemm.sums_text()),
        (int8_gemm.ROW, int8_gemm.row_text()),
    )


def packed_weights(weight: Value, columns: Columns) -> Packed:
    """``weight`` [n, c, *kernel] in panels of quads, tap by tap."""
    channels, taps = int(weight.shape[1]), math.prod(int(d) for d in weight.shape[2:])
    piece = channels * columns.merged
    each = columns.count // columns.groups
    fills = []
    for tap, part, offset, (dn, dk) in _geometry(weight):
        for at, size in columns.runs(part, each):
            start = tap * piece + at // each % columns.merged * channels
            from_here = offset + (at - part.first) * dn
            layout = (from_here, channels, dn, dk, columns.place(at), start, taps * piece)
            fills.append(Fill(part.constant, size, layout))
    size = columns.padded * -(-taps * piece // QUAD) * QUAD
    return Packed(int8_gemm.pack_name(columns.width), torch.int8, size, tuple(fills))


def packed_sums(weight: Value, factor: int, columns: Columns) -> Packed:
    """What a column's sum of bytes is too large by: ``factor``, the zero point, times its weights' sum."""
    channels, fills = int(weight.shape[1]), []
    for _, part, offset, (dn, dk) in _geometry(weight):
        for at, size in columns.runs(part, columns.own):
            layout = (offset + (at - part.first) * dn, channels, dn, dk, columns.place(at), factor)
            fills.append(Fill(part.constant, size, layout))
    return Packed(int8_gemm.SUMS, torch.int32, columns.padded, tuple(fills))


def packed_row(row: Value, factor: float, columns: Columns) -> Packed:
    """Floats, one for each column, times ``factor``."""
    fills = []
    for part in parts(row):
        [step] = part.strides
        for at, size in columns.runs(part, columns.own):
            layout = (part.offset + (at - part.first) * step, step, columns.place(at), bits(factor))
            fills.append(Fill(part.constant, size, layout))
    return Packed(int8_gemm.ROW, torch.float32, columns.padded, tuple(fills))


def packed_border(weight: Value, zero: int, count: int) -> Packed:
    """The zero point ``count`` times: what lies beyond the border of an image."""
    fill = Fill(parts(weight)[0].constant, count, (zero,))  # reads nothing of the constant
    return Packed(int8_conv.FILL, torch.int8, count, (fill,))


def bits(number: float) -> int:
    """A float's."""
    return int(struct.unpack("<i", struct.pack("<f", number))[0])


def parts(constant: Value) -> tuple[Part, ...]:
    found = parts_of(constant)
    assert found is not None, constant
    return found


def _geometry(weight: Value) -> Iterator[tuple[int, Part, int, tuple[int, ...]]]:
    """Runs of ``weight`` [n, c, *kernel] with one tap: its number, part, offset, strides of n and c."""
    kernel = [range(int(d)) for d in weight.shape[2:]]
    for part in parts(weight):
        for tap, place in enumerate(itertools.product(*kernel)):
            steps = zip(place, part.strides[2:], strict=True)
            offset = part.offset + sum(at * step for at, step in steps)
            yield tap, part, offset, part.strides[:2]
