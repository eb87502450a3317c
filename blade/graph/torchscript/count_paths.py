# SPDX-License-Identifier: Apache-2.0
"""Counts at run time which of several captured paths answers.

count_paths(graph, number, [1, 0])       # torch.ops.blade.path_calls(number, 0) after some calls
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from blade.graph.torchscript.answer_by_original import OP as ORIGINAL

OP = "blade::count_path"


def count_paths(graph: torch._C.Graph, number: int, order: Sequence[int]) -> None:
    """Count under ``number`` at the end of each path; ``order`` has their indices as the graph has their ends.

    Nothing is counted if the graph has other branches at its end as well.
    """
    own: Any = graph
    ends = list(_ends(own.block()))
    if len(ends) != len(order) or len(order) < 2:
        return
    for block, index in zip(ends, order):
        own.setInsertPoint(block.returnNode())
        constants = [own.insertConstant(value) for value in (number, index)]
        own.insertNode(own.create(OP, constants, 0))
    own.setInsertPoint(own.block())


def _ends(block: Any) -> Iterator[Any]:
    """The blocks in which a path ends, without those in which the original answers."""
    nodes = list(block.nodes())
    results = [value.unique() for value in block.outputs()]
    for last in nodes[-1:]:
        alike = results and [value.unique() for value in last.outputs()] == results
        if last.kind() == "prim::If" and alike:
            for inner in last.blocks():
                yield from _ends(inner)
            return
    if all(node.kind() != ORIGINAL for node in nodes):
        yield block
