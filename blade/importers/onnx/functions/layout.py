# SPDX-License-Identifier: Apache-2.0
"""Layouts whose sizes or axes are known at run time only."""

import torch
from torch import Tensor


def reshape(x: Tensor, shape: list[int], allow_zero: bool) -> Tensor:
    sizes: list[int] = []
    for k, size in enumerate(shape):
        sizes.append(x.size(k) if size == 0 and not allow_zero else size)
    return x.reshape(sizes)


def unsqueeze(x: Tensor, axes: list[int]) -> Tensor:
    rank = x.dim() + len(axes)
    places: list[int] = []
    for axis in axes:
        places.append(axis + rank if axis < 0 else axis)
    places.sort()
    for axis in places:
        x = x.unsqueeze(axis)
    return x


def squeeze(x: Tensor, axes: list[int]) -> Tensor:
    places: list[int] = []
    for axis in axes:
        places.append(axis + x.dim() if axis < 0 else axis)
    places.sort(reverse=True)
    for axis in places:
        x = x.squeeze(axis)
    return x


def expand(x: Tensor, shape: list[int]) -> Tensor:
    rank = max(x.dim(), len(shape))
    sizes: list[int] = []
    for k in range(rank):
        at = k - (rank - len(shape))
        size = shape[at] if at >= 0 else 1
        have = k - (rank - x.dim())
        if size == 1 and have >= 0:
            size = x.size(have)
        sizes.append(size)
    return x.expand(sizes)


def slice(x: Tensor, axis: int, start: int, end: int, step: int) -> Tensor:
    """As Python slices, with any step but 0."""
    size = x.size(axis)
    if step > 0:
        cut: Tensor = torch.ops.aten.slice(x, axis, start, end, step)
        return cut
    first = start + size if start < 0 else start
    first = min(max(first, -1), size - 1)
    last = end + size if end < 0 else end
    last = min(max(last, -1), size - 1)
    at = torch.arange(first, last, step, device=x.device) if first > last else torch.arange(0)
    return x.index_select(axis, at.to(x.device))


def slice_axes(
    x: Tensor, starts: list[int], ends: list[int], axes: list[int], steps: list[int]
) -> Tensor:
    """Cuts several axes: the first ones, in steps of 1, if ``axes`` and ``steps`` are empty."""
    for k in range(len(starts)):
        axis = axes[k] if len(axes) > 0 else k
        step = steps[k] if len(steps) > 0 else 1
        x = slice(x, axis, starts[k], ends[k], step)
    return x


