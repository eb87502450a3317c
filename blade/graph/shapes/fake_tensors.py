# SPDX-License-Identifier: Apache-2.0
"""Real tensors and fresh fakes for the fake values of an FX graph, and tests of when these are equivalent."""

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch.fx import Node

from blade.graph.shapes.memory_format import axes_in_memory, in_order


def materialize(fake: torch.Tensor) -> torch.Tensor:
    """A real tensor like ``fake`` at its hint sizes, with the same order of axes."""
    return _made(fake, fake.device)


def _made(fake: torch.Tensor, device: torch.device) -> torch.Tensor:
    dense = layout_at_hints(fake)
    return in_order(
        torch.empty(dense.shape, dtype=fake.dtype, device=device), axes_in_memory(dense)
    )


def has_static_layout(node: Node) -> bool:
    """Whether the fake value of ``node`` has its exact sizes and strides, all of them numbers."""
    fake = node.meta["val"]
    return _is_known(fake) and _made(fake, torch.device("meta")).stride() == fake.stride()


def is_fresh(node: Node) -> bool:
    """Whether ``node`` returns tensors of static sizes in memory of their own."""
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


def layout_at_hints(fake: torch.Tensor) -> torch.Tensor:
    """Sizes and strides of ``fake`` at its hint sizes."""
    sizes, strides = tuple(map(hint, fake.shape)), tuple(map(hint, fake.stride()))
    return torch.empty_strided(sizes, strides, device="meta")


def tensors_of(node: Node) -> tuple[torch.Tensor, ...]:
    """The fake tensors in the value of ``node``."""
    value = node.meta.get("val")
    several = value if isinstance(value, (list, tuple)) else (value,)
    return tuple(v for v in several if isinstance(v, torch.Tensor))


def storages_of(node: Node) -> Iterator[int]:
    """Which memory the tensors of ``node`` lie in: equal numbers are one memory."""
    for one in tensors_of(node):
        if one.layout is torch.strided:
            yield one.untyped_storage()._cdata


def sole_owners(nodes: Sequence[Node]) -> list[Node]:
    """Those of ``nodes`` whose memory none of the others shares."""
    held = Counter(one for node in nodes for one in set(storages_of(node)))
    return [node for node in nodes if all(held[one] == 1 for one in storages_of(node))]


def hint(size: int | torch.SymInt) -> int:
    """The size in the sample; 1 if it depends on a tensor's elements."""
    if not isinstance(size, torch.SymInt):
        return size
    return int(size.node.hint) if size.node.has_hint() else 1
