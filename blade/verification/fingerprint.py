# SPDX-License-Identifier: Apache-2.0
"""Tell whether a large tensor was written to, without a copy of it.

    before = [fingerprint(t) for t in tensors]
    ...
    changed = [i for i, t in enumerate(tensors) if not has(t, before[i])]

A fingerprint holds sums of the elements' bits, as integers: along the longest axis, and along the others. A write
changes one of them, unless it leaves the sum of each line and of each slice across the lines as it was.
"""

from collections.abc import Sequence
from math import isqrt

import torch

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers as wide as an element, in bytes."""

Fingerprint = Sequence[torch.Tensor]


def fingerprint(tensor: torch.Tensor) -> Fingerprint:
    """Return the sums, for a strided tensor of any dtype; where it is large, in a hundredth of its memory or so."""
    words = _words(tensor)
    if words.dim() == 0 or not words.numel():
        return (words.clone(),)
    if words.dim() == 1:  # lines of equal length, and the rest
        length = max(1, isqrt(words.numel()))
        lines = words.unfold(0, length, length)
        rest = words[lines.numel() :].clone()
        return *(lines.sum(axis, dtype=torch.int64) for axis in (0, 1)), rest
    longest = max(range(words.dim()), key=lambda axis: words.shape[axis])
    others = [axis for axis in range(words.dim()) if axis != longest]
    return words.sum(longest, dtype=torch.int64), words.sum(others, dtype=torch.int64)


def has(tensor: torch.Tensor, before: Fingerprint) -> bool:
    """Whether ``tensor`` has the fingerprint ``before``."""
    return all(map(torch.equal, fingerprint(tensor), before))


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of ``tensor``, where it lies."""
    tensor = tensor.detach()
    if tensor.is_conj():
        tensor = tensor.conj()
    if tensor.is_neg():
        tensor = torch._neg_view(tensor)
    if tensor.dtype == torch.complex128:
        tensor = torch.view_as_real(tensor)
    return tensor.view(_WORDS[tensor.element_size()])
