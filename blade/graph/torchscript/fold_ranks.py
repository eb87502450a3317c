# SPDX-License-Identifier: Apache-2.0
"""Ranks that a scripted function asks for, inside of a trace, become constants.

    %sizes = aten::size(%y)                      %dims = prim::Constant[value=[1, 2]]()
    %rank = aten::len(%sizes)            ->
    %dims = tolist(arange(1, %rank))

A trace notes the rank of every value. It holds wherever the inputs have the ranks of the sample, but for values that
branches, loops and lists of unknown length may change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from blade.core import torchscript
from blade.graph.torchscript.program import nested

_OF_KNOWN_LENGTH = ("aten::size", "prim::ListConstruct", "prim::Constant")
_KEEP_RANK = ("aten::conv1d", "aten::conv2d", "aten::transpose", "aten::relu", "aten::contiguous")
_OPAQUE = ("prim::If", "prim::Loop", "prim::CallMethod", "prim::CallFunction", "prim::PythonOp")


def fold_ranks(graph: torch._C.Graph) -> bool:
    """Change ``graph``, a fresh trace with the tracer's shapes; return whether anything relies on ranks now.

    torch's own analysis of shapes, which would know more ranks, corrupts memory (2.13).
    """
    if not any(node.kind() == "prim::CallFunction" for node in graph.nodes()):
        return False
    torchscript.inline(graph)
    found = False
    while _fold(graph):
        found = True
        torchscript.propagate_constants(graph)
        torchscript.remove_dead_code(graph)
    return found


def _rank_of(node: Any, ranks: Mapping[int, int]) -> int | None:
    """The rank of what ``node`` computes, for some ops that scripted functions choose a convolution with."""
    given = [ranks.get(value.unique()) for value in node.inputs()]
    if node.kind() in _KEEP_RANK:
        return given[0]
    if node.kind() == "aten::unsqueeze" and given[0] is not None:
        return given[0] + 1
    return None


def _noted(value: Any) -> int | None:
    """The rank that the tracer noted."""
    found: int | None = value.type().dim() if value.type().kind() == "TensorType" else None
    return found


def _fold(graph: Any) -> bool:
    """Fold what can be told now; a list that becomes a constant lets more be told."""
    ranks = {v.unique(): r for v in graph.inputs() if (r := _noted(v)) is not None}
    uncertain: set[int] = set()
    folded = False
    for node in list(graph.nodes()):
        given = [*node.inputs(), *_read_inside(node)]
        if _may_vary(node) or any(value.unique() in uncertain for value in given):
            uncertain.update(value.unique() for value in node.outputs())
        for value in node.outputs():
            rank = _noted(value)
            rank = _rank_of(node, ranks) if rank is None else rank
            if rank is not None:
                ranks[value.unique()] = rank
        known = _list_of(node)
        asked = _asks_rank_of(node)
        if asked is not None and asked.unique() not in uncertain:
            known = ranks.get(asked.unique())
        if known is not None:
            graph.setInsertPoint(node)
            node.output().replaceAllUsesWith(graph.insertConstant(known))
            folded = True
        elif (one := _added_size(node)) is not None:
            graph.setInsertPoint(node)
            one.replaceAllUsesWith(graph.insertConstant(1))
            folded = True
    graph.setInsertPoint(graph.block())
    return folded


def _may_vary(node: Any) -> bool:
    """Whether the ranks, or the length, of a result of ``node`` may follow from other things than ranks."""
    if node.kind() in _OPAQUE:
        return True
    is_list = any(value.type().kind() == "ListType" for value in node.outputs())
    return is_list and node.kind() not in _OF_KNOWN_LENGTH


def _read_inside(node: Any) -> Iterator[Any]:
    for inner in nested(node):
        yield from inner.inputs()


def _list_of(node: Any) -> Any:
    """The elements of a constant that ``node`` makes a list of, which no pass of torch's does; else ``None``."""
    if node.kind() != "prim::tolist" or not node.output().uses():
        return None
    held = next(node.inputs()).toIValue()
    return held.tolist() if isinstance(held, torch.Tensor) and held.dim() == 1 else None


def _added_size(node: Any) -> Any:
    """Of sizes that are unpacked, that of the dimension which ``unsqueeze`` has just added, if it is used."""
    sizes = next(node.inputs()).node() if node.kind() == "prim::ListUnpack" else None
    if sizes is None or sizes.kind() != "aten::size" or sizes.inputsSize() != 1:
        return None
    made = next(sizes.inputs()).node()
    if made.kind() != "aten::unsqueeze":
        return None
    dim, unpacked = list(made.inputs())[1].toIValue(), list(node.outputs())
    found = (
        unpacked[dim] if isinstance(dim, int) and -len(unpacked) <= dim < len(unpacked) else None
    )
    return found if found is not None and found.uses() else None


def _asks_rank_of(node: Any) -> Any | None:
    """The tensor whose rank ``node`` computes, of a use that is not folded yet."""
    if node.kind() not in ("aten::dim", "aten::len") or not node.output().uses():
        return None
    value = next(node.inputs())
    if node.kind() == "aten::len":
        sizes = value.node()
        if sizes.kind() != "aten::size" or sizes.inputsSize() != 1:
            return None
        value = next(sizes.inputs())
    return value if value.type().kind() == "TensorType" else None
