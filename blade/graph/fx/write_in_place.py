# SPDX-License-Identifier: Apache-2.0
"""Writes to parts, which functionalization made copies of whole tensors, happen in place again.

    %row = slice %cache 0 p (p + 1)                         %row = slice %cache 0 p (p + 1)
    %new = slice_scatter %cache %key 0 p (p + 1)    ->      copy_ %row %key
    use %new                                                use %cache
    copy_ %cache %new

``write_in_place(graph, owned)`` changes ``graph``. The memory is that of an op's own result, or of an input in
``owned`` that the graph gives the new contents to, and nothing reads its old contents afterwards. The user's graph
wrote in place too: a fallback that copies is many times slower than it.
"""

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.fx import Graph, Node

from blade.core.torch_modes import is_composite
from blade.graph.fx.view import nodes_in
from blade.graph.fx.views import is_view, may_lie_in_operand

aten = torch.ops.aten
_PARTS: Mapping[Any, Any] = {
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.select_scatter.default: aten.select.int,
    aten.diagonal_scatter.default: aten.diagonal.default,
}
_AT_INDICES: Mapping[Any, Any] = {
    aten.index_put.default: aten.index_put_.default,
    aten.index_copy.default: aten.index_copy_.default,
}
_TAKEN = frozenset(_PARTS.values())
_SIZES = (aten.sym_size.int, aten.sym_stride.int, aten.sym_numel.default)
_OVERLAPS = (  # elements of their results may share memory
    *(aten.expand.default, aten.as_strided.default, aten.unfold.default),
    *(aten.empty_strided.default, aten.new_empty_strided.default),
)


def write_in_place(graph: Graph, owned: Collection[Node]) -> None:
    """Change ``graph``, which is functional but for a ``copy_`` to inputs at its end."""
    for node in list(graph.nodes):
        write = _write_of(node)
        if write is not None and _is_right(write, owned):
            _apply(graph, write)
    for node in list(graph.nodes):
        if node.target is aten.copy_.default and node.args[0] is node.args[1]:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


@dataclass(frozen=True)
class _Write:
    """``chain[0]`` has the contents of ``into`` but for a part, which is ``chain[1]`` if there is one, and so on.

    ``values``: what is put there. One that writes at indices has no further link.
    """

    into: Node
    chain: tuple[Node, ...]
    values: tuple[Any, ...]

    @property
    def first(self) -> Node:
        """The link that is computed first."""
        return min(self.chain)

    def operands(self) -> list[Node]:
        """What the write needs, but for ``into``."""
        how = [[*link.args[2:], *link.kwargs.values()] for link in self.chain]
        return nodes_in([*self.values, *how])


def _write_of(whole: Node) -> _Write | None:
    if whole.target in _AT_INDICES:
        into = whole.args[0]
        return _Write(into, (whole,), whole.args[1:]) if isinstance(into, Node) else None
    if whole.target not in _PARTS:
        return None
    into, value = whole.args[:2]
    assert isinstance(into, Node), whole
    chain, path = [whole], [_part(whole)]
    while isinstance(value, Node):
        is_copy = value.target is aten.copy.default and len(value.args) == 2 and not value.kwargs
        if not (value.target in _PARTS or is_copy) or not _is_at(value.args[0], into, path):
            return _Write(into, tuple(chain), (value,))
        chain.append(value)
        if not is_copy:
            path.append(_part(value))
        value = value.args[1]
    return None


def _part(link: Node) -> tuple[Any, tuple[Any, ...]]:
    """The op that takes the part which ``link`` writes, and its arguments behind the tensor."""
    target = _PARTS[link.target]
    return target, _completed(target, link.args[2:], link.kwargs)


def _is_at(view: Any, into: Node, path: Sequence[tuple[Any, tuple[Any, ...]]]) -> bool:
    """Whether ``view`` is the part of ``into`` that ``path`` leads to."""
    for target, wanted in reversed(path):
        if not isinstance(view, Node) or view.target is not target:
            return False
        if _completed(target, view.args[1:], view.kwargs) != wanted:
            return False
        view = view.args[0]
    return view is into


