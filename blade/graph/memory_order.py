# SPDX-License-Identifier: Apache-2.0
"""The order of a tensor's axes in memory: channels-last images, transposed matrices.

    order_of(x.to(memory_format=torch.channels_last)) -> (0, 2, 3, 1)

Results of most ops follow the order of their operands, so that what is made to stand for a sample has
to be laid out as the sample is.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch


def order_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The axes of a permuted dense tensor, outermost first; ``None`` if that is row-major or unknown."""
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return None
    order = _descending(tensor)
    return tuple(order) if tensor.permute(order).is_contiguous() else None


def stride_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The same of a tensor with gaps in its memory too, a slice of an image: results lie as if it had none.

    ``None`` too where elements share memory.
    """
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return None
    order, long = _descending(tensor), long_order(tensor)
    sizes, strides = tensor.shape, tensor.stride()
    is_apart = all(strides[a] >= sizes[b] * strides[b] > 0 for a, b in pairwise(long))
    return None if long == tuple(sorted(long)) or not is_apart else tuple(order)


def long_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """The axes longer than 1, outermost first: where others lie means nothing."""
    return tuple(axis for axis in _descending(tensor) if tensor.shape[axis] > 1)


def dense_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """``long_order`` of a dense tensor, row-major ones too."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return None
    return long_order(tensor) if tensor.permute(_descending(tensor)).is_contiguous() else None


def merged(order: Sequence[int], long: Sequence[int]) -> tuple[int, ...]:
    """``order`` with those of its axes that are in ``long`` in the order of ``long``."""
    following = iter(long)
    return tuple(next(following) if axis in long else axis for axis in order)


def _descending(tensor: torch.Tensor) -> list[int]:
    strides = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda axis: -strides[axis])


def lies_as(tensor: torch.Tensor, like: torch.Tensor) -> bool:
    """Whether ``tensor``, of other sizes, lies as ``like`` does: what ``view`` takes of that, it takes of this.

    Both are dense. Where axes lie that are of size 1 in ``like`` alone is not known, unless both are row-major.
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
    """``tensor``, copied where its axes do not lie in ``order`` yet."""
    if order is None or tensor.numel() == 0:
        return tensor
    return tensor.permute(*order).contiguous().permute([order.index(a) for a in range(len(order))])
