# SPDX-License-Identifier: Apache-2.0
"""Adds checks of the forms of inputs, rank and dtype, to a graph whose model's code asked for them.

check_forms(graph, sample, {"rank": 7})       # if x.dim() != 3: raise RuntimeError("blade decision 7")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from blade.graph.torchscript.decision_checks import MARK

RANK, FLOATS, INTEGERS = "rank", "dtype of floats", "dtype of integers"


def check_forms(
    graph: torch._C.Graph, sample: Sequence[Any], asked: Mapping[str, int]
) -> dict[int, str]:
    """Write a check in front of ``graph`` for each kind of form in ``asked``, which maps it to a number.

    Return the conditions by number. Inputs that are no tensors or tuples of tensors are not checked.
    """
    given: Any = graph.inputs()
    _, *inputs = given
    own: Any = graph
    own.setInsertPoint(next(iter(graph.nodes()), own.return_node()))
    tensors: list[tuple[Any, torch.Tensor, str]] = []
    for value, entry in zip(inputs, sample, strict=True):
        tensors += _leaves(own, value, entry, value.debugName())
    texts: dict[int, str] = {}
    lines = [f"def check({', '.join(f'x{k}: Tensor' for k in range(len(tensors)))}) -> None:"]
    for kind, number in asked.items():
        terms = [
            (f"x{k}.{term}", f"{name}.{term}")
            for k, (_, tensor, name) in enumerate(tensors)
            if (term := _term(kind, tensor)) is not None
        ]
        if terms:
            code = " and ".join(f"({code})" for code, _ in terms)
            texts[number] = " and ".join(shown for _, shown in terms)
            lines += [f"    if not ({code}):", f"        raise RuntimeError('{MARK}{number}')"]
    if texts:
        unit: Any = torch.jit.CompilationUnit("\n".join([*lines, "    return None", ""]))
        own.insertGraph(unit.check.graph, [value for value, _, _ in tensors])
    own.setInsertPoint(own.block())
    torch._C._jit_pass_dce(graph)
    return texts


def _leaves(graph: Any, value: Any, entry: Any, name: str) -> list[tuple[Any, torch.Tensor, str]]:
    if isinstance(entry, torch.Tensor):
        return [(value, entry, name)]
    if not isinstance(entry, tuple) or value.type().kind() != "TupleType":
        return []
    node = graph.insertNode(graph.create("prim::TupleUnpack", [value], len(entry)))
    found = []
    for k, (part, inner, kind) in enumerate(
        zip(node.outputs(), entry, value.type().elements(), strict=True)
    ):
        part.setType(kind)
        found += _leaves(graph, part, inner, f"{name}[{k}]")
    return found


def _term(kind: str, tensor: torch.Tensor) -> str | None:
    """The condition on ``tensor``; ``None`` if its form cannot have decided."""
    if kind == RANK:
        return f"dim() == {tensor.dim()}"
    if (kind == FLOATS) != tensor.is_floating_point():
        return None
    return f"dtype == {tensor.dtype}"
