# SPDX-License-Identifier: Apache-2.0
"""Attention in float64 in which NaN and infinity of a key that a mask hides change nothing.

    want = attend_to_seen(query, key, value, mask)

Torch multiplies them by weights of 0, which makes NaN of them. An engine that does not read a hidden key has a number
there, which is right by this.
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
    if attn_mask is None or dropout_p or is_causal or bool(found.isfinite().all()):
        return found
    hidden = hidden_keys(attn_mask)
    is_number = key.isfinite().all(-1) & value.isfinite().all(-1)  # [..., keys]
    if not bool(hidden.any()) or bool(is_number.all()):
        return found
    keys, values = (torch.where(is_number.unsqueeze(-1), x, 0.0) for x in (key, value))
    seen = attn_mask if attn_mask.dtype == torch.bool else attn_mask.masked_fill(hidden, -math.inf)
    without = attend(query, keys, values, seen, **rest)
    others = (~is_number).to(query.dtype).unsqueeze(-1)
    if enable_gqa:
        others = others.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    reads = torch.matmul((~hidden).to(query.dtype), others) > 0  # [..., queries, 1]
    return torch.where(reads, found, without)
