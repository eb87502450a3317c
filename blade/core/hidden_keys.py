# SPDX-License-Identifier: Apache-2.0
"""Which keys a mask hides from a query of ``scaled_dot_product_attention``, so that an engine need not read them.

    hidden = hidden_keys(mask)       # [..., queries, keys], of a boolean mask or of a bias

Torch and others add -inf, -65504 or the least number of a dtype to the scores of these keys. Their weights are 0 in
float32, unless all keys of a query are hidden by a number, or scores differ by 30,000.
"""

import torch

NEVER = -6e4
"""A bias of at most this hides a key,"""
SEEN = -3e4
"""if the query sees another one, whose bias is larger than this."""


def hidden_keys(mask: torch.Tensor) -> torch.Tensor:
    """Return whether each key is hidden from each query."""
    if mask.dtype == torch.bool:
        return ~mask
    most = mask.amax(-1, keepdim=True) if mask.shape[-1] else mask
    return (mask <= NEVER) & ((most > SEEN) | (mask == float("-inf")))
