# SPDX-License-Identifier: Apache-2.0
"""Which library instructions run as code we generate, and how: one function per op of the IR.

native(value, target) -> Native(call, code) | None: then ATen serves it
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import sympy
from torch.utils._sympy.functions import FloorDiv

from blade.backends.disc.constants import parts_of
from blade.backends.disc.cpu import attention_gradient, attention_kernel, gemm, matmul
from blade.backends.disc.cpu.attention import attention_call, gradient_call
from blade.backends.disc.cpu.conv_plan import plan
from blade.backends.disc.cpu.int8_plan import int8_conv_plan, int8_plan
from blade.backends.disc.cpu.micro_kernel import Form, form
from blade.backends.disc.cpu.pool_plan import pool_call
from blade.backends.disc.cpu.target import Target
from blade.backends.disc.cpu.widen_plan import widen_plan
from blade.backends.disc.ir import Value, numel, plain
from blade.backends.disc.legalize import is_packed
from blade.backends.disc.steps import Fill, NativeCall, Packed
from blade.backends.disc.views import row_distance
from blade.exchange.dtypes import DTYPES


@dataclass(frozen=True)
class Native:
    """``call`` and the functions it needs, its packing included: (name, MLIR); ``before`` it others may run."""

    call: NativeCall
    code: tuple[tuple[str, str], ...]
    before: tuple[NativeCall, ...] = ()


def native(value: Value, target: Target) -> Native | None:
    """How ``value`` runs natively on ``target``, or ``None``."""
    rule = _RULES.get(value.op)
    return None if rule is None else rule(value, target)


def _linear(value: Value, target: Target) -> Native | None:
    """A product with constant weights, packed once per loaded engine."""
    if not is_packed(value):
        return None
    x, weight = value.args[:2]
    columns, depth = (int(d) for d in weight.shape)
    tiles = form(target, DTYPES[value.dtype])
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
    return Native(call, ((product.name, gemm.gemm_text(product)), pack))


def _int8_linear(value: Value, target: Target) -> Native:
    """A product of bytes with constant ones."""
    return Native(*int8_plan(value, target))


def _int8_conv(value: Value, target: Target) -> Native:
    """A convolution of bytes with constant ones."""
    return Native(*int8_conv_plan(value, target))


def _weight_only_linear(value: Value, target: Target) -> Native:
    """A product of floats with constant bytes, or with halves of bytes."""
    return Native(*widen_plan(value, target))


def _packed(weight: Value, depth: int, tiles: Form) -> Packed:
    """``weight`` [n, depth] in panels."""
    parts = parts_of(weight)
    assert parts is not None, weight
    fills = (Fill(p.constant, p.size, (p.offset, depth, *p.strides, p.first)) for p in parts)
    numel = gemm.panels(int(weight.shape[0]), tiles) * tiles.width * depth
    return Packed(gemm.pack_name(tiles), weight.dtype, numel, tuple(fills))


def _packed_bias(bias: Value | None, product: Value, tiles: Form) -> Packed:
    """``bias`` (or zeros) in whole panels: a matrix of depth 1."""
    numel = gemm.panels(int(product.shape[-1]), tiles) * tiles.width
    parts = parts_of(bias) if bias is not None else ()
    assert parts is not None, bias
    fills = (Fill(p.constant, p.size, (p.offset, 1, *p.strides, 1, p.first)) for p in parts)
    return Packed(gemm.pack_name(tiles), product.dtype, numel, tuple(fills))


def _attention(value: Value, target: Target) -> Native:
    code = ((attention_kernel.NAME, attention_kernel.attention_text(target)),)
    return Native(attention_call(value, target), code)


def _flash_attention(value: Value, target: Target) -> Native:
    """Attention that leaves what its gradient needs."""
    name, text = attention_kernel.NAME_WITH_LOGS, attention_kernel.attention_text(target, logs=True)
    return Native(attention_call(value, target), ((name, text),))


def _flash_attention_gradient(value: Value, target: Target) -> Native:
    code = ((attention_gradient.NAME, attention_gradient.gradient_text(target)),)
    return Native(gradient_call(value, target), code)


def _conv(value: Value, target: Target) -> Native | None:
    """A convolution."""
    found = plan(value, target)
    return None if found is None else Native(*found)


def _matmul(value: Value, target: Target) -> Native | None:
    """A product of two computed matrices."""
    call = matmul.matmul_call(value, target)
    product = matmul.matmul(value.shape[-1], form(target), len(value.args) == 3)
    return None if call is None else Native(call, ((product.name, matmul.matmul_text(product)),))


def _spatial(value: Value, target: Target) -> Native | None:
    """Pooling of images."""
    found = pool_call(value, target)
    return None if found is None else Native(*found)


_RULES: Mapping[str, Callable[[Value, Target], Native | None]] = {
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
