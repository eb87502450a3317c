# SPDX-License-Identifier: Apache-2.0
"""Indices into several axes at once."""

import torch
from torch import Tensor


def _linear(sizes: list[int], indices: Tensor) -> Tensor:
    """The place in row-major order of each of ``indices``, whose last axis names the axes of ``sizes``."""
    place = torch.zeros_like(indices.select(-1, 0))
    for k in range(indices.size(-1)):
        at = indices.select(-1, k)
        place = place * sizes[k] + torch.where(at < 0, at + sizes[k], at)
    return place


def gather_nd(x: Tensor, indices: Tensor, batch: int) -> Tensor:
    shape = list(x.shape)
    depth = indices.size(-1)
    inner = shape[batch : batch + depth]
    rest = shape[batch + depth :]
    count = 1
    for size in shape[:batch]:
        count *= size
    places = _linear(inner, indices.reshape([count, -1, depth]))
    width = 1
    for size in inner:
        width *= size
    offsets = torch.arange(count, device=x.device).unsqueeze(1) * width
    flat = x.reshape([count * width] + rest)
    found = flat.index_select(0, (places + offsets).reshape(-1))
    return found.reshape(list(indices.shape[:-1]) + rest)


def scatter_nd(x: Tensor, indices: Tensor, updates: Tensor, how: str) -> Tensor:
    depth = indices.size(-1)
    inner = list(x.shape[:depth])
    rest = x.shape[depth:]
    places = _linear(inner, indices).reshape(-1)
    width = 1
    for size in rest:
        width *= size
    flat = x.reshape([-1, width])
    given = updates.reshape([-1, width])
    if how == "none":
        made = flat.index_put([places], given)
    else:
        at = places.unsqueeze(1).expand([places.size(0), width])
        made = flat.scatter_reduce(0, at, given, how)
    return made.reshape(x.shape)


def one_hot(indices: Tensor, depth: int, values: Tensor, axis: int) -> Tensor:
    """Indices out of range give a row of the off value."""
    places = torch.where(indices < 0, indices + depth, indices).unsqueeze(axis)
    shape = [1] * places.dim()
    shape[axis] = depth
    hit = torch.arange(depth, device=indices.device).reshape(shape) == places
    return torch.where(hit, values[1], values[0])


def tensor_scatter(
    past: Tensor, update: Tensor, write: Tensor | None, axis: int, wraps: bool
) -> Tensor:
    """``update`` written to ``past`` from a place of its own for each element of the batch."""
    batch = past.size(0)
    if write is None:
        start = torch.zeros([batch], dtype=torch.int64, device=past.device)
    else:
        start = write
    steps = torch.arange(update.size(axis), device=past.device)
    at = start.unsqueeze(1) + steps.unsqueeze(0)
    if wraps:
        at = torch.remainder(at, past.size(axis))
    shape = [1] * past.dim()
    shape[0] = batch
    shape[axis] = update.size(axis)
    return torch.scatter(past, axis, at.reshape(shape).expand_as(update), update)
