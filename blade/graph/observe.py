# SPDX-License-Identifier: Apache-2.0
"""Run a copy of a graph to learn about its values: first their facts, later the tensors themselves.

``observe_facts`` keeps no intermediate alive: the copy asks each tensor for its sizes, dtype and
device where it is made and returns only those. ``observe_tensors`` returns chosen tensors, each as it
was when the program reached a given line (a later in-place op must not be seen).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from blade.graph.bind import SCALAR_TYPES
from blade.graph.copier import Copier
from blade.graph.program import Program

_INT = torch._C.IntType.get()


@dataclass(frozen=True)
class Fact:
    """One tensor as it was in one run."""

    sizes: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes(self) -> int:
        count = 1
        for size in self.sizes:
            count *= size
        return count * self.dtype.itemsize


def observe_facts(
    program: Program, module: torch.jit.ScriptModule, sample: Sequence[Any]
) -> dict[int, Fact]:
    """Facts of every tensor of the top-level block when it runs on ``sample``."""
    graph, copier = _start(program)
    watched: list[int] = []
    asked: list[torch._C.Value] = []

    def ask(value: int) -> None:
        if not program.is_tensor(value) or not _surely_tensor(program.values[value].type()):
            return
        new = copier.known[value]
        watched.append(value)
        asked.append(_append(graph, "aten::size", new, torch._C.ListType.ofInts()))
        asked.append(_append(graph, "prim::dtype", new, _INT))
        asked.append(_append(graph, "prim::device", new, torch._C.DeviceObjType.get()))

    for value in program.inputs:
        ask(value)
    for line in program.lines:
        copier.copy(line)
        if line.kind != "prim::Constant":
            for value in line.outputs:
                ask(value)
    answers = _run(graph, asked, module, sample)
    triples = zip(answers[0::3], answers[1::3], answers[2::3], strict=True)
    return {
        value: Fact(tuple(sizes), SCALAR_TYPES[dtype], device)
        for value, (sizes, dtype, device) in zip(watched, triples, strict=True)
    }


def observe_tensors(
    program: Program,
    module: torch.jit.ScriptModule,
    sample: Sequence[Any],
    wanted: Mapping[int, Sequence[tuple[int, bool]]],
) -> dict[tuple[int, int], torch.Tensor]:
    """Tensors as they are just before chosen lines: ``wanted[line] = [(value, copy it), ...]``.

    Keys of the result are (line, value). ``copy it`` is for values some op writes in place.
    """
    graph, copier = _start(program)
    keys: list[tuple[int, int]] = []
    asked: list[torch._C.Value] = []
    for line in program.lines[: max(wanted, default=-1) + 1]:
        for value, clone in wanted.get(line.index, ()):
            new = copier.value(value)
            keys.append((line.index, value))
            asked.append(_clone(graph, new) if clone else new)
        copier.copy(line)
    return dict(zip(keys, _run(graph, asked, module, sample), strict=True))


def _start(program: Program) -> tuple[torch._C.Graph, Copier]:
    graph = torch._C.Graph()
    known: dict[int, torch._C.Value] = {}
    for value in program.inputs:
        new = graph.addInput()
        new.setType(program.values[value].type())
        known[value] = new
    return graph, Copier(program, graph, frozenset(), known)


def _surely_tensor(kind: torch._C.JitType) -> bool:
    return kind.kind() == "TensorType"


def _append(
    graph: torch._C.Graph, kind: str, value: torch._C.Value, result: torch._C.JitType
) -> torch._C.Value:
    node = graph.create(kind, [value], 1)
    graph.appendNode(node)
    node.output().setType(result)
    return node.output()


def _clone(graph: torch._C.Graph, value: torch._C.Value) -> torch._C.Value:
    none = graph.create("prim::Constant", [], 1)
    graph.appendNode(none)
    none.output().setType(torch._C.NoneType.get())
    node = graph.create("aten::clone", [value, none.output()], 1)
    graph.appendNode(node)
    node.output().setType(torch._C.TensorType.get())
    return node.output()


def _run(
    graph: torch._C.Graph,
    asked: Sequence[torch._C.Value],
    module: torch.jit.ScriptModule,
    sample: Sequence[Any],
) -> list[Any]:
    """Run ``graph`` unoptimized (its values must stay what they are) and return ``asked``."""
    answer = graph.create("prim::TupleConstruct", list(asked), 1)
    graph.appendNode(answer)
    answer.output().setType(torch._C.TupleType([v.type() for v in asked]))
    graph.registerOutput(answer.output())
    torch._C._jit_pass_dce(graph)
    graph.lint()
    function = torch._C._create_function_from_graph("observe", graph)
    # Deep copies: the graph may write into its inputs, and into the module's own buffers.
    this = copy.deepcopy(module) if next(iter(graph.inputs())).uses() else module
    with torch.no_grad(), torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
        return list(function(this._c, *copy.deepcopy(tuple(sample))))
