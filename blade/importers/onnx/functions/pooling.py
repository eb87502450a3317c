# SPDX-License-Identifier: Apache-2.0
"""Pooling that torch has no op for: padding that differs between the sides, dilation, places."""

import torch
from torch import Tensor


def _counts(
    sizes: list[int],
    kernel: list[int],
    strides: list[int],
    dilations: list[int],
    before: list[int],
    after: list[int],
    ceil: bool,
) -> list[int]:
    """How many windows fit. No window begins in the padding behind."""
    counts: list[int] = []
    for k in range(len(kernel)):
        reach = dilations[k] * (kernel[k] - 1) + 1
        room = sizes[k] + before[k] + after[k] - reach
        count = room // strides[k] + 1
        if ceil:
            count = -(-room // strides[k]) + 1
            if (count - 1) * strides[k] >= sizes[k] + before[k]:
                count -= 1
        counts.append(count)
    return counts


def windows(
    x: Tensor,
    kernel: list[int],
    strides: list[int],
    dilations: list[int],
    before: list[int],
    after: list[int],
    ceil: bool,
    fill: float,
) -> Tensor:
    """[N, C, windows..., elements]: the elements of each window, ``fill`` in the padding."""
    rank = len(kernel)
    counts = _counts(list(x.shape[2:]), kernel, strides, dilations, before, after, ceil)
    flat = [0] * (2 * rank)
    for k in range(rank):
        reach = (counts[k] - 1) * strides[k] + dilations[k] * (kernel[k] - 1) + 1
        flat[2 * (rank - 1 - k)] = before[k]
        flat[2 * (rank - 1 - k) + 1] = reach - x.size(k + 2) - before[k]
    x = torch.constant_pad_nd(x, flat, fill)
    for k in range(rank):
        first = torch.arange(counts[k], device=x.device) * strides[k]
        inside = torch.arange(kernel[k], device=x.device) * dilations[k]
        at = (first.unsqueeze(1) + inside.unsqueeze(0)).reshape(-1)
        x = x.index_select(k + 2, at)
    shape = [x.size(0), x.size(1)]
    for k in range(rank):
        shape = shape + [counts[k], kernel[k]]
    x = x.reshape(shape)
    order = [0, 1]
    for k in range(rank):
        order.append(2 + 2 * k)
    for k in range(rank):
        order.append(3 + 2 * k)
    return x.permute(order).reshape([x.size(0), x.size(1)] + counts + [-1])


def max_pool(
    x: Tensor,
    kernel: list[int],
    strides: list[int],
    dilations: list[int],
    before: list[int],
    after: list[int],
    ceil: bool,
    by_column: bool,
) -> tuple[Tensor, Tensor]:
    """The largest of each window, and its place in the flat input."""
    sizes = x.shape
    rank = len(kernel)
    count = 1
    for size in sizes:
        count *= size
    places = torch.arange(count, device=x.device)
    if by_column:
        shape = [sizes[0] * sizes[1]]
        order = [0]
        for k in range(rank):
            shape.append(sizes[len(sizes) - 1 - k])
            order.append(rank - k)
        places = places.reshape(shape).permute(order)
    places = places.reshape(sizes).to(torch.float64)
    given = windows(x, kernel, strides, dilations, before, after, ceil, float("-inf"))
    where = windows(places, kernel, strides, dilations, before, after, ceil, -1.0)
    best, at = torch.max(given, -1)
    return best, torch.gather(where, -1, at.unsqueeze(-1)).squeeze(-1).to(torch.int64)


def _totals(x: Tensor, kernel: list[int], strides: list[int], dilations: list[int]) -> Tensor:
    """The sum of each window of [N, C, ...]."""
    rank = len(kernel)
    none = [0] * rank
    if max(dilations) > 1 or rank > 3:
        return windows(x, kernel, strides, dilations, none, none, False, 0.0).sum(-1)
    if rank == 3:
        volume: Tensor = torch.ops.aten.avg_pool3d(x, kernel, strides, none, False, True, 1)
        return volume
    if rank == 2:
        image: Tensor = torch.ops.aten.avg_pool2d(x, kernel, strides, none, False, True, 1)
        return image
    flat: Tensor = torch.ops.aten.avg_pool2d(
        x.unsqueeze(2), [1, kernel[0]], [1, strides[0]], [0, 0], False, True, 1
    )
    return flat.squeeze(2)


def average_pool(
    x: Tensor,
    kernel: list[int],
    strides: list[int],
    dilations: list[int],
    before: list[int],
    after: list[int],
    ceil: bool,
    counts_padding: bool,
) -> Tensor:
    rank = len(kernel)
    counts = _counts(list(x.shape[2:]), kernel, strides, dilations, before, after, ceil)
    own = [0] * (2 * rank)
    extra = [0] * (2 * rank)
    for k in range(rank):
        reach = (counts[k] - 1) * strides[k] + dilations[k] * (kernel[k] - 1) + 1
        own[2 * (rank - 1 - k)] = before[k]
        own[2 * (rank - 1 - k) + 1] = after[k]
        extra[2 * (rank - 1 - k) + 1] = reach - x.size(k + 2) - before[k] - after[k]
    one = torch.ones_like(x.narrow(0, 0, 1).narrow(1, 0, 1))
    ones = torch.constant_pad_nd(one, own, 1.0 if counts_padding else 0.0)
    ones = torch.constant_pad_nd(ones, extra, 0.0)  # what ``ceil`` adds does not count
    given = torch.constant_pad_nd(torch.constant_pad_nd(x, own, 0.0), extra, 0.0)
    total = _totals(given, kernel, strides, dilations)
    return total / _totals(ones, kernel, strides, dilations)


def lp_pool(
    x: Tensor,
    kernel: list[int],
    strides: list[int],
    dilations: list[int],
    before: list[int],
    after: list[int],
    ceil: bool,
    p: int,
) -> Tensor:
    given = windows(x, kernel, strides, dilations, before, after, ceil, 0.0)
    return torch.pow(torch.sum(torch.pow(torch.abs(given), float(p)), -1), 1.0 / p)


def max_unpool(
    x: Tensor,
    places: Tensor,
    kernel: list[int],
    strides: list[int],
    pads: list[int],
    wanted: list[int],
) -> Tensor:
    """Zeros, with ``x`` at ``places`` of the flat result."""
    rank = len(kernel)
    sizes = [x.size(0), x.size(1)]
    for k in range(rank):
        size = (x.size(k + 2) - 1) * strides[k] + kernel[k] - pads[k] - pads[k + rank]
        sizes.append(size)
    count = 1
    for size in sizes:
        count *= size
    made = torch.zeros([count], dtype=x.dtype, device=x.device)
    made = made.scatter(0, places.reshape(-1), x.reshape(-1)).reshape(sizes)
    if len(wanted) > 0:
        flat = [0] * (2 * rank)
        for k in range(rank):
            flat[2 * (rank - 1 - k) + 1] = wanted[k + 2] - sizes[k + 2]
        made = torch.constant_pad_nd(made, flat, 0)
    return made
