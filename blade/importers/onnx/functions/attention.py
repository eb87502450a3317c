# SPDX-License-Identifier: Apache-2.0
"""Masks of attention, as what is added to the scores."""

import torch
from torch import Tensor


def mask_bias(mask: Tensor, like: Tensor) -> Tensor:
    """0 where ``mask`` is true, else -inf."""
    zero = torch.zeros([], dtype=like.dtype, device=like.device)
    return torch.where(mask, zero, torch.full_like(zero, float("-inf")))


def as_wide(mask: Tensor, width: int) -> Tensor:
    """A mask that is too short masks the rest."""
    rest = width - mask.size(-1)
    if rest <= 0 or mask.dim() == 0:
        return mask
    if mask.dtype == torch.bool:
        return torch.constant_pad_nd(mask, [0, rest], False)
    return torch.constant_pad_nd(mask, [0, rest], float("-inf"))


def window_bias(
    q: Tensor, width: int, past: int, lengths: Tensor | None, left: int, right: int
) -> Tensor:
    """Positions further back than ``left`` or further on than ``right`` are masked; -1: no limit.

    Queries follow ``past`` keys, or are the last of ``lengths`` keys.
    """
    at = torch.arange(q.size(2), device=q.device).unsqueeze(1)
    if lengths is not None:
        at = at + (lengths.reshape([-1, 1, 1, 1]) - q.size(2))
    else:
        at = at + past
    distance = at - torch.arange(width, device=q.device).unsqueeze(0)
    seen = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        seen = torch.logical_and(seen, distance <= left)
    if right >= 0:
        seen = torch.logical_and(seen, -distance <= right)
    return mask_bias(seen, q)


def length_bias(lengths: Tensor, width: int, like: Tensor) -> Tensor:
    """Keys behind the length of their sequence are masked."""
    seen = torch.arange(width, device=like.device) < lengths.reshape([-1, 1, 1, 1])
    return mask_bias(seen, like)


def safe_softmax(scores: Tensor, bias: Tensor | None) -> Tensor:
    """A row that is masked as a whole gives zeros."""
    weights = torch.softmax(scores, -1)
    if bias is None:
        return weights
    masked = torch.amax(bias, [-1], True) == float("-inf")
    return torch.where(masked, torch.zeros_like(weights), weights)
