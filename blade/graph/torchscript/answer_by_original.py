# SPDX-License-Identifier: Apache-2.0
"""Lets the original model answer where a check of a decision fails, instead of raising.

    if not (x.size(1) % 7 == 0):               if not (x.size(1) % 7 == 0):
        raise RuntimeError(text)       ->          [y] = blade::answer_by_original((x,), n, 1, text)
    ...                                        else:
    return y                                       ...
                                               return y

What follows a check moves into a branch of it, so that nothing of it runs where the original answers. All of it is in
a branch of ``blade::has_original_changed(n)``: then the original answers every call.
"""

from __future__ import annotations

from typing import Any

import torch

from blade.graph.torchscript.check_forms import STRUCTURE
from blade.graph.torchscript.decision_checks import check_of, checks_of
from blade.graph.torchscript.program import TENSOR
from blade.graph.torchscript.undo_writes import restoring

Value = Any  # torch._C.Value

OP = "blade::answer_by_original"
HAS_CHANGED = "blade::has_original_changed"
CHANGED = "The original model answers all calls: no path answers a sample, or its state has changed since."


def answer_by_original(graph: torch._C.Graph, number: int) -> bool:
    """Rewrite every check whose failure may end the call; ``number`` is that of the original, or 0.

    ``False``, and nothing is changed, if the results are no tensors or tuples of them.
    """
    given: Any = graph.inputs()
    _, *inputs = given
    if next(checks_of(graph), None) is None:
        return True
    if not all(_is_tensors(value.type()) for value in graph.outputs()):
        return False
    writer = _FallbackWriter(graph, inputs, number)
    writer.rewrite(graph.block())
    if number:
        writer.ask_first()
    graph.lint()
    return True


def _is_tensors(kind: Any) -> bool:
    if kind.kind() == "TupleType":
        return all(map(_is_tensors, kind.elements()))
    return bool(kind.kind() == "TensorType")


class _FallbackWriter:
    def __init__(self, graph: Any, inputs: list[Value], number: int) -> None:
        self._graph, self._inputs, self._number = graph, inputs, number

    def rewrite(self, block: Any) -> None:
        """Rewrite the checks of ``block``, whose results are those of the call."""
        nodes = list(block.nodes())
        last = nodes[-1] if nodes else None
        results = [value.unique() for value in block.outputs()]
        if (
            last is not None
            and last.kind() == "prim::If"
            and results
            and [value.unique() for value in last.outputs()] == results
        ):
            for inner in last.blocks():
                self.rewrite(inner)
        for position in reversed(range(len(nodes))):
            if check_of(nodes[position]) is not None:
                self._branch(block, nodes[position])

    def ask_first(self) -> None:
        """Let the original answer all calls once it has changed."""
        graph = self._graph
        block = graph.block()
        lines = list(block.nodes())
        held = graph.insertConstant(self._number)
        asked = graph.insertNode(graph.create(HAS_CHANGED, [held], 1))
        asked.output().setType(torch._C.BoolType.get())
        self._split(block, asked.output(), lines, CHANGED)

    def _branch(self, block: Any, node: Any) -> None:
        check = check_of(node)
        assert check is not None, node
        later = list(block.nodes())
        branch = self._split(block, check.fails, later[later.index(node) + 1 :], check.text)
        failed, _ = branch.blocks()
        first = next(iter(failed.nodes()))
        for undoing in restoring(check):
            undoing.moveBefore(first)
        branch.copyMetadata(node)
        node.destroy()

    def _split(self, block: Any, fails: Value, lines: list[Any], text: str) -> Any:
        """Move ``lines``, the last of ``block``, into a branch where the original answers if ``fails``."""
        graph, outputs = self._graph, list(block.outputs())
        branch = graph.create("prim::If", [fails], len(outputs))
        branch.insertBefore(block.returnNode())
        for new, old in zip(branch.outputs(), outputs, strict=True):
            new.setType(old.type())
        failed, passed = branch.addBlock(), branch.addBlock()
        for one in lines:
            one.moveBefore(passed.returnNode())
        for old in outputs:
            passed.registerOutput(old)
        graph.setInsertPoint(failed)
        for new in self._answer(text, [value.type() for value in outputs]):
            failed.registerOutput(new)
        graph.setInsertPoint(graph.block())
        for k, new in enumerate(branch.outputs()):
            block.returnNode().replaceInput(k, new)
        return branch

    def _answer(self, text: str, kinds: list[Any]) -> list[Value]:
        graph = self._graph
        given = graph.insertNode(graph.create("prim::TupleConstruct", self._inputs, 1)).output()
        given.setType(torch._C.TupleType([value.type() for value in self._inputs]))
        count = sum(map(_count, kinds))
        number = 0 if f"[{STRUCTURE}]" in text else self._number  # not what the caller gave
        constants = [graph.insertConstant(x) for x in (number, count, text)]
        node = graph.insertNode(graph.create(OP, [given, *constants], 1))
        node.output().setType(torch._C.ListType(TENSOR))
        unpacked = graph.insertNode(graph.create("prim::ListUnpack", [node.output()], count))
        found = list(unpacked.outputs())
        for value in found:
            value.setType(TENSOR)
        return [self._nested(kind, found) for kind in kinds]

    def _nested(self, kind: Any, found: list[Value]) -> Value:
        if kind.kind() == "TensorType":
            return found.pop(0)
        parts = [self._nested(inner, found) for inner in kind.elements()]
        graph = self._graph
        node = graph.insertNode(graph.create("prim::TupleConstruct", parts, 1))
        node.output().setType(kind)
        return node.output()


def _count(kind: Any) -> int:
    return 1 if kind.kind() == "TensorType" else sum(map(_count, kind.elements()))
