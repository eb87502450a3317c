# SPDX-License-Identifier: Apache-2.0
"""The calls for products of bfloat16: their code, and constants in packed layouts."""

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv

from blade.backends.disc.cpu.emit.bf16_dot import PAIR, bf16_dot
from blade.backends.disc.cpu.emit.element_types import MEMORY
from blade.backends.disc.cpu.emit.matrix_tiles import in_steps
from blade.backends.disc.cpu.gemm import bf16_gemm, bf16_matmul
from blade.backends.disc.cpu.gemm.batched_matmul import matrix_strides
from blade.backends.disc.cpu.gemm.bf16_micro_kernel import Bf16KernelSpec
from blade.backends.disc.cpu.gemm.driver import PanelTiling, group_rows, tiling
from blade.backends.disc.cpu.gemm.packing import PackedColumns, parts
from blade.backends.disc.ir.graph import Value, numel, plain
from blade.backends.disc.ir.views import row_distance
from blade.backends.disc.program.instructions import Fill, NativeCall, PackedBuffer
from blade.backends.disc.target.cpu import CpuTarget

MlirTexts = tuple[tuple[str, str], ...]


def linear_plan(value: Value, target: CpuTarget) -> tuple[NativeCall, MlirTexts]:
    """The call for a ``linear`` with constant weights, and the functions it needs, (name, MLIR)."""
    x, weight, *bias = value.args
    columns, depth = (int(d) for d in weight.shape)
    dot = in_steps(bf16_dot(target), depth // PAIR)
    tiles = tiling(columns, dot.rows, dot.vectors, dot.lanes)
    form = Bf16KernelSpec(dot, tiles, MEMORY[value.dtype])
    packed = PackedColumns(dot.width, columns)
    count = numel(x.shape[:-1])
    most = group_rows(bool(dot.tile_product))
    groups = FloorDiv(sympy.sympify(count) + most - 1, most)
    pack = bf16_gemm.pack_name(dot, weight.dtype)
    fills = [
        Fill(p.constant, p.size, (p.offset, depth, *p.strides, p.first, 0, depth))
        for p in parts(weight)
    ]
    size = packed.padded * -(-depth // PAIR)
    call = NativeCall(
        form.name,
        plain(sympy.sympify(groups) * packed.panels),
        plain(FloorDiv(sympy.Min(count, most) * depth * tiles.vectors, PAIR) + 1),
        0,
        (x, PackedBuffer(pack, torch.int32, size, tuple(fills)), row_of(bias, packed), value),
        (count, columns, depth, row_distance(x, len(x.shape) - 1), columns),
    )
    of_bias = bias[0].dtype if bias else torch.float32
    texts = (
        (form.name, bf16_gemm.gemm_text(form)),
        (pack, bf16_gemm.pack_text(dot, weight.dtype)),
        (bf16_gemm.row_name(of_bias), bf16_gemm.row_text(of_bias)),
    )
    return call, texts


def matmul_plan(value: Value, target: CpuTarget) -> tuple[NativeCall, MlirTexts] | None:
    """The call for a ``matmul`` of bfloat16, and the functions it needs; ``None`` if ATen computes it."""
    a, b, *bias = value.args
    a_strides, b_strides = matrix_strides(a), matrix_strides(b)
    if a_strides[-1] != 1 or any(c.dtype != torch.float32 for c in bias):
        return None
    (m, n), k, dot = value.shape[-2:], a.shape[-1], bf16_dot(target)
    edges = tuple(range(1, dot.vectors + 1))
    tiles = PanelTiling(dot.rows, dot.vectors, dot.lanes, edges)
    if isinstance(n, int):
        tiles = tiling(n, dot.rows, dot.vectors, dot.lanes)
    form = Bf16KernelSpec(dot, tiles, MEMORY[value.dtype], "matmul")
    rows = bf16_matmul.GROUP_ROWS
    groups = FloorDiv(sympy.sympify(m) + rows - 1, rows)
    panels = FloorDiv(sympy.sympify(n) + dot.width - 1, dot.width)
    pairs = FloorDiv(sympy.sympify(k) + 1, PAIR)
    call = NativeCall(
        form.name,
        plain(numel(value.shape[:-2]) * groups * panels),
        plain((sympy.Min(m, rows) + dot.lanes) * pairs * tiles.vectors + 1),
        plain((pairs + 1) * dot.width * 4),
        (a, b, *(bias or [a]), value),
        (m, n, k, *a_strides[:2], *b_strides, len(bias)),
    )
    return call, ((form.name, bf16_matmul.matmul_text(form)),)


def row_of(bias: list[Value], columns: PackedColumns) -> PackedBuffer:
    """The bias (or zeros) as float32, one per column."""
    fills = []
    for part in [p for b in bias for p in parts(b)]:
        [step] = part.strides
        for at, size in columns.runs(part, columns.own):
            layout = (part.offset + (at - part.first) * step, step, columns.place(at))
            fills.append(Fill(part.constant, size, layout))
    kernel = bf16_gemm.row_name(bias[0].dtype if bias else torch.float32)
    return PackedBuffer(kernel, torch.float32, columns.padded, tuple(fills))
