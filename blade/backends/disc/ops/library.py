# SPDX-License-Identifier: Apache-2.0
"""Rows of compute-intensive ops: they become library instructions (GEMM, attention, gather).

What can be prepared once is taken out of the call here: an attention mask of booleans, which torch
would convert again in every layer, becomes an additive float mask, a value shared by all layers.
"""

import math
from collections.abc import Sequence
from typing import Any

import sympy
import torch

from blade.backends.disc.ir import Value
from blade.backends.disc.ops.table import Lowering, lowers

aten = torch.ops.aten
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@lowers(aten.linear.default)
def linear(lo: Lowering, x: Value, weight: Value, bias: Value | None = None) -> Value:
    if len(weight.shape) != 2 or not x.shape or x.dtype not in FLOATS:
        raise lo.otherwise()
    args = (x, weight) if bias is None else (x, weight, bias)
    return lo.b.make("linear", args, lo.shape, lo.dtype)


@lowers(aten.addmm.default)
def addmm(lo: Lowering, bias: Value, a: Value, b: Value, beta: Any = 1, alpha: Any = 1) -> Value:
    plain_bias = len(bias.shape) == 1 and bias.shape[0] == b.shape[1]
    if beta != 1 or alpha != 1 or not plain_bias or a.dtype not in FLOATS:
        raise lo.otherwise()
    return linear(lo, a, lo.b.permute(b, (1, 0)), bias)


@lowers(aten.mm.default)
def mm(lo: Lowering, a: Value, b: Value) -> Value:
    return linear(lo, a, lo.b.permute(b, (1, 0)))


@lowers(aten.bmm.default)
def bmm(lo: Lowering, a: Value, b: Value) -> Value:
    if a.dtype not in FLOATS:
        raise lo.otherwise()
    return lo.b.make("matmul", (a, b), lo.shape, lo.dtype)


@lowers(aten.matmul.default)
def matmul(lo: Lowering, a: Value, b: Value) -> Value:
    if len(a.shape) < 2 or len(b.shape) < 2 or a.dtype not in FLOATS:
        raise lo.otherwise()
    if len(b.shape) == 2:
        return linear(lo, a, lo.b.permute(b, (1, 0)))
    batch = lo.shape[:-2]
    a = lo.b.broadcast(a, (*batch, *a.shape[-2:]))
    b = lo.b.broadcast(b, (*batch, *b.shape[-2:]))
    return lo.b.make("matmul", (a, b), lo.shape, lo.dtype)


@lowers(aten.scaled_dot_product_attention.default)
def attention(
    lo: Lowering,
    q: Value,
    k: Value,
    v: Value,
    attn_mask: Value | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Value:
    if dropout_p != 0.0 or attn_mask is None or attn_mask.dtype != torch.bool:
        raise lo.otherwise()
    zero, never = (lo.b.fill(x, attn_mask.shape, q.dtype) for x in (0.0, -math.inf))
    bias = lo.b.pointwise("where", attn_mask, zero, never)
    args = (q, k, v, bias, dropout_p, is_causal, scale, enable_gqa)
    result: Value = lo.call(aten.scaled_dot_product_attention.default, args)
    return result


@lowers(aten.index.Tensor)
def index(lo: Lowering, x: Value, indices: Sequence[Value | None]) -> Value:
    """Indices that are each axis' own 0..n-1 select everything: a change of layout."""
    rank = len(lo.shape)
    axes = [_counted_axis(i, rank) for i in indices]
    found = [a for a in axes if a is not None]
    if len(found) != len(x.shape) or len(indices) != len(found) or found != sorted(set(found)):
        raise lo.otherwise()
    for axis, counted in enumerate(found):
        size = lo.shape[counted]
        if size != x.shape[axis]:
            lo.b.require(sympy.Le(size, x.shape[axis]), "index within bounds")
            x = lo.b.slice(x, axis, 0, 1, size)
    return lo.b.make("broadcast", (x,), lo.shape, lo.dtype, axes=tuple(found))


def _counted_axis(index: Value | None, rank: int) -> int | None:
    """The result axis along which ``index`` is exactly 0, 1, 2, ..., if it is that everywhere."""
    if index is None or index.op != "iota":
        return None
    return int(index.attrs["axis"]) + rank - len(index.shape)
