# SPDX-License-Identifier: Apache-2.0
"""Puts cluster modules in place of their nodes, in a copy of the captured module.

    optimized = splice(captured, [(extracted, cluster_module), ...])
    optimized.cluster_0.code

Each group becomes ``self.cluster_k.forward(...)``, in the blocks of Ifs and Loops too. The new graph is
written from scratch, block by block and unit by unit, in an order that keeps every data and effect edge;
the captured module stays unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from blade.clustering.cluster import schedule
from blade.clustering.problem import Problem
from blade.core import torchscript
from blade.core.captured import Captured
from blade.core.jit_nodes import blocks_of
from blade.graph.torchscript.answer_by_original import answer_by_original
from blade.graph.torchscript.boundary import identity
from blade.graph.torchscript.boundary_scalars import number_dtype
from blade.graph.torchscript.copier import Copier
from blade.graph.torchscript.count_paths import count_paths
from blade.graph.torchscript.extract import Extracted, clear, get_attribute
from blade.graph.torchscript.observe_values import number_to_tensor
from blade.graph.torchscript.program import (
    TENSOR,
    Block,
    Program,
    read,
)
from blade.graph.torchscript.to_script_module import copy_of_script
from blade.graph.torchscript.view import GraphView, view

Native = Any
"""A ``torch._C.ScriptModule``, whose stubs declare few of its methods."""


def splice(
    captured: Captured, clusters: Sequence[tuple[Extracted, torch.jit.ScriptModule]]
) -> torch.jit.ScriptModule:
    """``captured.module`` with each group replaced by a call of its module, named after its cluster.

    Methods and attributes that capture preserved are kept. A weight that a cluster holds is not
    duplicated as a constant of the surrounding graph.
    """
    seen = clusters[0][0].view if clusters else view(captured)
    module = _clone(captured.module)
    for extracted, script in clusters:
        name = extracted.name
        assert not module.hasattr(name), name
        module._register_attribute(name, script._c._type(), script._c)
    shared = _SharedWeights(module, [extracted for extracted, _ in clusters])
    graph = module._get_method("forward").graph
    clear(graph)
    graph.setInsertPoint(graph.block())
    copier = _start(seen.program, seen, graph, shared)
    _SpliceWriter(seen, copier, clusters, captured.module._c, module).write(seen.program.blocks[0])
    for value in seen.program.returns:
        graph.registerOutput(copier.value(value))
    torchscript.remove_dead_code(graph)
    answer_by_original(graph, captured.original_number)
    count_paths(graph, captured.paths_number, captured.ends)
    graph.lint()
    for method in module._method_names():
        if method != "forward":
            shared.replace_constants(module._get_method(method).graph)
    optimized = torchscript.wrapped(module)
    return optimized


class _SpliceWriter:
    """Writes blocks, with calls of clusters in place of their nodes."""

    def __init__(
        self,
        seen: GraphView,
        copier: Copier,
        clusters: Sequence[tuple[Extracted, torch.jit.ScriptModule]],
        old: Native,
        new: Native,
    ) -> None:
        self._seen, self._copier = seen, copier
        self._old, self._new = old, new
        self._calls = {extracted.nodes[0]: (extracted, script) for extracted, script in clusters}
        labels = [frozenset[str]()] * len(seen.nodes)
        problem = Problem(labels, seen.edges, seen.effects)
        self._order: dict[int, list[tuple[int, ...]]] = {}
        for nodes in schedule(problem, [extracted.nodes for extracted, _ in clusters]):
            self._order.setdefault(self._block_of(nodes[0]), []).append(nodes)

    def write(self, block: Block) -> None:
        """Write the lines of ``block`` at the insertion point, in an order that keeps edges and effects."""
        program = self._seen.program
        for nodes in self._order.get(block.index, ()):
            if nodes[0] in self._calls:
                _call(self._copier, *self._calls[nodes[0]])
                continue
            for index in sorted(self._seen.units[nodes[0]].lines):
                line = program.lines[index]
                if line.blocks:
                    self._copier.copy_control(line, self.write)
                else:
                    _retype(self._old, self._new, self._copier.copy(line))

    def _block_of(self, node: int) -> int:
        return self._seen.program.lines[self._seen.units[node].lines[0]].block


def clone(module: torch.jit.ScriptModule) -> torch.jit.ScriptModule:
    """A copy with its own class and graphs, which can run without changing ``module``; tensors are shared."""
    return torchscript.wrapped(_clone(module))


def _clone(module: torch.jit.ScriptModule) -> Native:
    """A copy with its own class and graphs; tensors are shared, not copied.

    Freezing copies the module first. Everything is listed as preserved, so freezing changes nothing else;
    it still compares all constants of equal size, which ``copy_of_script`` avoids.
    """
    source = module._c
    attributes, methods = _attributes(source), source._method_names()
    if not attributes and methods == ["forward"] and (plain := copy_of_script(module)) is not None:
        return plain._c
    kept = [*methods, *attributes]
    return torchscript.frozen(source, kept, interfaces=False)


def _attributes(module: Native) -> list[str]:
    """Names of all attributes: the bindings list tensors and submodules, the dump lists the others."""
    tables: list[Any] = [torch._C.BufferDict, torch._C.ParameterDict, torch._C.ModuleDict]
    names = [name for table in tables for name, _ in table(module).items()]
    names += re.findall(r"^    (\w+) = ", module.dump_to_str(False, True, False), re.MULTILINE)
    return [name for name in dict.fromkeys(names) if module.hasattr(name)]


def _start(
    program: Program, seen: GraphView, graph: torch._C.Graph, shared: _SharedWeights
) -> Copier:
    known = dict(zip(program.inputs, graph.inputs(), strict=True))
    this = known[program.inputs[0]]

    def place(value: int) -> torch._C.Value | None:
        tensor = program.tensor_constant(value)
        name = None if tensor is None else shared.name(tensor)
        return None if name is None else get_attribute(graph, this, name, TENSOR)

    return Copier(program, graph, seen.scalar_lines, known, place)


def _call(copier: Copier, extracted: Extracted, script: torch.jit.ScriptModule) -> None:
    """Write ``script.forward(...)`` at the insertion point; numbers are passed as 0-d tensors."""
    graph = copier.target
    this = next(iter(graph.inputs()))
    inputs = [_as_tensor(copier, v) for v in extracted.inputs]
    cluster = get_attribute(graph, this, extracted.name, script._c._type())
    node = graph.create("prim::CallMethod", [cluster, *inputs], 1)
    node.s_("name", "forward")
    graph.insertNode(node)
    count = len(extracted.outputs)
    if count == 1:
        node.output().setType(TENSOR)
        copier.known[extracted.outputs[0]] = node.output()
        return
    node.output().setType(torch._C.TupleType([TENSOR] * count))
    pieces = graph.create("prim::TupleUnpack", [node.output()], count)
    graph.insertNode(pieces)
    for value, piece in zip(extracted.outputs, pieces.outputs(), strict=True):
        piece.setType(TENSOR)
        copier.known[value] = piece


def _as_tensor(copier: Copier, value: int) -> torch._C.Value:
    found = copier.value(value)
    crosses = number_dtype(copier.program, value) is not None
    return number_to_tensor(copier.target, found) if crosses else found


def _retype(old: Native, new: Native, node: torch._C.Node) -> None:
    """Give module-typed values the classes of the copy: each submodule was cloned with its class."""
    for block in blocks_of(node):
        for inner in block.nodes():
            _retype(old, new, inner)
    if node.kind() != "prim::GetAttr":
        return
    path = _path(node)
    found = _find(new, path)
    if found is not None:
        node.output().setType(found._type())


def _path(node: torch._C.Node) -> list[str]:
    names = [node.s("name")]
    owner = node.input().node()
    while owner.kind() == "prim::GetAttr":
        names.append(owner.s("name"))
        owner = owner.input().node()
    return names[::-1]


def _find(module: Native, path: Sequence[str]) -> Native | None:
    for name in path:
        child = dict(torch._C.ModuleDict(module).items()).get(name)
        if child is None:
            return None
        module = child
    return module


class _SharedWeights:
    """Weights that both clusters and outside code need: attributes instead of constants.

    Attributes that are the same tensor are saved once; a graph constant is saved separately from
    attributes.
    """

    def __init__(self, module: Native, clusters: Sequence[Extracted]) -> None:
        self._module = module
        self._held = {identity(tensor): tensor for c in clusters for tensor in c.fallback.buffers()}
        self._names: dict[object, str] = {}

    def name(self, tensor: torch.Tensor) -> str | None:
        """The attribute to read instead of a constant ``tensor``; ``None`` if no cluster has it."""
        key = identity(tensor)
        if key not in self._held:
            return None
        if key not in self._names:
            self._names[key] = f"shared_{len(self._names)}"
            self._module._register_attribute(self._names[key], TENSOR, self._held[key])
        return self._names[key]

    def replace_constants(self, graph: torch._C.Graph) -> None:
        """Read shared weights from attributes in the graph of another method."""
        program = read(graph)
        this = next(iter(graph.inputs()))
        for line in program.lines:
            tensor = program.tensor_constant(line.outputs[0]) if line.outputs else None
            name = None if tensor is None else self.name(tensor)
            if name is None:
                continue
            node = graph.create("prim::GetAttr", [this], 1)
            node.s_("name", name)
            node.insertBefore(line.node)
            node.output().setType(TENSOR)
            line.node.output().replaceAllUsesWith(node.output())
            line.node.destroy()
