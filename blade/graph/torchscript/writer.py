# SPDX-License-Identifier: Apache-2.0
"""Writes a TorchScript graph node by node, with Ifs and Loops.

    writer = ScriptWriter(graph)
    [y] = writer.call(torch.ops.aten.relu.default, [x])
    writer.require(writer.op("aten::eq", [size, writer.constant(4)], BOOL), "x.size(0) == 4")
    [z] = writer.branch(condition, lambda: [y], lambda: [x])

Nodes go to the graph's insertion point, which is inside of a block while that block is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from blade.core.reason import Code
from blade.errors import Refused
from blade.graph.torchscript.alias import schema_of

TENSOR = torch._C.TensorType.get()
INT = torch._C.IntType.get()
FLOAT = torch._C.FloatType.get()
BOOL = torch._C.BoolType.get()

Values = list[torch._C.Value]

_ENDLESS = 2**63 - 1
"""The largest trip count: the condition ends such a loop."""


class ScriptWriter:
    """Appends to ``graph``."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph

    def constant(self, value: Any) -> torch._C.Value:
        """A number, string, device, tensor, ``None``, or an enum of torch as its number."""
        made: torch._C.Value = self.graph.insertConstant(value)
        return made

    def op(
        self, kind: str, inputs: Sequence[torch._C.Value], kind_of_result: torch._C.JitType
    ) -> torch._C.Value:
        """The one result of an operator of TorchScript, which the types of ``inputs`` select."""
        made: list[torch._C.Value] = list(self._node(kind, inputs, [kind_of_result]).outputs())
        return made[0]

    def call(
        self, overload: torch._ops.OpOverload, inputs: Sequence[torch._C.Value]
    ) -> torch._C.Value | Values | None:
        """The result, or results, of ``overload``; ``inputs`` are all of its arguments, in order.

        Raises ``Refused`` if TorchScript selects another overload.
        """
        if overload is torch.ops.aten.view.dtype:  # TorchScript has no such op
            overload = torch.ops.blade.view_dtype.default
        schema = overload._schema
        results = [one.type for one in schema.returns]
        node = self._node(schema.name, inputs, results)
        found = schema_of(node)
        if found is None or found.overload_name != schema.overload_name:
            raise Refused(
                Code.EXPORT_FAILED,
                f"TorchScript takes a call of {overload} for {node.schema().partition('(')[0]}.",
            )
        made = list(node.outputs())
        return made[0] if len(made) == 1 else made or None

    def list_of(self, elements: Sequence[torch._C.Value], kind: torch._C.JitType) -> torch._C.Value:
        """A list with elements of type ``kind``."""
        return self.op("prim::ListConstruct", elements, torch._C.ListType(kind))

    def tuple_of(self, elements: Sequence[torch._C.Value]) -> torch._C.Value:
        """A tuple of ``elements``."""
        kinds: list[torch._C.JitType | None] = [one.type() for one in elements]
        return self.op("prim::TupleConstruct", elements, torch._C.TupleType(kinds))

    def unpack(
        self, value: torch._C.Value, kinds: Sequence[torch._C.JitType], what: str = "List"
    ) -> Values:
        """The elements of a list, or with ``what="Tuple"`` of a tuple."""
        return list(self._node(f"prim::{what}Unpack", [value], kinds).outputs())

    def branch(
        self, condition: torch._C.Value, then: Callable[[], Values], other: Callable[[], Values]
    ) -> Values:
        """The results of ``then``, which writes the block for a true ``condition``, or of ``other``."""
        node = self._node("prim::If", [condition], [])
        returned = self._block(node, [], lambda _: then())
        self._block(node, [], lambda _: other())
        return [_output(node, one.type()) for one in returned]

    def loop(
        self,
        trips: torch._C.Value | None,
        condition: torch._C.Value | None,
        carried: Sequence[torch._C.Value],
        body: Callable[[torch._C.Value, Values], tuple[torch._C.Value | None, Values]],
    ) -> Values:
        """The values that are carried, after the last trip.

        ``body`` writes one trip: it takes the index and the values, and returns whether to go on (``None``:
        yes) and the new values.
        """
        trips = self.constant(_ENDLESS) if trips is None else trips
        condition = self.constant(True) if condition is None else condition
        node = self._node("prim::Loop", [trips, condition, *carried], [])

        def write(inputs: Values) -> Values:
            goes_on, values = body(inputs[0], inputs[1:])
            return [self.constant(True) if goes_on is None else goes_on, *values]

        kinds = [one.type() for one in carried]
        self._block(node, [INT, *kinds], write)
        return [_output(node, kind) for kind in kinds]

    def require(self, condition: torch._C.Value, message: str) -> None:
        """Raise RuntimeError with ``message`` unless ``condition`` holds."""

        def fail() -> Values:
            self.fail(self.constant(message))
            return []

        self.branch(condition, list, fail)

    def fail(self, message: torch._C.Value) -> None:
        """Raise RuntimeError with the text ``message``."""
        self._node("prim::RaiseException", [message, self.constant("builtins.RuntimeError")], [])

    def _node(
        self, kind: str, inputs: Sequence[torch._C.Value], results: Sequence[torch._C.JitType]
    ) -> Any:
        node = self.graph.create(kind, list(inputs), len(results))
        self.graph.insertNode(node)
        for output, result in zip(node.outputs(), results, strict=True):
            output.setType(result)
        return node

    def _block(
        self, node: Any, kinds: Sequence[torch._C.JitType], write: Callable[[Values], Values]
    ) -> Values:
        """Add a block to ``node`` that ``write`` fills; return what the block returns."""
        outside = self.graph.insertPoint()
        block = node.addBlock()
        inputs = []
        for kind in kinds:
            inputs.append(block.addInputToBlock())
            inputs[-1].setType(kind)
        self.graph.setInsertPoint(block)
        returned = write(inputs)
        for value in returned:
            block.registerOutput(value)
        self.graph.setInsertPoint(outside)
        return returned


def _output(node: Any, kind: torch._C.JitType) -> torch._C.Value:
    made: torch._C.Value = node.addOutput()
    made.setType(kind)
    return made
