# SPDX-License-Identifier: Apache-2.0
"""The order of a tensor's axes in memory: channels-last images, transposed matrices.

    order_of(x.to(memory_format=torch.channels_last)) -> (0, 2, 3, 1)

Results of most ops follow the order of their operands, so a tensor that replaces a sample must have the
sample's order.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch


def order_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The axes of a permuted dense tensor, outermost first; ``None`` if it is row-major or not dense."""
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return None
    order = _descending(tensor)
    return tuple(order) if tensor.permute(order).is_contiguous() else None


def stride_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """``order_of`` for tensors with gaps too, such as a slice of an image: results are laid out as without
    gaps.

    ``None`` also if elements share memory.
    """
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return None
    order, long = _descending(tensor), long_order(tensor)
    sizes, strides = tensor.shape, tensor.stride()
    is_apart = all(strides[a] >= sizes[b] * strides[b] > 0 for a, b in pairwise(long))
    return None if long == tuple(sorted(long)) or not is_apart else tuple(order)


def axes_in_memory(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """``order_of``, for tensors with gaps ``stride_order``: how most results of ``tensor`` are laid out."""
    return order_of(tensor) or stride_order(tensor)


def long_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """The axes longer than 1, outermost first; the position of other axes means nothing."""
    return tuple(axis for axis in _descending(tensor) if tensor.shape[axis] > 1)


def dense_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """``long_order`` of a dense tensor, including row-major ones; ``None`` if it is not dense."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return None
    return long_order(tensor) if tensor.permute(_descending(tensor)).is_contiguous() else None


def merged(order: Sequence[int], long: Sequence[int]) -> tuple[int, ...]:
    """``order`` with its axes that are also in ``long`` rearranged to the order of ``long``."""
    following = iter(long)
    return tuple(next(following) if axis in long else axis for axis in order)


def _descending(tensor: torch.Tensor) -> list[int]:
    strides = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda axis: -strides[axis])


def lies_as(tensor: torch.Tensor, like: torch.Tensor) -> bool:
    """Whether ``tensor``, of other sizes, has the layout of ``like``: ``view`` works on both alike.

    Both are dense. Axes of size 1 in ``like`` only have no known position, unless both are row-major.
    """
    if tensor.dim() != like.dim() or tensor.layout is not torch.strided:
        return False
    if like.is_contiguous():
        return tensor.is_contiguous()
    order = order_of(like)
    pairs = zip(tensor.shape, like.shape, strict=True)
    if order is None or any(mine > 1 >= theirs for mine, theirs in pairs):
        return False
    return tensor.permute(order).is_contiguous()


def in_order(tensor: torch.Tensor, order: Sequence[int] | None) -> torch.Tensor:
    """``tensor``, copied unless its axes already have the order ``order``."""
    if order is None or tensor.numel() == 0:
        return tensor
    return tensor.permute(*order).contiguous().permute([order.index(a) for a in range(len(order))])
