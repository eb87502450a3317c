# SPDX-License-Identifier: Apache-2.0
"""The call for a ``conv`` on bfloat16: its code, and its constants in packed layouts."""

import math
from dataclasses import replace

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv

from blade.backends.disc.cpu.conv import bf16_conv
from blade.backends.disc.cpu.conv import pixel_pointers as conv_rows
from blade.backends.disc.cpu.conv.int8_pack import by_tap
from blade.backends.disc.cpu.conv.plan import three
from blade.backends.disc.cpu.emit.bf16_dot import PAIR, Bf16Dot, bf16_dot
from blade.backends.disc.cpu.emit.element_types import MEMORY
from blade.backends.disc.cpu.emit.matrix_tiles import in_steps
from blade.backends.disc.cpu.gemm import bf16_gemm
from blade.backends.disc.cpu.gemm.bf16_micro_kernel import Bf16KernelSpec
from blade.backends.disc.cpu.gemm.bf16_plan import MlirTexts, row_of
from blade.backends.disc.cpu.gemm.driver import tiling
from blade.backends.disc.cpu.gemm.packing import PackedColumns, bits, columns_of
from blade.backends.disc.ir.convolution import CLAMPS, adjacent_taps, operands
from blade.backends.disc.ir.graph import Value, numel, plain
from blade.backends.disc.passes.bf16_convs import is_narrow_conv
from blade.backends.disc.program.instructions import Fill, NativeCall, PackedBuffer
from blade.backends.disc.target.cpu import CpuTarget

_TALLEST = 14  # rows of a tile


def conv_plan(value: Value, target: CpuTarget) -> tuple[NativeCall, MlirTexts] | None:
    """The call for ``value`` and the functions it needs; ``None`` if ATen computes it."""
    if not is_narrow_conv(value):
        return None
    given, a = operands(value), value.attrs
    dot, channels = bf16_dot(target), int(given.x.shape[-1])
    panel = (dot.vectors, dot.lanes)
    columns = columns_of(a["groups"], int(value.shape[-1]), channels // a["groups"], panel, PAIR)
    vectors = columns.width // dot.lanes
    width = adjacent_taps(value)
    piece = channels * width // columns.blocks
    rows_of_tile = min(_TALLEST, dot.rows * dot.vectors // vectors)
    dot = in_steps(replace(dot, vectors=vectors, rows=rows_of_tile), piece // PAIR)
    tiles = tiling(columns.own, dot.rows, dot.vectors, dot.lanes)
    residual = "" if given.residual is None else MEMORY[given.residual.dtype]
    form = Bf16KernelSpec(
        dot, tiles, MEMORY[value.dtype], "conv", True, residual, a["activation"] is not None
    )
    kernel = tuple(int(d) for d in three(tuple(given.weight.shape[2:]), 1))
    stride, padding, dilation = (
        three(a[n], m) for n, m in (("stride", 1), ("padding", 0), ("dilation", 1))
    )
    taps = (*kernel[:2], kernel[2] // width)
    rows, block = numel(value.shape[:-1]), bf16_conv.BLOCK_TILES * tiles.rows
    pitch = -(-block // 16) * 16
    inputs, results = (three(v.shape[1:-1], 1) for v in (given.x, value))
    ints = (
        *(rows, pitch, channels, piece, width, 0, 0),
        *(*inputs, *results, *taps, *stride, *padding, *dilation),
        *(columns.count, columns.blocks, block),
    )
    assert len(ints) == len(bf16_conv.SIZES), (ints, bf16_conv.SIZES)
    bias = [] if given.bias is None else [given.bias]
    zeros = PackedBuffer(bf16_gemm.row_name(torch.float32), torch.float32, channels * width, ())
    some = [] if given.residual is None else [given.residual]
    call = NativeCall(
        form.name,
        plain(FloorDiv(sympy.sympify(rows) + block - 1, block) * columns.blocks * columns.panels),
        plain(sympy.Min(rows, block) * math.prod(taps) * piece * tiles.vectors // PAIR + 1),
        pitch * (conv_rows.ARRAYS + math.prod(taps)) * 8,
        (
            given.x,
            _packed(given.weight, channels // a["groups"], columns, dot),
            row_of(bias, columns),
            zeros,
            *some,
            value,
        ),
        (*ints, *_bounds(a["activation"])),
        # each element of the residual is read just before its store
        ((4, 5),) if some and some[0].dtype == value.dtype else (),
    )
    source, of_bias = given.weight.dtype, bias[0].dtype if bias else torch.float32
    texts = {
        form.name: bf16_conv.conv_text(form, target),
        bf16_gemm.pack_name(dot, source): bf16_gemm.pack_text(dot, source),
        **{bf16_gemm.row_name(d): bf16_gemm.row_text(d) for d in (torch.float32, of_bias)},
    }
    return call, tuple(texts.items())


def _packed(weight: Value, channels: int, columns: PackedColumns, dot: Bf16Dot) -> PackedBuffer:
    """``weight`` [n, c, *kernel] in panels of pairs, tap by tap; ``channels``: those of a group's pixel, at least c."""
    depth, taps = int(weight.shape[1]), math.prod(int(d) for d in weight.shape[2:])
    piece, each, fills = channels * columns.merged, columns.count // columns.groups, []
    for tap, part, offset, (dn, dk) in by_tap(weight):
        for at, size in columns.runs(part, each):
            start = tap * piece + at // each % columns.merged * channels
            from_here = offset + (at - part.first) * dn
            layout = (from_here, depth, dn, dk, columns.place(at), start, taps * piece)
            fills.append(Fill(part.constant, size, layout))
    size = columns.padded * taps * piece // PAIR
    kernel = bf16_gemm.pack_name(dot, weight.dtype)
    return PackedBuffer(kernel, torch.int32, size, tuple(fills))


def _bounds(activation: str | None) -> tuple[int, ...]:
    """Bits of the two floats that results are clamped to."""
    if activation is None:
        return ()
    low, high = CLAMPS[activation]
    return bits(float(low)), bits(math.inf if high is None else float(high))
