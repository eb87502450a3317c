# SPDX-License-Identifier: Apache-2.0
"""The constants of int8 products in the layout of their kernels, packed once per loaded engine.

Columns are stored in panels; those of a grouped convolution group by group, in whole panels. Several groups
of few channels are merged into one, with zero weights between the channels of one and the columns of another.
"""

import itertools
import math
from collections.abc import Iterator

import torch

from blade.backends.disc.cpu.conv import int8_conv
from blade.backends.disc.cpu.emit.int8_dot import QUAD
from blade.backends.disc.cpu.gemm import int8_gemm
from blade.backends.disc.cpu.gemm.packing import PackedColumns, parts
from blade.backends.disc.ir.constant_parts import ConstantPart
from blade.backends.disc.ir.graph import Value
from blade.backends.disc.program.instructions import Fill, PackedBuffer

MlirTexts = tuple[tuple[str, str], ...]


def packing(width: int) -> MlirTexts:
    """The functions that pack the constants of a product."""
    return (
        (int8_gemm.pack_name(width), int8_gemm.pack_text(width)),
        (int8_gemm.SUMS, int8_gemm.sums_text()),
        (int8_gemm.ROW, int8_gemm.row_text()),
    )


def packed_weights(weight: Value, columns: PackedColumns) -> PackedBuffer:
    """``weight`` [n, c, *kernel] in panels of quads (four bytes), tap by tap."""
    channels, taps = int(weight.shape[1]), math.prod(int(d) for d in weight.shape[2:])
    piece = channels * columns.merged
    each = columns.count // columns.groups
    fills = []
    for tap, part, offset, (dn, dk) in by_tap(weight):
        for at, size in columns.runs(part, each):
            start = tap * piece + at // each % columns.merged * channels
            from_here = offset + (at - part.first) * dn
            layout = (from_here, channels, dn, dk, columns.place(at), start, taps * piece)
            fills.append(Fill(part.constant, size, layout))
    size = columns.padded * -(-taps * piece // QUAD) * QUAD
    return PackedBuffer(int8_gemm.pack_name(columns.width), torch.int8, size, tuple(fills))


def packed_sums(weight: Value, factor: int, columns: PackedColumns) -> PackedBuffer:
    """The excess of each column's sum: ``factor``, the zero point, times the sum of the column's weights."""
    channels, fills = int(weight.shape[1]), []
    for _, part, offset, (dn, dk) in by_tap(weight):
        for at, size in columns.runs(part, columns.own):
            layout = (offset + (at - part.first) * dn, channels, dn, dk, columns.place(at), factor)
            fills.append(Fill(part.constant, size, layout))
    return PackedBuffer(int8_gemm.SUMS, torch.int32, columns.padded, tuple(fills))


def packed_border(weight: Value, zero: int, count: int) -> PackedBuffer:
    """The zero point ``count`` times: the values beyond the border of an image."""
    fill = Fill(parts(weight)[0].constant, count, (zero,))  # does not read the constant
    return PackedBuffer(int8_conv.FILL, torch.int8, count, (fill,))


def by_tap(weight: Value) -> Iterator[tuple[int, ConstantPart, int, tuple[int, ...]]]:
    """Runs of ``weight`` [n, c, *kernel] with one tap: the tap's number, part, offset, strides of n and c."""
    kernel = [range(int(d)) for d in weight.shape[2:]]
    for part in parts(weight):
        for tap, place in enumerate(itertools.product(*kernel)):
            steps = zip(place, part.strides[2:], strict=True)
            offset = part.offset + sum(at * step for at, step in steps)
            yield tap, part, offset, part.strides[:2]
