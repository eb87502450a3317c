# SPDX-License-Identifier: Apache-2.0
"""How an ``int8_linear`` of the IR runs: which code, and which constants laid out how."""

import struct

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv

from blade.backends.disc.constants import Part, parts_of
from blade.backends.disc.cpu import int8_gemm
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
    form = Int8Form(tiles, shape, ROW_FACTORS[len(rows)])
    count = numel(x.shape[:-1])
    groups = FloorDiv(sympy.sympify(count) + GROUP_ROWS - 1, GROUP_ROWS)
    panels = -(-columns // tiles.width)
    constants = (
        _weights(weight, tiles),
        _sums(value, weight, tiles),
        packed_row(scales, value.attrs["scale"], panels * tiles.width),
        packed_row(bias, 1.0, panels * tiles.width),
    )
    call = NativeCall(
        form.name,
        plain(sympy.sympify(groups) * panels),
        plain(FloorDiv(sympy.Min(count, GROUP_ROWS) * depth * tiles.vectors, QUAD) + 1),
        0,
        (x, *constants, *rows, value),
        (count, columns, depth, row_distance(x, len(x.shape) - 1), columns),
    )
    code = (
        (form.name, int8_gemm.gemm_text(form)),
        (int8_gemm.pack_name(tiles), int8_gemm.pack_text(tiles)),
        (int8_gemm.SUMS, int8_gemm.sums_text()),
        (int8_gemm.ROW, int8_gemm.row_text()),
    )
    return call, code


def _weights(weight: Value, tiles: Dot) -> Packed:
    """``weight`` [n, depth] in panels of quads."""
    depth = int(weight.shape[1])
    fills = [
        Fill(p.constant, p.size, (p.offset, depth, *p.strides, p.first)) for p in _parts(weight)
    ]
    size = _padded(weight, tiles) * -(-depth // QUAD) * QUAD
    return Packed(int8_gemm.pack_name(tiles), torch.int8, size, tuple(fills))


def _sums(value: Value, weight: Value, tiles: Dot) -> Packed:
    """What a column's sum of bytes is too large by: zero point times the sum of its weights.

    Rows with zero points of their own multiply by these themselves.
    """
    has_zeros = ROW_FACTORS[len(value.args) - 4] == "scale_zero"
    factor = 1 if has_zeros else value.attrs["zero"] - tiles.offset
    depth = int(weight.shape[1])
    fills = [
        Fill(p.constant, p.size, (p.offset, depth, *p.strides, p.first, factor))
        for p in _parts(weight)
    ]
    return Packed(int8_gemm.SUMS, torch.int32, _padded(weight, tiles), tuple(fills))


def packed_row(row: Value, factor: float, padded: int) -> Packed:
    """Floats, one for each of ``padded`` columns, times ``factor``."""
    (bits,) = struct.unpack("<i", struct.pack("<f", factor))
    fills = [Fill(p.constant, p.size, (p.offset, *p.strides, p.first, bits)) for p in _parts(row)]
    return Packed(int8_gemm.ROW, torch.float32, padded, tuple(fills))


def _parts(constant: Value) -> tuple[Part, ...]:
    parts = parts_of(constant)
    assert parts is not None, constant
    return parts


def _padded(constant: Value, tiles: Dot) -> int:
    """How many columns the panels hold."""
    return -(-int(constant.shape[0]) // tiles.width) * tiles.width
