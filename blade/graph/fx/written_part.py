# SPDX-License-Identifier: Apache-2.0
"""Recognizes that each iteration of a loop writes its own part of a buffer, and nothing reads the buffer before.

out = select_scatter(out, y, 1, index)         # y is a result of the iteration; the loop collects it
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

aten = torch.ops.aten


@dataclass(frozen=True)
class WrittenPart:
    """``part`` becomes the buffer's slice along ``axis`` at the iteration index."""

    part: Node
    axis: int


def written_part(whole: Node, new: Node, index: Node) -> WrittenPart | None:
    """How ``new``, the buffer after an iteration, follows from ``whole``, the buffer before; ``None`` if in another
    way, or if something else reads it.
    """
    seen: set[Node] = set()
    scatter = _inside(whole, new, seen)
    if scatter is None or scatter.target is not aten.select_scatter.default:
        return None
    base, part, axis, at = scatter.args
    if at is not index or not isinstance(part, Node) or not _is_whole(base, whole, seen):
        return None
    readers = {user for node in (whole, *seen) for user in node.users}
    if not readers <= {*seen, scatter, *_chain(new, scatter)} or _reads(part, whole):
        return None
    rank = whole.meta["val"].dim()
    assert isinstance(axis, int), scatter
    return WrittenPart(part, axis % rank)


def _inside(whole: Node, new: Node, seen: set[Node]) -> Node | None:
    """The write behind ``new``, through writes of a slice that is everything."""
    while new.target is aten.slice_scatter.default:
        into, source = new.args[:2]
        if not _is_whole(into, whole, seen) or not isinstance(source, Node):
            return None
        if source.meta["val"].shape != new.meta["val"].shape or _step(new, 5) != 1:
            return None
        new = source
    return new


def _chain(new: Node, scatter: Node) -> list[Node]:
    found = [new]
    while found[-1] is not scatter:
        source = found[-1].args[1]
        assert isinstance(source, Node), new
        found.append(source)
    return found


def _is_whole(node: Any, whole: Node, seen: set[Node]) -> bool:
    """Whether ``node`` is ``whole``, or a slice of it that is everything; ``seen`` learns these slices."""
    path: list[Node] = []
    while isinstance(node, Node) and node is not whole:
        is_all = node.target is aten.slice.Tensor and _step(node, 4) == 1
        if not is_all or node.args[0].meta["val"].shape != node.meta["val"].shape:  # type: ignore[union-attr]
            return False
        path.append(node)
        node = node.args[0]
    seen.update(path)
    return node is whole


def _step(node: Node, place: int) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get("step", 1)


def _reads(node: Node, whole: Node) -> bool:
    """Whether ``node`` depends on ``whole``."""
    pending, seen = [node], set[Node]()
    while pending:
        one = pending.pop()
        if one is whole:
            return True
        if one not in seen:
            seen.add(one)
            pending += one.all_input_nodes
    return False
