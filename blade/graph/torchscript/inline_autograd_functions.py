# SPDX-License-Identifier: Apache-2.0
"""Inlines calls of ``torch.autograd.Function`` in a trace: replaces them by the ops of their ``forward``.

    %y : Tensor = ^GeLU()(%x)        ->        %y : Tensor = aten::mul(%x, ...)

The tracer keeps the call, which needs Python and cannot be saved, together with the ops that it recorded
inside. They are all of forward; a trace does not contain backward, the purpose of such functions.
"""

from __future__ import annotations

import torch

from blade.graph.torchscript.program import nested

KIND = "prim::PythonOp"


def inline_in(module: torch.jit.ScriptModule) -> None:
    """``inline_functions`` in every method of ``module`` and its submodules."""
    for part in module.modules():
        if isinstance(part, torch.jit.ScriptModule):
            for name in part._c._method_names():
                inline_functions(part._c._get_method(name).graph)


def inline_functions(graph: torch._C.Graph) -> None:
    """Rewrite ``graph`` in place, nested calls included. Calls without recorded ops stay."""
    while calls := [n for n in (*graph.nodes(), *_inner(graph)) if _has_ops(n)]:
        for call in calls:
            _inline(graph, call)
    graph.setInsertPoint(graph.block())


def _inner(graph: torch._C.Graph) -> list[torch._C.Node]:
    return [inner for node in graph.nodes() for inner in nested(node)]


def _has_ops(node: torch._C.Node) -> bool:
    return node.kind() == KIND and node.hasAttribute("Subgraph")


def _inline(graph: torch._C.Graph, call: torch._C.Node) -> None:
    graph.setInsertPoint(call)
    inside = call.g("Subgraph")
    results = graph.insertGraph(inside, list(call.inputs()))
    made = list(call.outputs())
    if len(made) == 1 and made[0].type().kind() == "TupleType":
        tuple_of = graph.create("prim::TupleConstruct", list(results), 1)
        graph.insertNode(tuple_of)
        tuple_of.output().setType(made[0].type())
        results = [tuple_of.output()]
    for value, result in zip(made, results, strict=True):
        value.replaceAllUsesWith(result)
    call.destroy()
