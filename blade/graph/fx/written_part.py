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
    """How ``new``, the buffer after an iteration, follows from ``whole``, the buffer before; ``None`` if in
    another way, or if something else reads it.
    """
    own: set[Node] = set()
    scatter = _write(whole, new, own)
    if scatter is None or scatter.target is not aten.select_scatter.default:
        return None
    base, part, axis, at = scatter.args
    if at is not index or not isinstance(part, Node) or not _is_whole(base, whole, own):
        return None
    part = _source(part, own)
    readers = {user for node in (whole, *own) for user in node.users}
    if readers - own or _reads(part, whole):
        return None
    assert isinstance(axis, int), scatter
    return WrittenPart(part, axis % whole.meta["val"].dim())


def _write(whole: Node, new: Node, own: set[Node]) -> Node | None:
    """The write behind ``new``, through writes of a slice that is everything; ``own`` learns what only these
    need.
    """
    own.add(new)
    while new.target is aten.slice_scatter.default:
        into, source = new.args[:2]
        if not _is_whole(into, whole, own) or not isinstance(source, Node):
            return None
        if source.meta["val"].shape != new.meta["val"].shape or _step(new, 5) != 1:
            return None
        new = source
        own.add(new)
    return new


def _is_whole(node: Any, whole: Node, own: set[Node]) -> bool:
    """Whether ``node`` is ``whole``, or a slice of it that is everything."""
    path: list[Node] = []
    while isinstance(node, Node) and node is not whole:
        is_all = node.target is aten.slice.Tensor and _step(node, 4) == 1
        if not is_all or node.args[0].meta["val"].shape != node.meta["val"].shape:  # type: ignore[union-attr]
            return False
        path.append(node)
        node = node.args[0]
    own.update(path)
    return node is whole


def _source(part: Node, own: set[Node]) -> Node:
    """What ``part`` is a copy of, in the form of the part of the buffer that it replaces."""
    while part.target is aten.copy.default:
        form, source = part.args[:2]
        if not isinstance(form, Node) or not isinstance(source, Node):
            break
        old, value = form.meta["val"], source.meta["val"]
        if (old.shape, old.dtype) != (value.shape, value.dtype):
            break
        own.add(part)
        while isinstance(form, Node) and form.target in _VIEWS:
            own.add(form)
            form = form.args[0]
        part = source
    return part


_VIEWS = (aten.slice.Tensor, aten.select.int)


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