def arange(start: int, limit: int, step: int) -> Tensor:
    count = max((limit - start + step - (1 if step > 0 else -1)) // step, 0)
    return torch.arange(count) * step + start


def arange_float(start: float, limit: float, step: float) -> Tensor:
    count = max(int(torch.ceil(torch.tensor((limit - start) / step)).item()), 0)
    return torch.arange(count, dtype=torch.float64) * step + start


def without_saturation(x: Tensor, limit: float) -> Tensor:
    """NaN where a cast to 8 bits would give the largest number instead."""
    return torch.where(torch.abs(x) > limit, torch.full_like(x, float("nan")), x)


def eye(rows: int, columns: int, k: int, like: Tensor) -> Tensor:
    row = torch.arange(rows, device=like.device).unsqueeze(1)
    column = torch.arange(columns, device=like.device).unsqueeze(0)
    return (column - row) == k


def pad(x: Tensor, axis: int, before: int, after: int, mode: str) -> Tensor:
    """One axis, padded with its own elements; negative amounts remove elements."""
    size = x.size(axis)
    at = torch.arange(-before, size + after, device=x.device)
    if mode == "edge":
        at = torch.clamp(at, min=0, max=size - 1)
    elif mode == "wrap":
        at = torch.remainder(at, size)
    else:
        period = max(2 * (size - 1), 1)
        at = torch.remainder(at, period)
        at = torch.where(at >= size, period - at, at)
    return x.index_select(axis, at)


def pad_axes(x: Tensor, pads: list[int], axes: list[int], mode: str, fill: float) -> Tensor:
    """``axes``: all of them if it is empty."""
    count = len(pads) // 2
    flat = [0] * (2 * x.dim())
    for k in range(count):
        axis = axes[k] if len(axes) > 0 else k
        axis = axis + x.dim() if axis < 0 else axis
        if mode == "constant":
            flat[2 * (x.dim() - 1 - axis)] = pads[k]
            flat[2 * (x.dim() - 1 - axis) + 1] = pads[k + count]
        else:
            x = pad(x, axis, pads[k], pads[k + count], mode)
    if mode == "constant":
        return torch.constant_pad_nd(x, flat, fill)
    return x


def center(x: Tensor, axis: int, wanted: int) -> Tensor:
    """The middle of an axis, or the axis in the middle of zeros."""
    size = x.size(axis)
    if wanted <= size:
        return x.narrow(axis, (size - wanted) // 2, wanted)
    before = (wanted - size) // 2
    flat = [0] * (2 * x.dim())
    place = axis + x.dim() if axis < 0 else axis
    flat[2 * (x.dim() - 1 - place)] = before
    flat[2 * (x.dim() - 1 - place) + 1] = wanted - size - before
    return torch.constant_pad_nd(x, flat, 0)


def reverse_sequence(x: Tensor, lengths: Tensor, batch: int, time: int) -> Tensor:
    """The first ``lengths[b]`` elements of each sequence, backwards."""
    steps = torch.arange(x.size(time), device=x.device)
    ends = lengths.to(torch.int64).unsqueeze(1)
    at = torch.where(steps.unsqueeze(0) < ends, ends - 1 - steps.unsqueeze(0), steps.unsqueeze(0))
    if time < batch:
        at = at.t()
    shape = [1] * x.dim()
    shape[batch] = x.size(batch)
    shape[time] = x.size(time)
    return torch.gather(x, time, at.reshape(shape).expand_as(x))


def pieces(x: Tensor, axis: int) -> list[Tensor]:
    return list(torch.split(x, 1, axis))


def inserted(items: list[Tensor], one: Tensor, at: int) -> list[Tensor]:
    made: list[Tensor] = list(items)
    made.insert(at, one)
    return made


def erased(items: list[Tensor], at: int) -> list[Tensor]:
    made: list[Tensor] = []
    place = at + len(items) if at < 0 else at
    for k, one in enumerate(items):
        if k != place:
            made.append(one)
    return made


def product(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    """The product along several axes; along all if there are none."""
    places: list[int] = []
    for axis in axes:
        places.append(axis + x.dim() if axis < 0 else axis)
    if len(places) == 0:
        places = list(range(x.dim()))
    places.sort(reverse=True)
    for axis in places:
        x = torch.prod(x, axis, keep, dtype=x.dtype)
    return x


def exclusive_cumsum(x: Tensor, axis: int, back: bool, fill: int) -> Tensor:
    """The sum of the elements before each one, or, ``back``, behind it."""
    if back:
        x = x.flip([axis])
    total = torch.cumsum(x, axis)
    first = torch.full_like(total.narrow(axis, 0, 1), fill)
    total = torch.cat([first, total.narrow(axis, 0, x.size(axis) - 1)], axis)
    return total.flip([axis]) if back else total


def exclusive_cumprod(x: Tensor, axis: int, back: bool, fill: int) -> Tensor:
    if back:
        x = x.flip([axis])
    total = torch.cumprod(x, axis)
    first = torch.full_like(total.narrow(axis, 0, 1), fill)
    total = torch.cat([first, total.narrow(axis, 0, x.size(axis) - 1)], axis)
    return total.flip([axis]) if back else total


def local_response(
    x: Tensor, before: int, after: int, alpha: float, beta: float, bias: float
) -> Tensor:
    """LRN over windows of channels."""
    flat = [0] * (2 * (x.dim() - 1))
    flat[len(flat) - 2] = before
    flat[len(flat) - 1] = after
    padded = torch.constant_pad_nd(x * x, flat, 0)
    total = padded.unfold(1, before + after + 1, 1).sum(-1)
    return x / torch.pow(bias + alpha * total, beta)


def unique(x: Tensor, axis: int, ordered: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Unique slices, where each occurs first, which each slice is, and counts; ``ordered`` by value, else by
    their first occurrence."""
    values, inverse, counts = torch.ops.aten.unique_dim(x, axis, True, True, True)
    places = torch.arange(inverse.size(0), device=x.device)
    count = values.size(axis)
    first = torch.full([count], inverse.size(0), dtype=torch.int64, device=x.device)
    first = first.scatter_reduce(0, inverse, places, "amin")
    if ordered:
        return values, first, inverse, counts
    order = torch.argsort(first)
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(count, device=x.device))
    return values.index_select(axis, order), first[order], rank[inverse], counts[order]


def amax(x: Tensor, axes: list[int], keep: bool, least: float) -> Tensor:
    """The maximum, which is ``least`` where there is nothing."""
    one = torch.full([1], least, device=x.device).to(x.dtype)
    if x.size(axes[0]) == 0:
        shape: list[int] = list(x.shape)
        shape[axes[0]] = 1
        x = one.expand(shape)
    return torch.amax(x, axes, keep)


def amin(x: Tensor, axes: list[int], keep: bool, most: float) -> Tensor:
    """The minimum, which is ``most`` where there is nothing."""
    return -amax(-x, axes, keep, -most)
