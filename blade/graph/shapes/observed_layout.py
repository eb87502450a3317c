# SPDX-License-Identifier: Apache-2.0
"""Fake tensors with the memory layout observed when the model ran.

    order = order_in(view.facts[0], value)          # (0, 2, 3, 1) of a channels-last image
    node.meta["val"] = in_observed_layout(fake, order)     # at the symbolic sizes

Shape functions do not know which kernel a convolution uses, nor the stride of an axis of size 1. An engine
must return the layout that torch gives for the user's own sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from blade.graph.shapes.fake_tensors import layout_at_hints
from blade.graph.shapes.memo import MemoizedResult
from blade.graph.shapes.memory_format import (
    dense_order,
    in_order,
    merged,
    stride_order,
)


@dataclass(frozen=True)
class TensorMeta:
    """A tensor's properties in one run."""

    sizes: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    order: tuple[int, ...] | None
    """The tensor's ``dense_order``."""

    @property
    def bytes(self) -> int:
        count = 1
        for size in self.sizes:
            count *= size
        return count * self.dtype.itemsize


ObservedRun = dict[int, tuple[TensorMeta, ...]]
"""Value -> its distinct facts in one run; values that were never computed are missing."""


def order_in(seen: ObservedRun, value: int) -> tuple[int, ...] | None:
    """The order of ``value``'s axes longer than 1; ``None`` if unknown or different between executions."""
    orders = {fact.order for fact in seen.get(value, ())}
    return orders.pop() if len(orders) == 1 else None


def in_observed_layout(made: MemoizedResult, order: Sequence[int] | None) -> MemoizedResult:
    """The result of a call laid out in ``order``, if it is one dense tensor with memory of its own."""
    fake = made.value
    if order is None or made.borrowed or not isinstance(fake, torch.Tensor):
        return made
    if fake.layout is not torch.strided:
        return made
    dense = layout_at_hints(fake)
    now = dense_order(dense)
    if now is None or not set(order) <= set(now) or [a for a in now if a in order] == list(order):
        return made
    strides = dense.stride()
    axes = merged(sorted(range(dense.dim()), key=lambda a: -strides[a]), order)
    blank = torch.empty([fake.shape[a] for a in axes], dtype=fake.dtype, device=fake.device)
    return MemoizedResult(blank.permute([axes.index(a) for a in range(len(axes))]))


def example_tensor(seen: Sequence[torch.Tensor], order: Sequence[int] | None) -> torch.Tensor:
    """A tensor like ``seen[0]``; each size is the first in ``seen`` that is neither 0 nor 1.

    Its axes have the common order of ``seen``, else ``order``: results of most ops follow their operands.
    """
    first = seen[0]
    same_rank = [t for t in seen if t.dim() == first.dim()]
    sizes = [
        next((t.shape[d] for t in same_rank if t.shape[d] > 1), first.shape[d])
        for d in range(first.dim())
    ]
    orders = {stride_order(t) for t in same_rank}
    made = torch.empty(sizes, dtype=first.dtype, device=first.device)
    if len(orders) == 1:
        return in_order(made, orders.pop())
    return made if order is None else in_order(made, merged(range(made.dim()), order))
