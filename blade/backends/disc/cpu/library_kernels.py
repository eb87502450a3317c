# SPDX-License-Identifier: Apache-2.0
"""Library instructions that run as generated code on the CPU: one function per op of the IR.

native_kernel(value, target) -> NativeKernel(call, code) | None        None: ATen computes it
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv

from blade.backends.disc.cpu.attention import gradient as attention_gradient
from blade.backends.disc.cpu.attention import kernel as attention_kernel
from blade.backends.disc.cpu.attention.calls import attention_call, gradient_call
from blade.backends.disc.cpu.conv.bf16_plan import conv_plan as bf16_conv_plan
from blade.backends.disc.cpu.conv.int8_plan import int8_conv_plan, int8_plan
from blade.backends.disc.cpu.conv.max_pool_plan import pool_call
from blade.backends.disc.cpu.conv.plan import plan
from blade.backends.disc.cpu.emit.element_types import MEMORY
from blade.backends.disc.cpu.gemm import batched_matmul as matmul
from blade.backends.disc.cpu.gemm import bf16_plan, gemm
from blade.backends.disc.cpu.gemm.micro_kernel import GemmTiling, gemm_tiling
from blade.backends.disc.cpu.gemm.weight_only_plan import weight_only_plan
from blade.backends.disc.ir.constant_parts import parts_of
from blade.backends.disc.ir.convolution import is_depthwise
from blade.backends.disc.ir.graph import Value, numel, plain
from blade.backends.disc.ir.views import row_distance
from blade.backends.disc.passes.legalize import is_packed
from blade.backends.disc.program.instructions import Fill, NativeCall, PackedBuffer
from blade.backends.disc.target.cpu import CpuTarget
from blade.program.dtypes import DTYPES


@dataclass(frozen=True)
class NativeKernel:
    """``call``; the functions it needs, as (name, MLIR), packing included; the calls ``before`` it."""

    call: NativeCall
    code: tuple[tuple[str, str], ...]
    before: tuple[NativeCall, ...] = ()


def native_kernel(value: Value, target: CpuTarget) -> NativeKernel | None:
    """The generated code for ``value`` on ``target``; ``None`` if ATen computes it."""
    rule = _RULES.get(value.op)
    return None if rule is None else rule(value, target)


def _linear(value: Value, target: CpuTarget) -> NativeKernel | None:
    """A product with constant weights, packed once per loaded engine."""
    if not is_packed(value):
        return None
    x, weight = value.args[:2]
    if x.dtype == torch.bfloat16:
        return NativeKernel(*bf16_plan.linear_plan(value, target))
    columns, depth = (int(d) for d in weight.shape)
    tiles = gemm_tiling(target, DTYPES[value.dtype])
    product = gemm.gemm_for(columns, tiles)
    bias = value.args[2] if len(value.args) == 3 else None
    packed = _packed(weight, depth, tiles)
    rows = numel(x.shape[:-1])
    groups = FloorDiv(sympy.sympify(rows) + gemm.GROUP_ROWS - 1, gemm.GROUP_ROWS)
    call = NativeCall(
        product.name,
        plain(sympy.sympify(groups) * gemm.panels(columns, tiles)),
        plain(sympy.Min(rows, gemm.GROUP_ROWS) * depth * tiles.vectors),
        0,
        (x, packed, _packed_bias(bias, value, tiles), value),
        (rows, columns, depth, row_distance(x, len(x.shape) - 1), columns),
    )
    pack = (gemm.pack_name(tiles), gemm.pack_text(tiles))
    return NativeKernel(call, ((product.name, gemm.gemm_text(product)), pack))


def _int8_linear(value: Value, target: CpuTarget) -> NativeKernel:
    """A product of bytes with constant bytes."""
    return NativeKernel(*int8_plan(value, target))


def _int8_conv(value: Value, target: CpuTarget) -> NativeKernel:
    """A convolution of bytes with constant bytes."""
    return NativeKernel(*int8_conv_plan(value, target))


def _weight_only_linear(value: Value, target: CpuTarget) -> NativeKernel:
    """A product of floats with constant weights of 8 or 4 bits."""
    return NativeKernel(*weight_only_plan(value, target))


def _packed(weight: Value, depth: int, tiles: GemmTiling) -> PackedBuffer:
    """``weight`` [n, depth] in panels."""
    parts = parts_of(weight)
    assert parts is not None, weight
    fills = (Fill(p.constant, p.size, (p.offset, depth, *p.strides, p.first)) for p in parts)
    numel = gemm.panels(int(weight.shape[0]), tiles) * tiles.width * depth
    return PackedBuffer(gemm.pack_name(tiles), weight.dtype, numel, tuple(fills))


def _packed_bias(bias: Value | None, product: Value, tiles: GemmTiling) -> PackedBuffer:
    """``bias`` (or zeros) in whole panels, as a matrix of depth 1."""
    numel = gemm.panels(int(product.shape[-1]), tiles) * tiles.width
    parts = parts_of(bias) if bias is not None else ()
    assert parts is not None, bias
    fills = (Fill(p.constant, p.size, (p.offset, 1, *p.strides, 1, p.first)) for p in parts)
    return PackedBuffer(gemm.pack_name(tiles), product.dtype, numel, tuple(fills))


def _attention(value: Value, target: CpuTarget) -> NativeKernel:
    if value.args[0].dtype == torch.bfloat16:
        result = MEMORY[value.dtype]
        text = attention_kernel.bf16_text(target, result)
        return NativeKernel(
            attention_call(value, target), ((attention_kernel.bf16_name(result), text),)
        )
    code = ((attention_kernel.NAME, attention_kernel.attention_text(target)),)
    return NativeKernel(attention_call(value, target), code)


def _flash_attention(value: Value, target: CpuTarget) -> NativeKernel:
    """Attention that also stores what its gradient needs."""
    name, text = attention_kernel.NAME_WITH_LOGS, attention_kernel.attention_text(target, logs=True)
    return NativeKernel(attention_call(value, target), ((name, text),))


def _flash_attention_gradient(value: Value, target: CpuTarget) -> NativeKernel:
    code = ((attention_gradient.NAME, attention_gradient.gradient_text(target)),)
    return NativeKernel(gradient_call(value, target), code)


def _conv(value: Value, target: CpuTarget) -> NativeKernel | None:
    """A convolution."""
    narrow = value.args[0].dtype == torch.bfloat16 and not is_depthwise(value)
    found = bf16_conv_plan(value, target) if narrow else plan(value, target)
    return None if found is None else NativeKernel(*found)


def _matmul(value: Value, target: CpuTarget) -> NativeKernel | None:
    """A product of two computed matrices."""
    if value.args[0].dtype == value.args[1].dtype == torch.bfloat16 and value.shape[-2] != 1:
        found = bf16_plan.matmul_plan(value, target)
        return None if found is None else NativeKernel(*found)
    call = matmul.matmul_call(value, target)
    product = matmul.matmul(value.shape[-1], gemm_tiling(target), len(value.args) == 3)
    return (
        None if call is None else NativeKernel(call, ((product.name, matmul.matmul_text(product)),))
    )


def _spatial(value: Value, target: CpuTarget) -> NativeKernel | None:
    """Pooling of images."""
    found = pool_call(value, target)
    return None if found is None else NativeKernel(*found)


_RULES: Mapping[str, Callable[[Value, CpuTarget], NativeKernel | None]] = {
    "linear": _linear,
    "int8_linear": _int8_linear,
    "int8_conv": _int8_conv,
    "weight_only_linear": _weight_only_linear,
    "matmul": _matmul,
    "attention": _attention,
    "flash_attention": _flash_attention,
    "flash_attention_gradient": _flash_attention_gradient,
    "conv": _conv,
    "spatial": _spatial,
}
