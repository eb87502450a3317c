# SPDX-License-Identifier: Apache-2.0
"""How a depthwise ``int8_conv`` runs: which code, and which constants laid out how."""

import math

import sympy
import torch

from blade.backends.disc.cpu import int8_conv
from blade.backends.disc.cpu.conv_plan import three
from blade.backends.disc.cpu.depthwise import RUN, Taps
from blade.backends.disc.cpu.dot import dot
from blade.backends.disc.cpu.int8_depthwise import (
    SIZES,
    DepthwiseForm,
    depthwise_text,
    pack_name,
    pack_text,
)
from blade.backends.disc.cpu.int8_epilogue import Epilogue
from blade.backends.disc.cpu.int8_pack import (
    Code,
    Columns,
    packed_border,
    packed_row,
    packed_sums,
    packing,
    parts,
)
from blade.backends.disc.cpu.target import Target
from blade.backends.disc.epilogue import residual_of
from blade.backends.disc.ir import Value, plain
from blade.backends.disc.steps import Fill, NativeCall, Packed


def depthwise_plan(
    value: Value, target: Target, epilogue: Epilogue, numbers: list[int]
) -> tuple[NativeCall, Code]:
    """``numbers``: those of ``epilogue``."""
    x, weight, scales, bias, *_ = value.args
    channels, attrs = int(x.shape[-1]), value.attrs
    kernel = tuple(int(d) for d in three(weight.shape[2:], 1))
    stride, gap = three(attrs["stride"], 1), three(attrs["dilation"], 1)
    padding = three(attrs["padding"], 0)
    form = DepthwiseForm(Taps(kernel[2], stride[2], gap[2]), epilogue, target)
    inputs, results = (three(v.shape[1:-1], 1) for v in (x, value))
    ints = (
        *(channels, *inputs[1:], *results[1:]),
        *(kernel[1], stride[1], padding[1], gap[1], padding[2]),
    )
    assert len(ints) == len(SIZES), (ints, SIZES)
    run, columns, zero = RUN * target.lanes, Columns(dot(target).width, channels), attrs["zero"]
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


def _packed(weight: Value, form: DepthwiseForm) -> Packed:
    """``weight`` [C, 1, *kernel] as floats, in panels of a vector's channels."""
    kernel = [int(d) for d in three(weight.shape[2:], 1)][1:]
    block = form.lanes * form.vectors
    size = -(-int(weight.shape[0]) // block) * block * math.prod(kernel)
    fills = []
    for part in parts(weight):
        steps = three(part.strides[2:], 0)[1:]
        layout = (part.offset, *kernel, part.strides[0], *map(int, steps), part.first)
        fills.append(Fill(part.constant, part.size, layout))
    return Packed(pack_name(form.lanes), torch.float32, size, tuple(fills))
