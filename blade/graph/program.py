# SPDX-License-Identifier: Apache-2.0
"""One block of a ``torch._C.Graph`` read into plain Python: lines, who makes a value, who uses it.

    program = read(module.graph)
    program.lines[3].kind, program.lines[3].inputs      # "aten::linear", (12, 40, 41)

Values are named by ``Value.unique()``. Reading once keeps every later pass free of pybind calls and
free of assumptions about the lifetime of Python wrappers around nodes. A nested block is not opened:
what it captures from outside is in ``Line.free``, so an If or a Loop is a node like any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

TENSOR = torch._C.TensorType.get()


@dataclass(frozen=True)
class Line:
    """One node: ``inputs``/``outputs``/``free`` are value uniques, ``free`` those of nested blocks."""

    index: int
    node: torch._C.Node
    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    free: tuple[int, ...] = ()

    @property
    def reads(self) -> tuple[int, ...]:
        """Everything this line needs from its own block."""
        return self.inputs + self.free


@dataclass(frozen=True)
class Program:
    """The top-level block of ``graph``, in program order."""

    graph: torch._C.Graph
    lines: tuple[Line, ...]
    values: dict[int, torch._C.Value]
    producer: dict[int, int]
    inputs: tuple[int, ...]
    returns: tuple[int, ...]

    @cached_property
    def users(self) -> dict[int, list[int]]:
        """Value -> indices of the lines that read it (the return is not a line)."""
        users: dict[int, list[int]] = {}
        for line in self.lines:
            for value in dict.fromkeys(line.reads):
                users.setdefault(value, []).append(line.index)
        return users

    def maker(self, value: int) -> Line | None:
        """The line that makes ``value``; ``None`` for a graph input."""
        index = self.producer.get(value)
        return None if index is None else self.lines[index]

    def is_tensor(self, value: int) -> bool:
        return is_tensor_type(self.values[value].type())

    def constant(self, value: int) -> bool:
        line = self.maker(value)
        return line is not None and line.kind == "prim::Constant"

    def held(self, value: int) -> Any:
        """What a ``prim::Constant`` holds. A plain number that was traced into a tensor is a number."""
        return self.values[value].toIValue()

    def tensor_constant(self, value: int) -> torch.Tensor | None:
        """The tensor a ``prim::Constant`` holds, else ``None``."""
        if not self.constant(value) or not self.is_tensor(value):
            return None
        held = self.held(value)
        return held if isinstance(held, torch.Tensor) else None


def read(graph: torch._C.Graph) -> Program:
    """Read the top-level block of ``graph``."""
    values: dict[int, torch._C.Value] = {v.unique(): v for v in graph.inputs()}
    producer: dict[int, int] = {}
    lines: list[Line] = []
    for index, node in enumerate(graph.nodes()):
        outputs = tuple(node.outputs())
        for value in outputs:
            values[value.unique()] = value
            producer[value.unique()] = index
        inputs = tuple(v.unique() for v in node.inputs())
        made = tuple(v.unique() for v in outputs)
        lines.append(Line(index, node, node.kind(), inputs, made, _free(node)))
    return Program(
        graph=graph,
        lines=tuple(lines),
        values=values,
        producer=producer,
        inputs=tuple(v.unique() for v in graph.inputs()),
        returns=tuple(v.unique() for v in graph.outputs()),
    )


def nested(node: torch._C.Node) -> Iterator[torch._C.Node]:
    """Every node inside ``node``'s blocks, outer before inner."""
    for block in node.blocks():
        for inner in block.nodes():
            yield inner
            yield from nested(inner)


def _free(node: torch._C.Node) -> tuple[int, ...]:
    own: set[int] = set()
    used: dict[int, None] = {}
    _scan_blocks(node, own, used)
    return tuple(v for v in used if v not in own)


def _scan_blocks(node: torch._C.Node, own: set[int], used: dict[int, None]) -> None:
    for block in node.blocks():
        own.update(v.unique() for v in block.inputs())
        for inner in block.nodes():
            used.update((v.unique(), None) for v in inner.inputs())
            own.update(v.unique() for v in inner.outputs())
            _scan_blocks(inner, own, used)
        used.update((v.unique(), None) for v in block.outputs())


def is_tensor_type(kind: torch._C.JitType) -> bool:
    """Whether a value of this static type is a tensor (or an optional one)."""
    if kind.kind() == "OptionalType":
        return is_tensor_type(kind.getElementType())
    return bool(kind.isSubtypeOf(TENSOR))
