# SPDX-License-Identifier: Apache-2.0
"""Inserts ops into a graph before a given node; the copy of a graph that a pass works on is changed.

insert = Inserter(graph, before=node)
negated = insert.op("aten::neg", [x])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from blade.graph.torchscript.bind_overloads import resolve
from blade.graph.torchscript.program import TENSOR

_INT = torch._C.IntType.get()


@dataclass(frozen=True)
class Inserter:
    """``before`` may be the return node of a block: then ops are appended to the block."""

    graph: torch._C.Graph
    before: torch._C.Node

    def op(self, kind: str, inputs: Sequence[torch._C.Value]) -> torch._C.Value:
        """A tensor, by an ATen op with all of its arguments."""
        made = self._insert(kind, inputs, TENSOR)
        assert resolve(made.node()) is not None, made.node()
        return made

    def tensors(self, values: Sequence[torch._C.Value]) -> torch._C.Value:
        """A list of tensors."""
        return self._insert("prim::ListConstruct", values, torch._C.ListType.ofTensors())

    def sum_of_ints(self, a: torch._C.Value, b: torch._C.Value) -> torch._C.Value:
        return self._insert("aten::add", [a, b], _INT)

    def int_of(self, number: torch._C.Value) -> torch._C.Value:
        """0 or 1 for a bool."""
        return self._insert("aten::Int", [number], _INT)

    def widened(self, value: torch._C.Value, wide: torch._C.JitType) -> torch._C.Value:
        """``value`` as one of the type ``wide``: the element of a list, whose type is written to files."""
        held = self._insert("prim::ListConstruct", [value], torch._C.ListType(wide))
        return self._insert("aten::__getitem__", [held, self.constant(0)], wide)

    def constant(self, held: int | list[int] | torch.device | None) -> torch._C.Value:
        graph: Any = self.graph  # insertConstant is missing in the stubs
        made: torch._C.Value = graph.insertConstant(held)
        made.node().moveBefore(self.before)
        return made

    def clone(self, node: torch._C.Node, inputs: Sequence[torch._C.Value]) -> torch._C.Node:
        """A copy of ``node`` that reads ``inputs``; it has no blocks."""
        graph: Any = self.graph  # createClone is missing in the stubs
        copied: Any = graph.createClone(node, lambda value: value)
        for place, value in enumerate(inputs):
            copied.replaceInput(place, value)
        copied.insertBefore(self.before)
        made: torch._C.Node = copied
        return made

    def _insert(
        self, kind: str, inputs: Sequence[torch._C.Value], type_: torch._C.JitType
    ) -> torch._C.Value:
        node = self.graph.create(kind, list(inputs), 1)
        node.insertBefore(self.before)
        node.copyMetadata(self.before)
        node.output().setType(type_)
        return node.output()
