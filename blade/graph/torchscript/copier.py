# SPDX-License-Identifier: Apache-2.0
"""Copies lines of one graph into another, together with the values they need.

    copier = Copier(program, target_graph, known={x: new_x})
    copier.copy(line)                 # constants and scalar producers come along, once each
    new_y = copier.value(y)

Every edit in blade is a copy into a fresh graph in a new order: no node is ever moved. Copies go to
the graph's insertion point; ``copy_control`` moves it into the blocks of an If or a Loop and back.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from blade.core.jit_nodes import outputs_of
from blade.graph.torchscript.program import Block, Line, Program


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
        """The copy of ``value``; scalar lines that produce it are copied on demand."""
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
        """Append a copy of ``line`` with its blocks, and record its outputs."""
        for value in line.reads:
            self.value(value)
        create: Any = self.target.createClone  # type: ignore[attr-defined]  # missing in the stubs
        node: torch._C.Node = create(line.node, lambda v: self.known[v.unique()])
        self.target.insertNode(node)
        for old, new in zip(line.outputs, outputs_of(node), strict=True):
            self.known[old] = new
        return node

    def copy_control(self, line: Line, fill: Callable[[Block], None]) -> None:
        """Append an If or Loop like ``line``; ``fill`` writes the lines of each of its blocks."""
        reads = [self.value(value) for value in line.reads]  # includes the needs of its blocks
        node = self.target.create(line.kind, reads[: len(line.inputs)], len(line.outputs))
        self.target.insertNode(node)
        for index in line.blocks:
            block = self.program.blocks[index]
            with self._inside(node.addBlock(), block) as copied:
                fill(block)
                for value in block.returns:
                    copied.registerOutput(self.value(value))
        for old, new in zip(line.outputs, outputs_of(node), strict=True):
            new.setType(self.program.values[old].type())
            self.known[old] = new

    @contextmanager
    def _inside(self, copied: Any, block: Block) -> Iterator[Any]:
        """Write into ``copied``; values recorded there are forgotten at its end."""
        outside: Any = self.target.insertPoint()
        before = self.known
        self.known = dict(before)
        for value in block.inputs:
            new: Any = copied.addInputToBlock()
            new.setType(self.program.values[value].type())
            self.known[value] = new
        self.target.setInsertPoint(copied)
        yield copied
        self.known = before
        self.target.setInsertPoint(outside)

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