def _completed(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The arguments of ``target`` behind the tensor, with defaults for those that are not given."""
    arguments = target._schema.arguments[1:]
    given = dict(zip((a.name for a in arguments), args, strict=False)) | dict(kwargs)
    return tuple(given.get(a.name, a.default_value) for a in arguments)


def _is_right(write: _Write, owned: Collection[Node]) -> bool:
    """Whether the memory may be written, where ``write`` comes first, for all that its readers see."""
    root, first = _root(write.into), write.first
    if root is None:
        return False
    is_owned = root in owned and _is_updated(root)
    if not (is_owned or _is_fresh(root)):
        return False
    memory, operands = set(_aliases(root)), write.operands()
    others = (one for one in operands if one not in write.values)  # values are copied first
    if not memory.isdisjoint(others) or any(first < one for one in operands):
        return False
    stale = set(_aliases(root, without=write.chain))
    readers = {user for one in stale for user in one.users if first < user}
    if any(not _is_unread(user, root, stale) for user in readers.difference(write.chain)):
        return False
    returned = sum(_is_returned(one) for one in {*memory, *_aliases(write.chain[0])})
    return returned <= (0 if is_owned else 1)


def _is_updated(root: Node) -> bool:
    return any(u.target is aten.copy_.default and u.args[0] is root for u in root.users)


def _is_returned(node: Node) -> bool:
    return any(user.op == "output" for user in node.users)


def _is_unread(user: Node, root: Node, stale: Collection[Node]) -> bool:
    """Whether ``user`` reads nothing of the contents of ``root`` and its views ``stale``; what reads a view does."""
    is_update = user.target is aten.copy_.default and user.args[0] is root
    takes = is_view(user.target) and not _may_be_any(user.target)  # reshape may be a copy
    return user.target in _SIZES or takes or (is_update and user.args[1] not in stale)


def _aliases(root: Node, without: Collection[Node] = ()) -> Iterator[Node]:
    """``root`` and all that may lie in its memory, but for ``without`` and what lies in theirs."""
    seen, pending = set(without), [root]
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        pending += [user for user in node.users if node in _sources(user)]


def _root(node: Node) -> Node | None:
    """What owns the memory of ``node``, if that is one, and each element of ``node`` has a place of its own."""
    while sources := _sources(node):
        if len(sources) > 1 or node.target in _OVERLAPS:
            return None
        [node] = sources
    return None if node.target in _OVERLAPS else node


def _sources(node: Node) -> list[Node]:
    """The operands that the result of ``node`` may share memory with."""
    if node.op != "call_function" or node.target in _SIZES:
        return []
    if node.target is operator.getitem or may_lie_in_operand(node.target):
        return nodes_in(node.args[:1])
    return list(node.all_input_nodes) if _may_be_any(node.target) else []


@cache
def _may_be_any(target: Any) -> bool:
    return not isinstance(target, torch._ops.OpOverload) or is_composite(target.name())


def _is_fresh(root: Node) -> bool:
    """Whether ``root`` is an op's own result, which nobody else has."""
    target = root.target
    if root.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    returns = target._schema.returns
    return len(returns) == 1 and str(returns[0].type) == "Tensor"


def _apply(graph: Graph, write: _Write) -> None:
    whole, parts = write.chain[0], [write.into]
    root = _root(write.into)
    assert root is not None, write
    memory = set(_aliases(root))
    with graph.inserting_before(write.first):
        values = [
            graph.call_function(aten.clone.default, (one,))
            if isinstance(one, Node) and one in memory
            else one
            for one in write.values
        ]
        if whole.target in _AT_INDICES:
            graph.call_function(_AT_INDICES[whole.target], (write.into, *values), whole.kwargs)
        else:
            for link in write.chain:
                if link.target in _PARTS:
                    target, how = _part(link)
                    parts.append(graph.call_function(target, (parts[-1], *how)))
                else:
                    parts.append(parts[-1])
            graph.call_function(aten.copy_.default, (parts[-1], *values))
    for link, part in zip(write.chain, parts, strict=False):
        link.replace_all_uses_with(part)
    for link in write.chain:
        view: Any = link.args[0]
        graph.erase_node(link)
        while view.target in _TAKEN and not view.users:
            unused, view = view, view.args[0]
            graph.erase_node(unused)
