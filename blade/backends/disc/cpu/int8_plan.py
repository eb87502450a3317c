# SPDX-License-Identifier: Apache-2.0
"""How an ``int8_linear`` or an ``int8_conv`` runs: which code, and which constants laid out how."""

import itertools
import math
import struct
from collections.abc import Iterator

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv

from blade.backends.disc.constants import Part, parts_of
from blade.backends.disc.cpu import conv_rows, int8_conv, int8_gemm
from blade.backends.disc.cpu.conv_plan import three
from blade.backends.disc.cpu.dot import QUAD, Dot, dot
from blade.backends.disc.cpu.gemm import GROUP_ROWS
from blade.backends.disc.cpu.gemm_driver import tiling
from blade.backends.disc.cpu.int8_kernel import ROW_FACTORS, Int8Form
from blade.backends.disc.cpu.target import Target
from blade.backends.disc.ir import Value, numel, plain
from blade.backends.disc.program import Fill, NativeCall, Packed
from blade.backends.disc.views import row_distance

Code = tuple[tuple[str, str], ...]


def int8_plan(value: Value, target: Target) -> tuple[NativeCall, Code]:
    """The call and the functions it needs, (name, MLIR)."""
    x, weight, scales, bias, *rows = value.args
    columns, depth = (int(d) for d in weight.shape)
    tiles = dot(target)
    shape = tiling(columns, tiles.rows, tiles.vectors, tiles.lanes)
    form = Int8Form(tiles, shape, ROW_FACTORS[len(rows)], to_bytes=value.dtype == torch.uint8)
    count = numel(x.shape[:-1])
    groups = FloorDiv(sympy.sympify(count) + GROUP_ROWS - 1, GROUP_ROWS)
    panels = -(-columns // tiles.width)
    # rows with zero points of their own multiply by these themselves
    factor = 1 if len(rows) == 2 else value.attrs["zero"] - tiles.offset
    constants = (
        packed_weights(weight, tiles),
        packed_sums(weight, factor, tiles),
        packed_row(scales, value.attrs["scale"], panels * tiles.width),
        packed_row(bias, 1.0, panels * tiles.width),
    )
    call = NativeCall(
        form.name,
        plain(sympy.sympify(groups) * panels),
        plain(FloorDiv(sympy.Min(count, GROUP_ROWS) * depth * tiles.vectors, QUAD) + 1),
        0,
        (x, *constants, *rows, value),
        (count, columns, depth, row_distance(x, len(x.shape) - 1), columns, *_bounds(value, form)),
    )
    return call, ((form.name, int8_gemm.gemm_text(form)), *packing(tiles))


def int8_conv_plan(value: Value, target: Target) -> tuple[NativeCall, Code]:
    """The same for an ``int8_conv``."""
    x, weight, scales, bias = value.args
    columns, channels = (int(d) for d in weight.shape[:2])
    tiles = dot(target)
    shape = tiling(columns, tiles.rows, tiles.vectors, tiles.lanes)
    form = Int8Form(tiles, shape, "none", True, value.dtype == torch.uint8)
    kernel = three(weight.shape[2:], 1)
    taps = math.prod(int(k) for k in kernel)
    rows, block = numel(value.shape[:-1]), int8_conv.BLOCK_TILES * tiles.rows
    pitch = -(-block // 16) * 16
    inputs, results = (three(v.shape[1:-1], 1) for v in (x, value))
    steps = (three(value.attrs[a], k) for a, k in (("stride", 1), ("padding", 0), ("dilation", 1)))
    ints = (
        *(rows, pitch, channels, channels, 1, 0, 0),
        *(*inputs, *results, *kernel, *itertools.chain(*steps)),
        *(columns, block),
    )
    assert len(ints) == len(int8_conv.SIZES), (ints, int8_conv.SIZES)
    ints = (*ints, *_bounds(value, form))
    panels = -(-columns // tiles.width)
    blocks = FloorDiv(sympy.sympify(rows) + block - 1, block)
    constants = (
        packed_weights(weight, tiles),
        packed_sums(weight, value.attrs["zero"] - tiles.offset, tiles),
        packed_row(scales, value.attrs["scale"], panels * tiles.width),
        packed_row(bias, 1.0, panels * tiles.width),
        _border(weight, value.attrs["zero"]),
    )
    call = NativeCall(
        form.name,
        plain(sympy.sympify(blocks) * panels),
        plain(FloorDiv(sympy.Min(rows, block) * taps * channels * tiles.vectors, QUAD) + 1),
        pitch * (conv_rows.ARRAYS + taps) * 8,
        (x, *constants, value),
        ints,
    )
    own = (form.name, int8_conv.conv_text(form, target))
    return call, (own, *packing(tiles), (int8_conv.FILL, int8_conv.fill_text()))


def packing(tiles: Dot) -> Code:
    """What lays out the constants of a product."""
    return (
        (int8_gemm.pack_name(tiles), int8_gemm.pack_text(tiles)),
        (int8_gemm.SUMS, int8_gemm.sums_text()),
        (int8_gemm.ROW, int8_gemm.row_text()),
    )


def _border(weight: Value, zero: int) -> Packed:
    """The zero point as often as there are channels: a pixel beyond the border."""
    channels = int(weight.shape[1])
    fill = Fill(_parts(weight)[0].constant, channels, (zero,))  # reads nothing of the constant
    return Packed(int8_conv.FILL, torch.int8, channels, (fill,))


def _geometry(weight: Value) -> Iterator[tuple[int, Part, int, tuple[int, ...]]]:
    """Runs of ``weight`` [n, c, *kernel] with one tap: its number, part, offset, strides of n and c."""
    kernel = [range(int(d)) for d in weight.shape[2:]]
    for part in _parts(weight):
        for tap, place in enumerate(itertools.product(*kernel)):
            steps = zip(place, part.strides[2:], strict=True)
            offset = part.offset + sum(at * step for at, step in steps)
            yield tap, part, offset, part.strides[:2]


def packed_weights(weight: Value, tiles: Dot) -> Packed:
    """``weight`` [n, c, *kernel] in panels of quads, tap by tap."""
    channels, taps = int(weight.shape[1]), math.prod(int(d) for d in weight.shape[2:])
    depth = channels * taps
    fills = [
        Fill(p.constant, p.size, (offset, channels, *strides, p.first, tap * channels, depth))
        for tap, p, offset, strides in _geometry(weight)
    ]
    size = _padded(weight, tiles) * -(-depth // QUAD) * QUAD
    return Packed(int8_gemm.pack_name(tiles), torch.int8, size, tuple(fills))


def packed_sums(weight: Value, factor: int, tiles: Dot) -> Packed:
    """What a column's sum of bytes is too large by: ``factor``, the zero point, times its weights' sum."""
    channels = int(weight.shape[1])
    fills = [
        Fill(p.constant, p.size, (offset, channels, *strides, p.first, factor))
        for _, p, offset, strides in _geometry(weight)
    ]
    return Packed(int8_gemm.SUMS, torch.int32, _padded(weight, tiles), tuple(fills))


def _bounds(value: Value, form: Int8Form) -> list[int]:
    """The numbers by which the result is quantized."""
    return [_bits(float(value.attrs[name])) for name in form.bounds]


def _bits(number: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", number))[0])


def packed_row(row: Value, factor: float, padded: int) -> Packed:
    """Floats, one for each of ``padded`` columns, times ``factor``."""
    rest = (_bits(factor),)
    fills = [Fill(p.constant, p.size, (p.offset, *p.strides, p.first, *rest)) for p in _parts(row)]
    return Packed(int8_gemm.ROW, torch.float32, padded, tuple(fills))


def _parts(constant: Value) -> tuple[Part, ...]:
    parts = parts_of(constant)
    assert parts is not None, constant
    return parts


def _padded(constant: Value, tiles: Dot) -> int:
    """How many columns the panels hold."""
    return -(-int(constant.shape[0]) // tiles.width) * tiles.width
