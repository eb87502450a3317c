# SPDX-License-Identifier: Apache-2.0
"""The call for a depthwise ``int8_conv``: its code, and its constants in packed layouts."""

import math

import sympy
import torch

from blade.backends.disc.cpu.conv import int8_conv
from blade.backends.disc.cpu.conv.depthwise import RUN, DepthwiseTaps
from blade.backends.disc.cpu.conv.int8_depthwise import (
    SIZES,
    Int8DepthwiseSpec,
    depthwise_text,
    pack_name,
    pack_text,
)
from blade.backends.disc.cpu.conv.int8_pack import (
    MlirTexts,
    packed_border,
    packed_sums,
    packing,
)
from blade.backends.disc.cpu.conv.plan import three
from blade.backends.disc.cpu.emit.int8_dot import int8_dot
from blade.backends.disc.cpu.gemm.int8_epilogue import Int8Epilogue
from blade.backends.disc.cpu.gemm.packing import PackedColumns, packed_row, parts
from blade.backends.disc.ir.graph import Value, plain
from blade.backends.disc.ir.int8_epilogue import residual_of
from blade.backends.disc.program.instructions import Fill, NativeCall, PackedBuffer
from blade.backends.disc.target.cpu import CpuTarget


def depthwise_plan(
    value: Value, target: CpuTarget, epilogue: Int8Epilogue, numbers: list[int]
) -> tuple[NativeCall, MlirTexts]:
    """The call and the functions it needs, (name, MLIR); ``numbers``: those of ``epilogue``."""
    x, weight, scales, bias, *_ = value.args
    channels, attrs = int(x.shape[-1]), value.attrs
    kernel = tuple(int(d) for d in three(weight.shape[2:], 1))
    stride, gap = three(attrs["stride"], 1), three(attrs["dilation"], 1)
    padding = three(attrs["padding"], 0)
    form = Int8DepthwiseSpec(DepthwiseTaps(kernel[2], stride[2], gap[2]), epilogue, target)
    inputs, results = (three(v.shape[1:-1], 1) for v in (x, value))
    ints = (
        *(channels, *inputs[1:], *results[1:]),
        *(kernel[1], stride[1], padding[1], gap[1], padding[2]),
    )
    assert len(ints) == len(SIZES), (ints, SIZES)
    run, columns, zero = (
        RUN * target.lanes,
        PackedColumns(int8_dot(target).width, channels),
        attrs["zero"],
    )
    block = form.lanes * form.vectors
    residual = residual_of(value)
    work = math.prod(kernel) * min(channels, run)
    call = NativeCall(
        form.name,
        plain(sympy.sympify(value.shape[0]) * results[1] * -(-channels // run)),
        plain(sympy.sympify(results[2]) * work),
        0,
        (
            *(x, _packed(weight, form), packed_sums(weight, zero, columns)),
            *(packed_row(scales, attrs["scale"], columns), packed_row(bias, 1.0, columns)),
            packed_border(weight, zero, block),
            *(() if residual is None else (residual,)),
            value,
        ),
        (*ints, *numbers),
    )
    code = (
        (form.name, depthwise_text(form)),
        (pack_name(form.lanes), pack_text(form.lanes)),
        (int8_conv.FILL, int8_conv.fill_text()),
        *packing(columns.width),
    )
    return call, code


def _packed(weight: Value, form: Int8DepthwiseSpec) -> PackedBuffer:
    """``weight`` [C, 1, *kernel] as floats, in panels of one vector of channels."""
    kernel = [int(d) for d in three(weight.shape[2:], 1)][1:]
    block = form.lanes * form.vectors
    size = -(-int(weight.shape[0]) // block) * block * math.prod(kernel)
    fills = []
    for part in parts(weight):
        steps = three(part.strides[2:], 0)[1:]
        layout = (part.offset, *kernel, part.strides[0], *map(int, steps), part.first)
        fills.append(Fill(part.constant, part.size, layout))
    return PackedBuffer(pack_name(form.lanes), torch.float32, size, tuple(fills))
