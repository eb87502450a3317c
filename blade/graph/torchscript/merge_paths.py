# SPDX-License-Identifier: Apache-2.0
"""Merges the graphs of several paths through a model into one graph that branches where they part.

    tree = PathGraph(first.graph, {3: PathGraph(second.graph)})       # they part at decision 3
    module = merged(tree, "Model", ["x"])

A path's graph raises at a check that fails. Where another path begins, the check becomes a branch: the rest of
the one path, or the other. What both compute before they part is computed once, and each weight is held once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from blade.core import torchscript
from blade.core.jit_nodes import blocks_of, inputs_of, outputs_of
from blade.graph.torchscript.alias import schema_of
from blade.graph.torchscript.bind_overloads import resolve
from blade.graph.torchscript.decision_checks import check_of, checks_of
from blade.graph.torchscript.program import nested
from blade.graph.torchscript.to_script_module import Defaults, script_of
from blade.graph.torchscript.undo_writes import restoring

Value = Any  # torch._C.Value
Node = Any  # torch._C.Node


class CannotMerge(Exception):
    """The paths return different types, or part where the graph has no check."""


@dataclass
class PathGraph:
    """The graph of one path, and those that begin at its checks, by decision."""

    graph: torch._C.Graph
    others: dict[int, PathGraph] = field(default_factory=dict)

    def check(self) -> None:
        """Raise ``CannotMerge`` unless all paths can be merged."""
        indices = {c.index for c in map(check_of, self.graph.nodes()) if c is not None}
        for index, other in self.others.items():
            if index not in indices:
                raise CannotMerge(
                    "the decision at which another path begins is no check of the graph"
                )
            if _types(other.graph) != _types(self.graph):
                raise CannotMerge("the paths return different types")
            other.check()


def merged(
    tree: PathGraph, name: str, inputs: Sequence[str], defaults: Defaults
) -> torch.jit.ScriptModule:
    """A ScriptModule of all paths in ``tree``, whose graphs take ``self`` and ``inputs``, with ``defaults``.

    Raises ``CannotMerge``.
    """
    tree.check()
    target: Any = torch._C.Graph()
    given: Any = tree.graph.inputs()
    _, *parameters = given
    values = []
    for parameter in parameters:
        value = target.addInput()
        value.setType(parameter.type())
        values.append(value)
    writer = _MergeWriter(target, values)
    [result] = writer.write(tree, {})
    target.registerOutput(result)
    target.lint()
    return script_of(target, name, inputs, defaults=defaults)


def same_computation(first: torch._C.Graph, second: torch._C.Graph) -> bool:
    """Whether two graphs compute the same by the same ops, whatever their checks of decisions are."""
    return _listed(first) == _listed(second)


def _listed(graph: torch._C.Graph) -> list[Any]:
    """Every node with its attributes and the numbers of its inputs, without checks and what they need."""
    own: Any = graph.copy()
    for check in list(checks_of(own)):
        check.node.destroy()
    torchscript.remove_dead_code(own)
    numbers = {value.unique(): k for k, value in enumerate(own.inputs())}
    constants: dict[int, Any] = {}
    found: list[Any] = []

    def add(node: Node) -> None:
        if node.kind() == "prim::Constant":
            constants[node.output().unique()] = _constant(node)
            return
        inputs = [numbers.get(v.unique(), constants.get(v.unique())) for v in inputs_of(node)]
        attributes = [(name, str(node.kindOf(name))) for name in node.attributeNames()]
        found.append((node.kind(), attributes, inputs))
        for block in blocks_of(node):
            for value in block.inputs():
                numbers[value.unique()] = len(numbers)
            for inner in block.nodes():
                add(inner)
            found.append(
                [numbers.get(v.unique(), constants.get(v.unique())) for v in block.outputs()]
            )
        for value in outputs_of(node):
            numbers[value.unique()] = len(numbers)

    for node in own.nodes():
        add(node)
    found.append([numbers.get(v.unique(), constants.get(v.unique())) for v in own.outputs()])
    return found


def _constant(node: Node) -> Any:
    held = node.output().toIValue()
    if not isinstance(held, torch.Tensor):
        return str(node.output().type()), repr(held)
    if held.numel() <= 16:
        return str(held.dtype), str(held.device), repr(held.tolist())
    return str(held.dtype), str(held.device), held.data_ptr(), held.shape, held.stride()


def _types(graph: Any) -> list[str]:
    return [value.type().annotation_str for value in graph.outputs()]


class _MergeWriter:
    def __init__(self, target: Any, inputs: Sequence[Value]) -> None:
        self._target, self._inputs = target, inputs
        self._first = target.create("prim::Constant", [], 1)  # constants are put in front of it
        self._first.output().setType(torch._C.NoneType.get())
        target.insertNode(self._first)
        self._constants: dict[Any, list[tuple[torch.Tensor, Value]]] = {}

    def write(self, path: PathGraph, computed: dict[Any, Sequence[Value]]) -> Sequence[Value]:
        """Write ``path`` at the insertion point; return its results. ``computed`` are values in scope."""
        return self._from(path, list(path.graph.nodes()), self._begun(path), computed)

    def _begun(self, path: PathGraph) -> dict[int, Value]:
        given: Any = path.graph.inputs()
        _, *parameters = given
        return {old.unique(): new for old, new in zip(parameters, self._inputs, strict=True)}

    def _from(
        self,
        path: PathGraph,
        nodes: Sequence[Node],
        known: dict[int, Value],
        computed: dict[Any, Sequence[Value]],
    ) -> Sequence[Value]:
        shares = not any(_writes(node) for node in path.graph.nodes())
        for position, node in enumerate(nodes):
            check = check_of(node)
            if check is not None and check.index in path.others:
                return self._branch(path, nodes[position + 1 :], node, known, computed)
            self._copy(node, known, computed if shares else {})
        return [known[value.unique()] for value in path.graph.outputs()]

    def _branch(
        self,
        path: PathGraph,
        rest: Sequence[Node],
        node: Node,
        known: dict[int, Value],
        computed: dict[Any, Sequence[Value]],
    ) -> Sequence[Value]:
        check = check_of(node)
        assert check is not None, node
        target: Any = self._target
        outputs: list[Any] = list(path.graph.outputs())
        branch = target.create("prim::If", [known[check.fails.unique()]], len(outputs))
        target.insertNode(branch)
        branch.copyMetadata(node)
        outside = target.insertPoint()
        other = path.others[check.index]

        def begin_anew() -> Sequence[Value]:
            for undoing in restoring(check):
                self._copy(undoing, dict(known), {})
            return self.write(other, dict(computed))

        blocks: tuple[tuple[Any, Any], ...] = (
            (branch.addBlock(), begin_anew),
            (branch.addBlock(), lambda: self._from(path, rest, dict(known), dict(computed))),
        )
        for block, write in blocks:
            target.setInsertPoint(block)
            for value in write():
                block.registerOutput(value)
        target.setInsertPoint(outside)
        for new, old in zip(branch.outputs(), outputs, strict=True):
            new.setType(old.type())
        return list(branch.outputs())

    def _copy(
        self, node: Node, known: dict[int, Value], computed: dict[Any, Sequence[Value]]
    ) -> None:
        outputs = outputs_of(node)
        if node.kind() == "prim::Constant" and (held := self._weight(node)) is not None:
            known[outputs[0].unique()] = held
            return
        key = _key(node, known)
        made = computed.get(key) if key is not None else None
        if made is None:
            copied = self._target.createClone(node, lambda value: known[value.unique()])
            self._target.insertNode(copied)
            made = list(copied.outputs())
            if key is not None:
                computed[key] = made
        for old, new in zip(outputs, made, strict=True):
            known[old.unique()] = new

    def _weight(self, node: Node) -> Value | None:
        """The one constant with the tensor of ``node``, for all paths; ``None`` if it holds no tensor."""
        tensor = node.output().toIValue()
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            return None
        alike = self._constants.setdefault(
            (tensor.dtype, tensor.device, tensor.shape, tensor.stride()), []
        )
        for held, value in alike:
            if held.data_ptr() == tensor.data_ptr() or torch.equal(held, tensor):
                return value
        copied = self._target.createClone(node, lambda value: value)
        copied.insertBefore(self._first)
        alike.append((tensor, copied.output()))
        return copied.output()


def _key(node: Node, known: dict[int, Value]) -> Any:
    """What ``node`` computes from which values; ``None`` if two such nodes may differ."""
    if any(True for _ in blocks_of(node)):
        return None
    inputs = tuple(known[value.unique()].unique() for value in inputs_of(node))
    if node.kind() == "prim::Constant":
        held = node.output().toIValue()
        if not isinstance(held, (bool, int, float, str, type(None))):
            return None
        return node.kind(), str(node.output().type()), type(held), repr(held)
    if node.attributeNames():
        return None
    overload = resolve(node)
    if overload is not None:
        if torch.Tag.nondeterministic_seeded in overload.tags:
            return None
        return str(overload), inputs
    schema = schema_of(node)
    if schema is not None and not schema.returns:
        return None
    kinds = tuple(str(value.type()) for value in node.outputs())
    return node.kind(), str(schema), kinds, inputs


def _writes(node: Node) -> bool:
    for one in (node, *nested(node)):
        schema = schema_of(one)
        if schema is not None and any(
            a.alias_info is not None and a.alias_info.is_write for a in schema.arguments
        ):
            return True
    return False
