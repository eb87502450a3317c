# SPDX-License-Identifier: Apache-2.0
"""The call for a ``weight_only_linear`` of the IR: its code, and its constants in packed layouts."""

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv

from blade.backends.disc.cpu.gemm import int8_gemm
from blade.backends.disc.cpu.gemm import weight_only_gemm as widen_gemm
from blade.backends.disc.cpu.gemm.driver import tiling
from blade.backends.disc.cpu.gemm.gemm import GROUP_ROWS
from blade.backends.disc.cpu.gemm.micro_kernel import gemm_tiling
from blade.backends.disc.cpu.gemm.packing import PackedColumns, packed_row, parts
from blade.backends.disc.cpu.gemm.weight_only_micro_kernel import (
    WeightOnlySpec,
    rows_of_unit,
)
from blade.backends.disc.ir.graph import Value, numel, plain
from blade.backends.disc.ir.views import row_distance
from blade.backends.disc.program.instructions import Fill, NativeCall, PackedBuffer
from blade.backends.disc.target.cpu import CpuTarget

MlirTexts = tuple[tuple[str, str], ...]


def weight_only_plan(value: Value, target: CpuTarget) -> tuple[NativeCall, MlirTexts]:
    """The call and the functions it needs, (name, MLIR)."""
    x, weight, scales, bias = value.args
    columns, depth = (int(d) for d in weight.shape)
    floats = gemm_tiling(target)
    tiles = tiling(columns, floats.rows, floats.vectors, floats.lanes)
    bits, has_zeros = value.attrs["bits"], value.attrs.get("zeros", False)
    size = depth // (int(scales.shape[1]) // (2 if has_zeros else 1))
    code = WeightOnlySpec(bits, tiles, rows_of_unit(bits, size, target), has_zeros)
    panels = -(-columns // tiles.width)
    count = numel(x.shape[:-1])
    groups = FloorDiv(sympy.sympify(count) + GROUP_ROWS - 1, GROUP_ROWS)
    padded = panels * tiles.width
    call = NativeCall(
        code.name,
        plain(sympy.sympify(groups) * panels),
        plain(sympy.Min(count, GROUP_ROWS) * depth * tiles.vectors),
        0,
        (
            x,
            _weights(weight, code),
            _scales(scales, padded),
            packed_row(bias, 1.0, PackedColumns(tiles.width, columns)),
            value,
        ),
        (count, columns, depth, row_distance(x, len(x.shape) - 1), columns, size, padded),
    )
    functions = (
        (code.name, widen_gemm.gemm_text(code)),
        (widen_gemm.pack_name(code), widen_gemm.pack_text(code)),
        (widen_gemm.SCALES, widen_gemm.scales_text()),
        (int8_gemm.ROW, int8_gemm.row_text()),
    )
    return call, functions


def _weights(weight: Value, code: WeightOnlySpec) -> PackedBuffer:
    """``weight`` [n, depth] in panels."""
    columns, depth = (int(d) for d in weight.shape)
    fills = [
        Fill(p.constant, p.size, (p.offset, depth, *p.strides, p.first)) for p in parts(weight)
    ]
    size = -(-columns // code.tiles.width) * code.tiles.width * (depth // code.rows)
    dtype = torch.int32 if code.has_words else torch.int8
    return PackedBuffer(widen_gemm.pack_name(code), dtype, size, tuple(fills))


def _scales(scales: Value, padded: int) -> PackedBuffer:
    """``scales`` [n, groups], group by group, and the zero points behind them."""
    groups = int(scales.shape[1])
    fills = [
        Fill(p.constant, p.size, (p.offset, groups, *p.strides, p.first, padded))
        for p in parts(scales)
    ]
    return PackedBuffer(widen_gemm.SCALES, torch.float32, padded * groups, tuple(fills))
