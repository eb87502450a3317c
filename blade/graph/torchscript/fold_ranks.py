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
        else:
            inferred = _rank_of(node, ranks)
            for value in node.outputs():
                rank = _noted(value)
                if (rank := inferred if rank is None else rank) is not None:
                    ranks[value.unique()] = rank
        told = _told(node, ranks)
        if told is not None and told[0].uses():  # else it was folded before
            value, constant = told
            graph.setInsertPoint(node)
            value.replaceAllUsesWith(graph.insertConstant(constant))
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


def _told(node: Any, ranks: Mapping[int, int]) -> tuple[Any, Any] | None:
    """A result of ``node``, and the constant that it is."""
    given = list(node.inputs())
    if node.kind() == "aten::dim":
        rank = ranks.get(given[0].unique())
        return None if rank is None else (node.output(), rank)
    if node.kind() == "prim::tolist":  # no pass of torch's does this
        held = given[0].toIValue()
        is_line = isinstance(held, torch.Tensor) and held.dim() == 1
        return (node.output(), held.tolist()) if is_line else None
    if node.kind() not in ("aten::len", "prim::ListUnpack"):
        return None
    sizes = given[0].node()
    if sizes.kind() != "aten::size" or sizes.inputsSize() != 1:
        return None
    tensor = next(sizes.inputs())
    if node.kind() == "aten::len":
        rank = ranks.get(tensor.unique())
        return None if rank is None else (node.output(), rank)
    added = _added_dimension(tensor.node(), node.outputsSize())
    return None if added is None else (list(node.outputs())[added], 1)


def _added_dimension(made: Any, rank: int) -> int | None:
    """The dimension that ``made``, an ``unsqueeze`` to this ``rank``, adds."""
    if made.kind() != "aten::unsqueeze":
        return None
    dim = list(made.inputs())[1].toIValue()
    return dim if isinstance(dim, int) and -rank <= dim < rank else None
