# SPDX-License-Identifier: Apache-2.0
"""Views that stay outside of clusters, because an engine returns dense tensors with memory of their own.

    mark_shared_results(results)
    is_kept_view(node), base_of(node)

They are views with gaps or overlaps, and views among several results that share memory: the caller may write to one
and read the other, as code behind a graph break does.
"""

from collections import Counter
from collections.abc import Collection

import torch
from torch.fx import Node

from blade.graph.fx.views import is_view
from blade.graph.shapes.fake_tensors import layout_at_hints, storages_of
from blade.graph.shapes.memory_format import order_of

_SHARED = "blade_shares_result"


def mark_shared_results(results: Collection[Node]) -> None:
    """Mark the views through which ``results`` of a graph, which the caller gets, share memory."""
    held = Counter(storage for node in results for storage in storages_of(node))
    for node in results:
        if any(held[storage] > 1 for storage in storages_of(node)):
            while (base := _viewed(node)) is not None:
                node.meta[_SHARED] = True
                node = base


def is_kept_view(node: Node) -> bool:
    """Whether outside nodes that read ``node`` take the view of its base themselves."""
    if _viewed(node) is None:
        return False
    if _SHARED in node.meta:
        return True
    dense = layout_at_hints(node.meta["val"])
    return not dense.is_contiguous() and order_of(dense) is None


def base_of(node: Node) -> Node:
    """What ``node`` is a kept view of: itself if it is none."""
    while is_kept_view(node):
        viewed = _viewed(node)
        assert viewed is not None
        node = viewed
    return node


def _viewed(node: Node) -> Node | None:
    """What ``node`` is a view of, if it is a view."""
    base = node.args[0] if node.args else None
    if not isinstance(base, Node) or not isinstance(node.meta.get("val"), torch.Tensor):
        return None
    return base if is_view(node.target) else None
