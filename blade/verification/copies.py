# SPDX-License-Identifier: Apache-2.0
"""Copies of tensors that keep their layout, and layouts alone."""

import torch

_ALIGNED = 16  # elements; vectors of any dtype begin at multiples of this


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor with its strides, also those of a slice or expansion (``clone`` makes them dense).

    A small part of a large tensor, such as a graph saves for backward, costs no more than the part.
    """
    tensor = tensor.detach()
    if tensor.is_conj():  # a copy of a lazily conjugated or negated tensor would be dense
        return copied(tensor.conj()).conj()
    if tensor.is_neg():
        return torch._neg_view(copied(torch._neg_view(tensor)))
    shape, strides = tensor.shape, tensor.stride()
    last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if tensor.numel() else -1
    first = tensor.storage_offset() % _ALIGNED  # keep the alignment
    start = tensor.storage_offset() - first
    memory = tensor.as_strided((first + last + 1,), (1,), start).clone()
    return memory.as_strided(shape, strides, first)


def layout_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same sizes, strides and dtype, without memory."""
    shape, strides = tensor.shape, tensor.stride()
    return torch.empty_strided(shape, strides, dtype=tensor.dtype, device="meta")
