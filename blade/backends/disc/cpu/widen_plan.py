# SPDX-License-Identifier: Apache-2.0
"""How a ``weight_only_linear`` of the IR runs: which code, and which constants laid out how."""

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv

from blade.backends.disc.cpu import int8_gemm, widen_gemm
from blade.backends.disc.cpu.gemm import GROUP_ROWS
from blade.backends.disc.cpu.gemm_driver import tiling
from blade.backends.disc.cpu.int8_pack import Columns, packed_row, parts
from blade.backends.disc.cpu.micro_kernel import form
from blade.backends.disc.cpu.target import Target
from blade.backends.disc.cpu.widen_kernel import WidenForm
from blade.backends.disc.ir import Value, numel, plain
from blade.backends.disc.steps import Fill, NativeCall, Packed
from blade.backends.disc.views import row_distance

Code = tuple[tuple[str, str], ...]


def widen_plan(value: Value, target: Target) -> tuple[NativeCall, Code]:
    """The call and the functions it needs, (name, MLIR)."""
    x, weight, scales, bias = value.args
    columns, depth = (int(d) for d in weight.shape)
    floats = form(target)
    tiles = tiling(columns, floats.rows, floats.vectors, floats.lanes)
    code = WidenForm(value.attrs["bits"], tiles)
    panels = -(-columns // tiles.width)
    count = numel(x.shape[:-1])
    groups = FloorDiv(sympy.sympify(count) + GROUP_ROWS - 1, GROUP_ROWS)
    size = depth // int(scales.shape[1])
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
            packed_row(bias, 1.0, Columns(tiles.width, columns)),
            value,
        ),
        (count, columns, depth, row_distance(x, len(x.shape) - 1), columns, size, padded),
    )
    functions = (
        (code.name, widen_gemm.gemm_text(code)),
        (widen_gemm.pack_name(code.bits, tiles), widen_gemm.pack_text(code)),
        (widen_gemm.SCALES, widen_gemm.scales_text()),
        (int8_gemm.ROW, int8_gemm.row_text()),
    )
    return call, functions


def _weights(weight: Value, code: WidenForm) -> Packed:
    """``weight`` [n, depth] in panels."""
    columns, depth = (int(d) for d in weight.shape)
    fills = [
        Fill(p.constant, p.size, (p.offset, depth, *p.strides, p.first)) for p in parts(weight)
    ]
    size = -(-columns // code.tiles.width) * code.tiles.width * (depth // code.rows_of_byte)
    return Packed(widen_gemm.pack_name(code.bits, code.tiles), torch.int8, size, tuple(fills))


def _scales(scales: Value, padded: int) -> Packed:
    """``scales`` [n, groups], group by group."""
    groups = int(scales.shape[1])
    fills = [
        Fill(p.constant, p.size, (p.offset, groups, *p.strides, p.first, padded))
        for p in parts(scales)
    ]
    return Packed(widen_gemm.SCALES, torch.float32, padded * groups, tuple(fills))
