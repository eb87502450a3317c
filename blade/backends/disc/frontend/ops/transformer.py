# SPDX-License-Identifier: Apache-2.0
"""Rows of torch's fused transformer layers (the "fast path" of ``nn.TransformerEncoderLayer``).

They are decomposed into linear layers, attention, norms and activations, which DISC fuses itself. With a
mask they stay calls, because these ops give masks meanings of their own.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from blade.backends.disc.frontend.ops.activation import gelu, relu
from blade.backends.disc.frontend.ops.attention import attention
from blade.backends.disc.frontend.ops.library import linear
from blade.backends.disc.frontend.ops.norm import layer_norm
from blade.backends.disc.frontend.ops.table import Lowering, ResultType, lowers
from blade.backends.disc.ir.graph import Value, contiguous_strides
from blade.backends.disc.ir.kernel import Dim

aten = torch.ops.aten


def _of_shape(lo: Lowering, shape: Sequence[Dim]) -> Lowering:
    """A ``Lowering`` for a row whose result has this shape."""
    result = ResultType(tuple(shape), lo.dtype, contiguous_strides(shape))
    return replace(lo, results=(result,))


def _dense(lo: Lowering, x: Value, weight: Value, bias: Value | None) -> Value:
    return linear(_of_shape(lo, (*x.shape[:-1], weight.shape[0])), x, weight, bias)


def _self_attention(
    lo: Lowering, x: Value, heads: int, qkv: tuple[Value, Value], proj: tuple[Value, Value]
) -> Value:
    batch, length, width = x.shape
    if not isinstance(width, int):
        raise lo.otherwise()
    joint = _dense(lo, x, *qkv)
    split = (batch, length, heads, width // heads)
    inner = _of_shape(lo, (batch, heads, length, width // heads))
    q, k, v = (
        lo.b.permute(lo.b.reshape(lo.b.slice(joint, 2, n * width, 1, width), split), (0, 2, 1, 3))
        for n in range(3)
    )
    mixed = lo.b.permute(attention(inner, q, k, v), (0, 2, 1, 3))
    return _dense(lo, lo.b.reshape(mixed, (batch, length, width)), *proj)


@lowers(aten._transformer_encoder_layer_fwd.default)
def encoder_layer(
    lo: Lowering,
    src: Value,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Value,
    qkv_bias: Value,
    proj_weight: Value,
    proj_bias: Value,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Value,
    norm_bias_1: Value,
    norm_weight_2: Value,
    norm_bias_2: Value,
    ffn_weight_1: Value,
    ffn_bias_1: Value,
    ffn_weight_2: Value,
    ffn_bias_2: Value,
    mask: Value | None = None,
    mask_type: int | None = None,
) -> Value:
    if mask is not None or len(src.shape) != 3:
        raise lo.otherwise()

    def norm(x: Value, weight: Value, bias: Value) -> Value:
        return layer_norm(_of_shape(lo, x.shape), x, [embed_dim], weight, bias, eps)

    def attend(x: Value) -> Value:
        return _self_attention(lo, x, num_heads, (qkv_weight, qkv_bias), (proj_weight, proj_bias))

    def feed_forward(x: Value) -> Value:
        inner = _dense(lo, x, ffn_weight_1, ffn_bias_1)
        inner = (gelu if use_gelu else relu)(_of_shape(lo, inner.shape), inner)
        return _dense(lo, inner, ffn_weight_2, ffn_bias_2)

    first, second = (norm_weight_1, norm_bias_1), (norm_weight_2, norm_bias_2)
    if norm_first:
        x = lo.b.pointwise("add", src, attend(norm(src, *first)))
        return lo.b.pointwise("add", x, feed_forward(norm(x, *second)))
    x = norm(lo.b.pointwise("add", src, attend(src)), *first)
    return norm(lo.b.pointwise("add", x, feed_forward(x)), *second)


@lowers(aten._native_multi_head_attention.default)
def native_attention(
    lo: Lowering,
    query: Value,
    key: Value,
    value: Value,
    embed_dim: int,
    num_head: int,
    qkv_weight: Value,
    qkv_bias: Value,
    proj_weight: Value,
    proj_bias: Value,
    mask: Value | None = None,
    need_weights: bool = True,
    *_: Any,
) -> list[Value]:
    for size in query.shape:
        lo.at_least(size, 1, "attention over elements")
    if mask is not None or need_weights or not (query is key is value):
        raise lo.otherwise()
    qkv, proj = (qkv_weight, qkv_bias), (proj_weight, proj_bias)
    y = _self_attention(lo, query, num_head, qkv, proj)
    return [y, *(lo.b.fill(0, r.shape, r.dtype) for r in lo.results[1:])]
