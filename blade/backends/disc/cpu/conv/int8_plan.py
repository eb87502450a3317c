# SPDX-License-Identifier: Apache-2.0
"""The call for an ``int8_linear`` or ``int8_conv``: its code, and its constants in packed layouts."""

import math
from dataclasses import replace

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv

from blade.backends.disc.cpu.conv import int8_conv
from blade.backends.disc.cpu.conv import pixel_pointers as conv_rows
from blade.backends.disc.cpu.conv.int8_depthwise_plan import depthwise_plan
from blade.backends.disc.cpu.conv.int8_pack import (
    MlirTexts,
    packed_border,
    packed_sums,
    packed_weights,
    packing,
)
from blade.backends.disc.cpu.conv.plan import three
from blade.backends.disc.cpu.emit.element_types import MEMORY
from blade.backends.disc.cpu.emit.int8_dot import QUAD, Int8Dot, int8_dot
from blade.backends.disc.cpu.gemm import int8_gemm
from blade.backends.disc.cpu.gemm.driver import group_rows, tiling
from blade.backends.disc.cpu.gemm.int8_epilogue import REQUANTIZE, RESIDUAL, Int8Epilogue
from blade.backends.disc.cpu.gemm.int8_micro_kernel import ROW_FACTORS, Int8KernelSpec
from blade.backends.disc.cpu.gemm.packing import PackedColumns, bits, columns_of, packed_row
from blade.backends.disc.ir.graph import Value, numel, plain
from blade.backends.disc.ir.int8_epilogue import body_of, residual_of
from blade.backends.disc.ir.views import row_distance
from blade.backends.disc.passes.int8_conv_shapes import is_depthwise_int8
from blade.backends.disc.program.instructions import NativeCall, PackedBuffer
from blade.backends.disc.target.cpu import CpuTarget

Operands = tuple[Value | PackedBuffer, ...]


def int8_plan(value: Value, target: CpuTarget) -> tuple[NativeCall, MlirTexts]:
    """The call and the functions it needs, (name, MLIR)."""
    x, weight, *_ = value.args
    rows = value.args[4:]
    residual = residual_of(value)
    rows = rows if residual is None else rows[:-1]
    count, (n, depth) = numel(x.shape[:-1]), (int(d) for d in weight.shape)
    tiles = int8_dot(target)
    columns = PackedColumns(tiles.width, n)
    form = _form(value, tiles, columns, ROW_FACTORS[len(rows)], in_taps=False)
    most = group_rows(bool(tiles.tile_product))
    groups = FloorDiv(sympy.sympify(count) + most - 1, most)
    # if rows have their own zero points, the kernel multiplies by these
    factor = 1 if len(rows) == 2 else value.attrs["zero"] - tiles.offset
    operands: Operands = (x, *_constants(value, factor, columns), *rows, *_some(residual), value)
    call = NativeCall(
        form.name,
        plain(sympy.sympify(groups) * columns.panels),
        plain(FloorDiv(sympy.Min(count, most) * depth * tiles.vectors, QUAD) + 1),
        0,
        operands,
        (count, n, depth, row_distance(x, len(x.shape) - 1), n, *numbers(value, form.epilogue)),
        over(value, operands),
    )
    return call, ((form.name, int8_gemm.gemm_text(form)), *packing(columns.width))


