# SPDX-License-Identifier: Apache-2.0
"""Decompositions for ops where torch's own, or an exporter's translation, is missing or gives other values.

``REWRITES`` are decompositions (``decompose``): functions of the op's own arguments.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch

from blade.core.reason import Code
from blade.errors import Refused

aten = torch.ops.aten


def _convolution(x: Any, weight: Any, bias: Any, *rest: Any) -> Any:
    # torch.jit appends flags for cuDNN
    return aten.convolution.default(x, weight, bias, *rest[:6])


def _adaptive_avg_pool2d(x: Any, output_size: Sequence[int]) -> Any:
    if any(size != 1 for size in output_size):
        raise Refused(Code.UNSUPPORTED_OP, f"There is no average pooling to {output_size} in ONNX.")
    return aten.mean.dim(x, [-2, -1], True)


def _adaptive_avg_pool1d(x: Any, output_size: Sequence[int]) -> Any:
    if any(size != 1 for size in output_size):
        raise Refused(Code.UNSUPPORTED_OP, f"There is no average pooling to {output_size} in ONNX.")
    return aten.mean.dim(x, [-1], True)


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Rows without an unmasked key become 0, as in torch, and NaN stays NaN.

    (The exporter turns every NaN into 0.) A boolean mask becomes an additive one, which is smaller than the
    scores.
    """
    if enable_gqa:
        times = query.shape[-3] // key.shape[-3]
        key, value = (_repeat_heads(t, times) for t in (key, value))
    factor = scale if scale is not None else query.shape[-1] ** -0.5
    scores = torch.matmul(query, key.transpose(-2, -1)) * factor
    mask = attn_mask
    if is_causal:
        rows, columns = query.shape[-2], key.shape[-2]
        mask = torch.ones(rows, columns, dtype=torch.bool, device=query.device).tril()
    if mask is None:
        return torch.matmul(torch.softmax(scores, -1), value)
    if mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, float("-inf")).to(query.dtype)
    mixed = torch.matmul(torch.softmax(scores + mask, -1), value)
    if is_causal:  # each row has at least one key
        return mixed
    seen = (mask > float("-inf")).any(-1, keepdim=True)
    return torch.where(seen, mixed, 0.0)


def _stack(tensors: Sequence[Any], dim: int = 0) -> Any:
    """Stack in the dtype that torch promotes to; the exporter does not promote."""
    dtype = reduce(torch.promote_types, (t.dtype for t in tensors))
    return torch.cat([t.to(dtype).unsqueeze(dim) for t in tensors], dim)


def _repeat_heads(x: Any, times: Any) -> Any:
    wide = x.unsqueeze(-3).expand(*x.shape[:-2], times, *x.shape[-2:])
    return wide.reshape(*x.shape[:-3], x.shape[-3] * times, *x.shape[-2:])


REWRITES: dict[Any, Any] = {
    aten._convolution.default: _convolution,
    aten._convolution.deprecated: _convolution,
    aten.adaptive_avg_pool1d.default: _adaptive_avg_pool1d,
    aten.adaptive_avg_pool2d.default: _adaptive_avg_pool2d,
    aten.scaled_dot_product_attention.default: _attention,
    aten.stack.default: _stack,
}
