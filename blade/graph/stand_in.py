# SPDX-License-Identifier: Apache-2.0
"""Real tensors and fresh fakes in place of the fake values of an FX graph, and where those can be taken over."""

import torch
from torch.fx import Node

from blade.graph.fx_view import hint, tensors_of
from blade.graph.memory_order import in_order, order_of


def stand_in(fake: torch.Tensor) -> torch.Tensor:
    """A real tensor like ``fake`` at the sizes it was made for; its axes lie in the same order."""
    return _made(fake, fake.device)


def _made(fake: torch.Tensor, device: torch.device) -> torch.Tensor:
    dense = laid_out(fake)
    return in_order(torch.empty(dense.shape, dtype=fake.dtype, device=device), order_of(dense))


def is_as_it_was(node: Node) -> bool:
    """Whether what stands for ``node`` has its very sizes and strides, all of them numbers."""
    fake = node.meta["val"]
    return _is_known(fake) and _made(fake, torch.device("meta")).stride() == fake.stride()


def is_fresh(node: Node) -> bool:
    """Whether ``node`` gives tensors of static sizes, in memory of their own."""
    target = node.target
    return (
        isinstance(target, torch._ops.OpOverload)
        and target is not torch.ops.aten._unsafe_view.default
        and not target._schema.is_mutable
        and all(r.alias_info is None for r in target._schema.returns)
        and len(tensors_of(node)) > 0
        and all(map(_is_known, tensors_of(node)))
    )


def _is_known(fake: torch.Tensor) -> bool:
    sizes = (*fake.shape, *fake.stride())
    return fake.layout is torch.strided and all(isinstance(s, int) for s in sizes)


def laid_out(fake: torch.Tensor) -> torch.Tensor:
    """Sizes and strides of ``fake`` at the sizes it was made for."""
    sizes, strides = tuple(map(hint, fake.shape)), tuple(map(hint, fake.stride()))
    return torch.empty_strided(sizes, strides, device="meta")
