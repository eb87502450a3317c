# SPDX-License-Identifier: Apache-2.0
"""Reads a ``torch._C.Graph`` into plain Python: lines, blocks, producers and users of values.

    program = read(module.graph)
    program.lines[3].kind, program.lines[3].inputs      # "aten::linear", (12, 40, 41)

Values are identified by ``Value.unique()``. Reading once keeps later passes free of pybind calls and
independent of the lifetime of Python wrappers around nodes. Lines are numbered through the whole graph: an
If or a Loop comes before the lines of its blocks, and values that these capture from outside are in its
``Line.free``, so that within its own block it is a line like any other. Blocks of other nodes (a fork, a
closure) are not opened.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from blade.core.jit_nodes import blocks_of, inputs_of, nodes_of, outputs_of

TENSOR = torch._C.TensorType.get()

CONTROL = ("prim::If", "prim::Loop")
"""Kinds whose blocks are read as well."""


@dataclass(frozen=True)
class Line:
    """One node: ``inputs``/``outputs`` are value uniques, ``free`` those that nested blocks capture.

    ``block`` is the block that contains it, ``blocks`` are those inside it.
    """

    index: int
    node: torch._C.Node
    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    free: tuple[int, ...] = ()
    block: int = 0
    blocks: tuple[int, ...] = ()

    @property
    def reads(self) -> tuple[int, ...]:
        """All values that this line needs from its own block."""
        return self.inputs + self.free


@dataclass(frozen=True)
class Block:
    """Straight-line code: ``lines`` are its own; ``owner`` is the line that contains it, if any."""

    index: int
    owner: int | None
    lines: tuple[int, ...]
    inputs: tuple[int, ...]
    returns: tuple[int, ...]


@dataclass(frozen=True)
class Program:
    """All of ``graph``, in program order; ``blocks[0]`` is the top-level block."""

    graph: torch._C.Graph
    lines: tuple[Line, ...]
    blocks: tuple[Block, ...]
    values: dict[int, torch._C.Value]
    producer: dict[int, int]

    @property
    def inputs(self) -> tuple[int, ...]:
        return self.blocks[0].inputs

    @property
    def returns(self) -> tuple[int, ...]:
        return self.blocks[0].returns

    @cached_property
    def returned(self) -> frozenset[int]:
        """Values that any block returns."""
        return frozenset(v for block in self.blocks for v in block.returns)

    @cached_property
    def users(self) -> dict[int, list[int]]:
        """Value -> indices of the lines that read it, enclosing Ifs and Loops included.

        A block's return is not a line.
        """
        users: dict[int, list[int]] = {}
        for line in self.lines:
            for value in dict.fromkeys(line.reads):
                users.setdefault(value, []).append(line.index)
        return users

    def users_of(self, value: int) -> list[Line]:
        """The lines that read ``value``, as ``users`` has them."""
        return [self.lines[i] for i in self.users.get(value, ())]

    def maker(self, value: int) -> Line | None:
        """The line that makes ``value``; ``None`` for inputs of the graph or of a block."""
        index = self.producer.get(value)
        return None if index is None else self.lines[index]

    def is_tensor(self, value: int) -> bool:
        return is_tensor_type(self.values[value].type())

    def constant(self, value: int) -> bool:
        line = self.maker(value)
        return line is not None and line.kind == "prim::Constant"

    def held(self, value: int) -> Any:
        """The value of a ``prim::Constant``. A plain number traced into a tensor is a number."""
        return self.values[value].toIValue()

    def tensor_constant(self, value: int) -> torch.Tensor | None:
        """The tensor of a ``prim::Constant``, else ``None``."""
        if not self.constant(value) or not self.is_tensor(value):
            return None
        held = self.held(value)
        return held if isinstance(held, torch.Tensor) else None

    def tensor_dtype(self, value: int) -> torch.dtype:
        """Dtype of the tensor of a ``prim::Constant``, or of the number that was traced into one."""
        held = self.values[value].node().t("value")
        assert isinstance(held, torch.Tensor), value
        return held.dtype


def read(graph: torch._C.Graph) -> Program:
    """Read ``graph`` with the blocks of its Ifs and Loops."""
    reader = _GraphReader()
    reader.block(graph, None)
    lines = [line for line in reader.lines if line is not None]
    blocks = [block for block in reader.blocks if block is not None]
    return Program(graph, tuple(lines), tuple(blocks), reader.values, reader.producer)


class _GraphReader:
    """The lines and blocks read so far; ``None`` reserves the place of one that is being read."""

    def __init__(self) -> None:
        self.lines: list[Line | None] = []
        self.blocks: list[Block | None] = []
        self.values: dict[int, torch._C.Value] = {}
        self.producer: dict[int, int] = {}

    def block(self, block: torch._C.Graph | torch._C.Block, owner: int | None) -> int:
        index = len(self.blocks)
        self.blocks.append(None)
        inputs = self._know(block.inputs())
        lines = tuple(self._line(node, index) for node in block.nodes())
        returns = tuple(v.unique() for v in block.outputs())
        self.blocks[index] = Block(index, owner, lines, inputs, returns)
        return index

    def _line(self, node: torch._C.Node, block: int) -> int:
        index = len(self.lines)
        self.lines.append(None)
        inputs = tuple(v.unique() for v in inputs_of(node))
        kind = node.kind()
        blocks = [self.block(b, index) for b in node.blocks()] if kind in CONTROL else []
        made = self._know(outputs_of(node))
        self.producer.update((v, index) for v in made)
        self.lines[index] = Line(index, node, kind, inputs, made, _free(node), block, tuple(blocks))
        return index

    def _know(self, values: Iterable[torch._C.Value]) -> tuple[int, ...]:
        known = {v.unique(): v for v in values}
        self.values.update(known)
        return tuple(known)


def nested(node: torch._C.Node) -> Iterator[torch._C.Node]:
    """Every node in ``node``'s blocks, outer before inner."""
    for block in blocks_of(node):
        yield from nodes_of(block)


def _free(node: torch._C.Node) -> tuple[int, ...]:
    own: set[int] = set()
    used: dict[int, None] = {}
    _scan_blocks(node, own, used)
    return tuple(v for v in used if v not in own)


def _scan_blocks(node: torch._C.Node, own: set[int], used: dict[int, None]) -> None:
    for block in blocks_of(node):
        own.update(v.unique() for v in block.inputs())
        for inner in block.nodes():
            used.update((v.unique(), None) for v in inputs_of(inner))
            own.update(v.unique() for v in outputs_of(inner))
            _scan_blocks(inner, own, used)
        used.update((v.unique(), None) for v in block.outputs())


def is_tensor_type(kind: torch._C.JitType) -> bool:
    """Whether this static type is a tensor or an optional tensor."""
    if kind.kind() == "OptionalType":
        return is_tensor_type(kind.getElementType())
    return bool(kind.isSubtypeOf(TENSOR))
