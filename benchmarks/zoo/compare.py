# SPDX-License-Identifier: Apache-2.0
"""How far answers are apart."""

import torch

from .model import Tensors


def error(got: Tensors, want: Tensors) -> float:
    """Largest difference relative to the largest value; infinite if shapes, NaNs or whole numbers differ."""
    if len(got) != len(want):
        return float("inf")
    return max((_error(g, w) for g, w in zip(got, want, strict=True)), default=0.0)


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    if got.shape != want.shape or bool((got.isnan() != want.isnan()).any()):
        return float("inf")
    if want.numel() == 0:
        return 0.0
    if not want.is_floating_point():
        return 0.0 if torch.equal(got, want) else float("inf")
    scale = want.double().abs().max().clamp_min(1e-30)
    return float((got.double() - want.double()).abs().max() / scale)
