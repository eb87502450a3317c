# SPDX-License-Identifier: Apache-2.0
"""Fake tensors that lie in memory as what they stand for did when the model ran.

    order = order_in(view.facts[0], value)          # (0, 2, 3, 1) of a channels-last image
    node.meta["val"] = as_observed(fake, order)     # at the symbolic sizes

Shape functions do not know which kernel a convolution takes, nor what the stride of an axis of size 1 happens to be;
the layout that torch gives the user's own sample is the one an engine has to give.
"""

from collections.abc import Sequence

import torch

from blade.graph.known_results import Made
from blade.graph.memory_order import dense_order, in_order, merged, stride_order
from blade.graph.observe import Seen
from blade.graph.stand_in import laid_out


def order_in(seen: Seen, value: int) -> tuple[int, ...] | None:
    """That of ``value``'s axes longer than 1; ``None`` where it is unknown, or differs from call to call."""
    orders = {fact.order for fact in seen.get(value, ())}
    return orders.pop() if len(orders) == 1 else None


def as_observed(made: Made, order: Sequence[int] | None) -> Made:
    """What a call returned, laid out in ``order``, if that is one tensor with dense memory of its own."""
    fake = made.value
    if order is None or made.borrowed or not isinstance(fake, torch.Tensor):
        return made
    if fake.layout is not torch.strided:
        return made
    dense = laid_out(fake)
    now = dense_order(dense)
    if now is None or not set(order) <= set(now) or [a for a in now if a in order] == list(order):
        return made
    strides = dense.stride()
    axes = merged(sorted(range(dense.dim()), key=lambda a: -strides[a]), order)
    blank = torch.empty([fake.shape[a] for a in axes], dtype=fake.dtype, device=fake.device)
    return Made(blank.permute([axes.index(a) for a in range(len(axes))]))


def stand_in(seen: Sequence[torch.Tensor], order: Sequence[int] | None) -> torch.Tensor:
    """A tensor like ``seen[0]`` whose sizes are, axis by axis, the first that is neither 0 nor 1.

    Its axes lie as those of all of ``seen`` do, else in ``order``: results of most ops follow their operands.
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
