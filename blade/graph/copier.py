# SPDX-License-Identifier: Apache-2.0
"""Copy lines of one graph into another, fetching what they need.

    copier = Copier(program, target_graph, known={x: new_x})
    copier.copy(line)                 # constants and cheap producers come along, once each
    new_y = copier.value(y)

Every edit in blade is a copy into a fresh graph in a new order: no node is ever moved.
"""

from collections.abc import Callable
from typing import Any

import torch

from blade.graph.program import Line, Program


class Copier:
    """Values of ``program`` -> values of ``target``; ``constant`` may place tensor constants."""

    def __init__(
        self,
        program: Program,
        target: torch._C.Graph,
        cheap: frozenset[int],
        known: dict[int, torch._C.Value],
        constant: Callable[[int], torch._C.Value | None] = lambda value: None,
    ) -> None:
        self.program = program
        self.target = target
        self.known = known
        self._cheap = cheap
        self._constant = constant

    def value(self, value: int) -> torch._C.Value:
        """The copy of ``value``; cheap producers are copied on demand."""
        pending = [value]
        while pending:
            top = pending[-1]
            missing = [v for v in self._needs(top) if v not in self.known]
            if missing:
                pending.extend(missing)
                continue
            pending.pop()
            if top not in self.known:
                self._make(top)
        return self.known[value]

    def copy(self, line: Line) -> torch._C.Node:
        """Append a copy of ``line`` to the target graph and learn its outputs."""
        for value in line.reads:
            self.value(value)
        create: Any = self.target.createClone  # type: ignore[attr-defined]  # missing in the stubs
        node: torch._C.Node = create(line.node, lambda v: self.known[v.unique()])
        self.target.appendNode(node)
        for old, new in zip(line.outputs, node.outputs(), strict=True):
            self.known[old] = new
        return node

    def _needs(self, value: int) -> tuple[int, ...]:
        if value in self.known:
            return ()
        line = self.program.maker(value)
        assert line is not None and line.index in self._cheap, (
            f"%{self.program.values[value].debugName()} is not available yet",
            line,
        )
        return line.reads

    def _make(self, value: int) -> None:
        line = self.program.maker(value)
        assert line is not None
        placed = self._constant(value) if line.kind == "prim::Constant" else None
        if placed is not None:
            self.known[value] = placed
        else:
            self.copy(line)
