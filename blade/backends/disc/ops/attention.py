# SPDX-License-Identifier: Apache-2.0
"""The row of scaled dot-product attention.

What can be prepared once is taken out of the op: a mask of booleans, which torch would convert again in
every layer, becomes an additive float mask at its own shape, a value shared by all layers.
"""

import math
from typing import Any

import torch

from blade.backends.disc.attention import attend, grouped, unrepeated, why_not
from blade.backends.disc.ir import Value
from blade.backends.disc.ops.table import Lowering, lowers

aten = torch.ops.aten


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
    if dropout_p != 0.0:
        raise lo.otherwise()
    bias = attn_mask
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        zero, never = (lo.b.fill(x, attn_mask.shape, q.dtype) for x in (0.0, -math.inf))
        bias = lo.b.pointwise("where", attn_mask, zero, never)
    if isinstance(scale, (int, float)):
        factor = float(scale)
    elif scale is None and isinstance(q.shape[-1], int):
        factor = 1 / math.sqrt(max(1, q.shape[-1]))
    else:
        factor = math.nan
    if math.isnan(factor) or why_not(q, k, v, bias) is not None:
        return _called(lo, q, k, v, bias, is_causal, scale, enable_gqa)
    lead = lo.shape[:-2]
    shape = (*lead, q.shape[-2], k.shape[-2])
    wide = None if bias is None else lo.b.broadcast(bias, shape)
    q = lo.b.broadcast(q, (*lead, *q.shape[-2:]))
    repeated = unrepeated(k), unrepeated(v)
    if repeated[0] is not None and repeated[1] is not None and len(lead) < 4:
        k, v = repeated[0], repeated[1]
        if k.shape[:-2] == v.shape[:-2] and k.shape[:-3] == lead[:-1]:
            return grouped(lo.b, q, k, v, wide, factor, is_causal)
    if enable_gqa and k.shape[-3] != q.shape[-3]:
        if not (isinstance(k.shape[-3], int) and isinstance(q.shape[-3], int)) or len(lead) == 4:
            return _called(lo, q, k, v, bias, is_causal, scale, enable_gqa)
        k, v = (lo.b.broadcast(x, (*lead[:-1], *x.shape[-3:])) for x in (k, v))
        return grouped(lo.b, q, k, v, wide, factor, is_causal)
    k, v = (lo.b.broadcast(x, (*lead, *x.shape[-2:])) for x in (k, v))
    return attend(lo.b, q, k, v, wide, factor, is_causal)


def _called(
    lo: Lowering,
    q: Value,
    k: Value,
    v: Value,
    bias: Value | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Value:
    args = (q, k, v, bias, 0.0, is_causal, scale, enable_gqa)
    result: Value = lo.call(aten.scaled_dot_product_attention.default, args)
    return result


@lowers(
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)
def flash_attention(lo: Lowering, *tensors: Value | None, **_: Any) -> None:
    """ATen's, which divides by zero where there is no query or no key."""
    for x in tensors:
        if isinstance(x, Value):
            for size in x.shape:
                lo.at_least(size, 1, "attention between elements")
    raise lo.otherwise()
