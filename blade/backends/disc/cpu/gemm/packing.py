# SPDX-License-Identifier: Apache-2.0
"""Packed layouts of the constants of 8-bit products."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from blade.backends.disc.cpu.gemm import int8_gemm
from blade.backends.disc.ir.constant_parts import ConstantPart, parts_of
from blade.backends.disc.ir.graph import Value
from blade.backends.disc.program.instructions import Fill, PackedBuffer


@dataclass(frozen=True)
class PackedColumns:
    """``count`` columns in ``groups``, merged ``merged`` at a time; panels of ``width`` columns."""

    width: int
    count: int
    groups: int = 1
    merged: int = 1

    @property
    def blocks(self) -> int:
        """The number of merged groups."""
        return self.groups // self.merged

    @property
    def own(self) -> int:
        """Columns per merged group."""
        return self.count // self.blocks

    @property
    def panels(self) -> int:
        """Panels per merged group."""
        return -(-self.own // self.width)

    @property
    def padded(self) -> int:
        """All columns, including the padding of panels."""
        return self.blocks * self.panels * self.width

    def place(self, column: int) -> int:
        """The index of a column among the padded columns."""
        return column // self.own * self.panels * self.width + column % self.own

    def runs(self, part: ConstantPart, whole: int) -> Iterator[tuple[int, int]]:
        """Runs of adjacent columns of ``part``: (first, number); ``whole``: the longest run."""
        at, end = part.first, part.first + part.size
        while at < end:
            size = min(end, (at // whole + 1) * whole) - at
            yield at, size
            at += size


def columns_of(
    groups: int, count: int, channels: int, width: tuple[int, int], per: int
) -> PackedColumns:
    """``count`` columns in ``groups`` of so many ``channels``; ``width``: vectors of a panel, and their lanes.

    Groups are merged that have fewer columns than a vector, or whose channels are not whole units of ``per``.
    """
    vectors, lanes = width
    if groups == 1:
        return PackedColumns(vectors * lanes, count)
    fitting = [m for m in range(1, groups + 1) if groups % m == 0 and m * channels % per == 0]
    enough = [m for m in fitting if m * count // groups >= lanes]
    merged = min(enough, default=max(fitting))
    used = min(vectors, -(-merged * count // groups // lanes))
    return PackedColumns(used * lanes, count, groups, merged)


def packed_row(row: Value, factor: float, columns: PackedColumns) -> PackedBuffer:
    """Floats, one per column, times ``factor``."""
    fills = []
    for part in parts(row):
        [step] = part.strides
        for at, size in columns.runs(part, columns.own):
            layout = (part.offset + (at - part.first) * step, step, columns.place(at), bits(factor))
            fills.append(Fill(part.constant, size, layout))
    return PackedBuffer(int8_gemm.ROW, torch.float32, columns.padded, tuple(fills))


def bits(number: float) -> int:
    """The bit pattern of a float."""
    return int(struct.unpack("<i", struct.pack("<f", number))[0])


def parts(constant: Value) -> tuple[ConstantPart, ...]:
    found = parts_of(constant)
    assert found is not None, constant
    return found
