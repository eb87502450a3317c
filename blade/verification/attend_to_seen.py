# SPDX-License-Identifier: Apache-2.0
"""Attention in float64 in which NaN and infinity of a key that a mask hides change nothing.

    want = attend_to_seen(query, key, value, mask)

Torch multiplies them by weights of 0, which makes NaN of them: of all rows, or of a block of rows, which is as large as
a kernel likes. An engine that does not read a hidden key has a number there, which is right by this.
"""

import math
from typing import Any

import torch

from blade.core.hidden_keys import hidden_keys
from blade.verification.wide_at_use import attend


def attend_to_seen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """As ``scaled_dot_product_attention``."""
    rest: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    found = attend(query, key, value, attn_mask, dropout_p, is_causal, **rest)
    if is_causal:
        attn_mask = query.new_ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
    if attn_mask is None or dropout_p or bool(found.isfinite().all()):
        return found
    hidden = hidden_keys(attn_mask)
    is_number = key.isfinite().all(-1) & value.isfinite().all(-1)  # [..., keys]
    if not bool(hidden.any()) or bool(is_number.all()):
        return found
    keys, values = (torch.where(is_number.unsqueeze(-1), x, 0.0) for x in (key, value))
    seen = attn_mask if attn_mask.dtype == torch.bool else attn_mask.masked_fill(hidden, -math.inf)
    without = attend(query, keys, values, seen, **rest)
    if enable_gqa:
        group = query.shape[-3] // key.shape[-3]
        key, value = (x.repeat_interleave(group, -3) for x in (key, value))
        is_number = is_number.repeat_interleave(group, -2)
    others = (~is_number).to(query.dtype).unsqueeze(-1)
    reads = torch.matmul((~hidden).to(query.dtype), others) > 0  # [..., queries, 1]
    scores = torch.matmul(query, key.mT) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if attn_mask.dtype == torch.bool else scores + attn_mask
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return torch.where(reads, _sums_of_seen(weights, value, ~hidden), without)


def _sums_of_seen(weights: torch.Tensor, value: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """``weights @ value``, to which what a query does not see adds nothing, also where it is NaN or infinite."""

    def meets(which: torch.Tensor, what: torch.Tensor) -> torch.Tensor:
        return torch.matmul(which.to(weights.dtype), what.to(weights.dtype)) > 0

    counts, is_infinite = seen & (weights > 0), value.isinf()
    rises, falls = (meets(counts, is_infinite & (value.sign() == s)) for s in (1, -1))
    undefined = meets(seen, value.isnan()) | meets(seen & (weights == 0), is_infinite)
    found = torch.matmul(weights, torch.where(value.isfinite(), value, 0.0))
    found = torch.where(rises, math.inf, torch.where(falls, -math.inf, found))
    found = torch.where(weights.isnan().any(-1, keepdim=True), math.nan, found)
    return torch.where(undefined | (rises & falls), math.nan, found)


def flash_attend_to_seen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``_scaled_dot_product_flash_attention_for_cpu``."""
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    found, logs = op(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)
    if not bool(found.isfinite().all()):
        found = attend_to_seen(
            query, key, value, attn_mask, dropout_p, is_causal=is_causal, scale=scale
        )
    return found, logs
