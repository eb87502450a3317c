# SPDX-License-Identifier: Apache-2.0
"""The order of a tensor's axes in memory: channels-last images, transposed matrices.

    order_of(x.to(memory_format=torch.channels_last)) -> (0, 2, 3, 1)

Results of most ops follow the order of their operands, so that what is made to stand for a sample has
to be laid out as the sample is.
"""

from collections.abc import Sequence

import torch


def order_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The axes of a permuted dense tensor, outermost first; ``None`` if that is row-major or unknown."""
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return None
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda axis: -strides[axis])
    return tuple(order) if tensor.permute(order).is_contiguous() else None


def in_order(tensor: torch.Tensor, order: Sequence[int] | None) -> torch.Tensor:
    """``tensor``, copied where its axes do not lie in ``order`` yet."""
    if order is None or tensor.numel() == 0:
        return tensor
    return tensor.permute(*order).contiguous().permute([order.index(a) for a in range(len(order))])