def int8_conv_plan(value: Value, target: CpuTarget) -> tuple[NativeCall, MlirTexts]:
    """The call for an ``int8_conv`` and the functions it needs."""
    x, weight, residual = value.args[0], value.args[1], residual_of(value)
    if is_depthwise_int8(weight, value.attrs["groups"]):
        after = epilogue(value)
        return depthwise_plan(value, target, after, numbers(value, after))
    tiles, columns = _columns(value, int8_dot(target))
    form = _form(value, tiles, columns, "none", in_taps=True)
    kernel, stride, padding, dilation = _window(value)
    # taps along w are adjacent in memory if no pixel lies outside
    merged = columns.groups == 1 and dilation[2] == 1 and padding[2] == 0
    width, taps = (kernel[2], (*kernel[:2], 1)) if merged else (1, kernel)
    channels = int(x.shape[-1])
    piece = channels * width if merged else channels // columns.blocks
    rows, block = numel(value.shape[:-1]), int8_conv.BLOCK_TILES * tiles.rows
    pitch = -(-block // 16) * 16
    inputs, results = (three(v.shape[1:-1], 1) for v in (x, value))
    ints = (
        *(rows, pitch, channels, piece, width, 0, 0),
        *(*inputs, *results, *taps, *stride, *padding, *dilation),
        *(columns.count, columns.blocks, block),
    )
    assert len(ints) == len(int8_conv.SIZES), (ints, int8_conv.SIZES)
    blocks = FloorDiv(sympy.sympify(rows) + block - 1, block)
    zero = value.attrs["zero"]
    operands: Operands = (
        x,
        *_constants(value, zero - tiles.offset, columns),
        packed_border(weight, zero, channels * width),
        *_some(residual),
        value,
    )
    work = math.prod(taps) * piece * tiles.vectors
    call = NativeCall(
        form.name,
        plain(sympy.sympify(blocks) * columns.blocks * columns.panels),
        plain(FloorDiv(sympy.Min(rows, block) * work, QUAD) + 1),
        pitch * (conv_rows.ARRAYS + math.prod(taps)) * 8,
        operands,
        (*ints, *numbers(value, form.epilogue)),
        over(value, operands),
    )
    own = (form.name, int8_conv.conv_text(form, target))
    fill = (int8_conv.FILL, int8_conv.fill_text())
    return call, (own, *packing(columns.width), fill)


def epilogue(value: Value) -> Int8Epilogue:
    """The epilogue of ``value``, an ``int8_linear`` or ``int8_conv``."""
    residual = residual_of(value)
    element = "" if residual is None else MEMORY[residual.dtype]
    return Int8Epilogue(body_of(value), element, value.dtype == torch.uint8)


def numbers(value: Value, epilogue: Int8Epilogue) -> list[int]:
    """The arguments that this product passes to ``epilogue``."""
    residual = value.attrs.get("residual", (1.0, 0))
    known = dict(zip(RESIDUAL, residual, strict=True))
    known |= {n: value.attrs[n] for n in REQUANTIZE if n in value.attrs}
    return [bits(float(known[name])) for name in epilogue.numbers]


def over(value: Value, operands: Operands) -> tuple[tuple[int, int], ...]:
    """The result may overwrite a residual, the last operand but one: each element is read first."""
    residual, last = residual_of(value), len(operands) - 1
    same = residual is not None and residual.dtype == value.dtype
    return ((last - 1, last),) if same else ()


def _form(
    value: Value, tiles: Int8Dot, columns: PackedColumns, rows: str, in_taps: bool
) -> Int8KernelSpec:
    shape = tiling(columns.own, tiles.rows, tiles.vectors, tiles.lanes)
    return Int8KernelSpec(tiles, shape, rows, in_taps, epilogue(value))


def _some(operand: Value | None) -> tuple[Value, ...]:
    return () if operand is None else (operand,)


def _constants(value: Value, factor: int, columns: PackedColumns) -> tuple[PackedBuffer, ...]:
    _, weight, scales, bias, *_ = value.args
    return (
        packed_weights(weight, columns),
        packed_sums(weight, factor, columns),
        packed_row(scales, value.attrs["scale"], columns),
        packed_row(bias, 1.0, columns),
    )


def _window(value: Value) -> tuple[tuple[int, ...], ...]:
    """Kernel, stride, padding and dilation over three axes."""
    given = [value.args[1].shape[2:], *(value.attrs[n] for n in ("stride", "padding", "dilation"))]
    missing = (1, 1, 0, 1)
    found = (three(tuple(g), m) for g, m in zip(given, missing, strict=True))
    return tuple(tuple(int(d) for d in sizes) for sizes in found)


def _columns(value: Value, tiles: Int8Dot) -> tuple[Int8Dot, PackedColumns]:
    """The columns of a convolution, and tiles no wider than those of a group."""
    weight, groups = value.args[1], value.attrs["groups"]
    n, channels = (int(d) for d in weight.shape[:2])
    columns = columns_of(groups, n, channels, (tiles.vectors, tiles.lanes), QUAD)
    return replace(tiles, vectors=columns.width // tiles.lanes), columns
