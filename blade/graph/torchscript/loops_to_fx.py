# SPDX-License-Identifier: Apache-2.0
"""Converts a loop to one call in FX, with its block as a nested graph.

A list that each iteration appends to, and a buffer of which each iteration writes its own slice, are no state: the
call returns the results of all iterations, stacked along a first axis.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.fx import Node

from blade.graph.fx.writer import FxWriter, value_of
from blade.graph.fx.written_part import WrittenPart, written_part
from blade.graph.torchscript.describe import source
from blade.graph.torchscript.loops import Collected
from blade.graph.torchscript.program import Block, Line
from blade.graph.torchscript.view import GraphView

aten = torch.ops.aten


class Builder(Protocol):
    """A graph in the making (``to_fx``)."""

    view: GraphView
    writer: FxWriter
    nodes: dict[int, Any]

    def convert(self, lines: Sequence[int]) -> None: ...
    def emit(
        self, target: Callable[..., Any], args: Any, kwargs: dict[str, Any], line: Line
    ) -> Node: ...
    def argument(self, value: int) -> Any: ...
    def evaluate(self, value: int) -> Any: ...


def write_loop(outer: Builder, body: Builder, line: Line) -> dict[int, Node]:
    """The call of ``line``, a Loop, in ``outer``; returns the nodes of its results. ``body`` is empty."""
    return _LoopWriter(outer, body, line).write()


class _LoopWriter:
    def __init__(self, outer: Builder, body: Builder, line: Line) -> None:
        self.outer, self.body, self.line = outer, body, line
        self.program = outer.view.program
        self.block: Block = self.program.blocks[line.blocks[0]]
        self.lists: Sequence[Collected] = outer.view.collected.get(line.index, ())
        self.count = outer.evaluate(line.inputs[0])

    def write(self) -> dict[int, Node]:
        state = [self.outer.argument(v) for v in self.line.inputs[2:]]
        read = self._read()
        given = [self.outer.argument(v) for v in read]
        tensors = [n.meta["val"] for n in (*state, *given)]
        index, *inputs = self.body.writer.begin_iteration(self.count, tensors)
        self.body.nodes = dict(zip((*self.block.inputs, *read), (index, *inputs), strict=True))
        appended = [self.program.lines[one.appended] for one in self.lists]
        skipped = {append.index for append in appended}
        self.body.convert([i for i in self.block.lines if i not in skipped])
        new = [self.body.argument(v) for v in self.block.returns[1:]]
        parts = {
            k: part
            for k, node in enumerate(new)
            if (part := written_part(inputs[k], node, index)) is not None
        }
        carried = [k for k in range(len(state)) if k not in parts]
        outputs = [
            *(new[k] for k in carried),
            *(part.part for part in parts.values()),
            *(self.body.argument(append.inputs[1]) for append in appended),
        ]
        self.body.writer.drop([inputs[k] for k in parts], outputs)
        begin = [state[k] for k in carried]
        call = self.outer.writer.loop(
            self.body.writer, self.count, begin, given, outputs, self._fewest(), source(self.line)
        )
        every = (self._emit(operator.getitem, call, k) for k in range(len(outputs)))
        made = {self.line.outputs[k]: next(every) for k in carried}
        for k, part in parts.items():
            made[self.line.outputs[k]] = self._written(state[k], next(every), part)
        return made | self._joined(every)

    def _read(self) -> list[int]:
        """The tensors from outside that the iterations need; weights are constants of the body."""
        own = {one.values for one in self.lists}
        found = dict.fromkeys(s for v in self.line.free for s in self.outer.view.sources(v))
        return [v for v in found if v not in own]

    def _fewest(self) -> int:
        """1 if a loop that does not run would raise, or return memory that somebody else knows."""
        return int(bool(self.lists) or not all(map(self._is_own, self.line.inputs[2:])))

    def _is_own(self, value: int) -> bool:
        """Whether nothing but the loop reads the new tensor ``value``."""
        roots = self.outer.view.aliases.roots[value]
        alone = self.outer.view.readers.get(value) == [self.line.index]
        return roots == {value} and alone and not self.program.constant(value)

    def _written(self, whole: Node, every: Node, part: WrittenPart) -> Node:
        """``whole`` with the results of the iterations in its first slices."""
        made = self._along(every, part.axis)
        if whole.meta["val"].shape[part.axis] == value_of(self.count):
            return made
        return self._emit(aten.slice_scatter.default, whole, made, part.axis, 0, self.count)

    def _joined(self, every: Iterator[Node]) -> dict[int, Node]:
        """The results of ``aten::stack`` and ``aten::cat``."""
        made: dict[int, Node] = {}
        for one, results in zip(self.lists, every, strict=True):
            join = self.program.lines[one.joined]
            rank = results.meta["val"].dim()
            stacked = join.kind == "aten::stack"
            axis = int(self.program.held(join.inputs[1])) % (rank if stacked else rank - 1)
            node = self._along(results, axis)
            if not stacked:
                node = self._emit(aten.flatten.using_ints, node, axis, axis + 1)
            made[join.outputs[0]] = node
        return made

    def _along(self, results: Node, axis: int) -> Node:
        """The results of all iterations, stacked along ``axis``."""
        order = [k + 1 for k in range(results.meta["val"].dim() - 1)]
        order.insert(axis, 0)
        moved = self._emit(aten.permute.default, results, order)
        return self._emit(aten.clone.default, moved, memory_format=torch.contiguous_format)

    def _emit(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        return self.outer.emit(target, args, kwargs, self.line)
