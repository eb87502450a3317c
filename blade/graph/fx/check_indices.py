# SPDX-License-Identifier: Apache-2.0
"""Makes an engine report indices out of range, for which torch raises on CPU, so that the fallback can raise.

    make_negative_invalid(graph)        # for a library that raises, but counts negative ones from the end
    flag(graph)                         # for one that never raises: a last output says whether all are in range

Both work in place, on graphs whose other lookups have been decomposed into these.
"""

import operator
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node

from blade.core.torch_modes import oblivious_to_sizes

aten = torch.ops.aten

OutOfRangePolicy = Literal["raised", "flagged", "trusted"]
"""An index out of range: the library raises, the graph flags it, or it is not checked (as in torch on CUDA)."""

_INDEX: dict[Any, int] = {
    aten.embedding.default: 1,
    aten.gather.default: 2,
    aten.index_select.default: 2,
}
"""Ops whose indices must not be negative -> position of that argument."""


def make_negative_invalid(graph: Graph) -> None:
    """Make negative indices invalid, which ONNX counts from the end: clear their sign bit.

    The index is then far too large, so the library raises and the fallback runs, which raises torch's
    error.
    """
    for node in list(graph.nodes):
        place = _INDEX.get(node.target)
        if place is None:
            continue
        index = node.args[place]
        fake = index.meta["val"]
        with graph.inserting_before(node):
            largest = torch.iinfo(fake.dtype).max
            positive = graph.call_function(aten.bitwise_and.Scalar, (index, largest))
        positive.meta = {"val": fake}
        node.update_arg(place, positive)


def flag(graph: Graph) -> None:
    """Append a 0-d boolean output, if the graph looks anything up: whether all indices are in range."""
    output = graph.output_node()
    found: Node | None = None
    for node in list(graph.nodes):
        for table, axis, index, least in _lookups(node):
            with graph.inserting_before(output):
                good = _is_in_range(table, axis, index, least)
                found = good if found is None else _call(aten.logical_and.default, found, good)
    if found is not None:
        returned = output.args[0]
        assert isinstance(returned, (list, tuple)), returned
        output.args = ((*returned, found),)


def _lookups(node: Node) -> Iterator[tuple[Node, int, Node, int]]:
    """(table, axis, indices, least) for each lookup of ``node``.

    ``least`` is the smallest valid index as a multiple of the size: -1 if negative indices count from the
    end, else 0.
    """
    if node.target is aten.index.Tensor:
        table, indices = node.args
        assert isinstance(table, Node) and isinstance(indices, (list, tuple)), node
        axis = 0
        for index in indices:
            if isinstance(index, Node) and index.meta["val"].dtype != torch.bool:
                yield table, axis, index, -1
            axis += _axes_taken(index)
    elif (place := _INDEX.get(node.target)) is not None:
        table, index = node.args[0], node.args[place]
        assert isinstance(table, Node) and isinstance(index, Node), node
        named = node.args[1]  # the axis, unless it is the indices (embedding)
        axis = named if isinstance(named, int) else 0
        yield table, axis, index, 0


def _axes_taken(index: Any) -> int:
    is_mask = isinstance(index, Node) and index.meta["val"].dtype == torch.bool
    return index.meta["val"].dim() if is_mask else 1


def _is_in_range(table: Node, axis: int, index: Node, least: int) -> Node:
    size: Any = table.meta["val"].shape[axis]
    if isinstance(size, torch.SymInt):
        size = _call(aten.sym_size.int, table, axis % table.meta["val"].dim())
    lowest: Any = 0
    if least < 0:
        lowest = _call(operator.mul, size, least) if isinstance(size, Node) else size * least
    above, below = _call(aten.ge.Scalar, index, lowest), _call(aten.lt.Scalar, index, size)
    return _call(aten.all.default, _call(aten.logical_and.default, above, below))


def _call(target: Any, *args: Any) -> Node:
    nodes = [one for one in args if isinstance(one, Node)]
    made = nodes[0].graph.call_function(target, args)
    values = [one.meta["val"] if isinstance(one, Node) else one for one in args]
    fakes = [one for one in values if isinstance(one, FakeTensor)]
    oblivious = oblivious_to_sizes()
    with (
        oblivious,
        fakes[0].fake_mode if fakes else nullcontext(),
    ):  # adds no guards, not even for sizes of 1
        made.meta = {"val": target(*values)}
    return made
