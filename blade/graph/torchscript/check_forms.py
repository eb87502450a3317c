# SPDX-License-Identifier: Apache-2.0
"""Adds checks of the forms of inputs, rank and dtype, to a graph whose model's code asked for them.

check_forms(graph, sample, {"rank": 7})       # if x.dim() != 3: raise RuntimeError("blade decision 7")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from blade.core import torchscript
from blade.graph.torchscript.check_arguments import unwrapped
from blade.graph.torchscript.decision_checks import MARK

RANK, FLOATS, INTEGERS = "rank", "dtype of floats", "dtype of integers"
IDENTITY = "identity"

STRUCTURE = 1_000_001
"""The number of the check of what tuples among the inputs hold, which no decision asked for."""

CONTAINERS = 1_000_002
"""The number of the check of lengths of lists and keys of dicts among the inputs."""


def check_forms(
    graph: torch._C.Graph, sample: Sequence[Any], asked: Mapping[str, int]
) -> dict[int, str]:
    """Write a check in front of ``graph`` for each kind of form in ``asked``, which maps it to a number.

    Return the conditions by number. What a tuple, list or dict among the inputs holds is always checked:
    TorchScript takes a tensor of two rows for a tuple of two, lists of any length, and dicts with any keys.
    """
    given: Any = graph.inputs()
    _, *inputs = given
    own: Any = graph
    nodes = (node for node in graph.nodes() if node.kind() != "prim::unchecked_cast")
    first: Any = next(nodes, own.return_node())
    own.setInsertPoint(first)
    tensors: list[tuple[Any, torch.Tensor, str]] = []
    for k, value in enumerate(inputs):
        inputs[k] = unwrapped(value)
        if inputs[k] is not value:  # freezing puts weights in front of it
            inputs[k].node().moveBefore(first)
    for value, entry in zip(inputs, sample, strict=True):
        tensors += _leaves(own, value, entry, value.debugName())
    texts = _check_containers(own, inputs, sample)
    lines = [f"def check({', '.join(f'x{k}: Tensor' for k in range(len(tensors)))}) -> None:"]
    for kind, number in asked.items():
        if kind == IDENTITY:
            continue
        terms = [
            (f"x{k}.{term}", f"{name}.{term}")
            for k, (_, tensor, name) in enumerate(tensors)
            if (term := _term(kind, tensor)) is not None
        ]
        if terms:
            code = " & ".join(f"({code})" for code, _ in terms)
            texts[number] = " and ".join(shown for _, shown in terms)
            lines += [f"    if not ({code}):", f"        raise RuntimeError('{MARK}{number}')"]
    same = _identity(tensors) if IDENTITY in asked else []
    if same:
        number = asked[IDENTITY]
        texts[number] = " and ".join(shown for _, shown in same)
        code = " & ".join(f"({code})" for code, _ in same)
        lines += [f"    if not ({code}):", f"        raise RuntimeError('{MARK}{number}')"]
    if len(lines) > 1:
        unit: Any = torch.jit.CompilationUnit("\n".join([*lines, "    return None", ""]))
        own.insertGraph(unit.check.graph, [value for value, _, _ in tensors])
    own.setInsertPoint(own.block())
    torchscript.remove_dead_code(graph)
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


def _check_containers(graph: Any, inputs: Sequence[Any], sample: Sequence[Any]) -> dict[int, str]:
    """Check lengths of lists and keys of dicts, then ranks in tuples; return the conditions by number."""
    terms: dict[int, list[str]] = {CONTAINERS: [], STRUCTURE: []}
    shown: dict[int, list[str]] = {CONTAINERS: [], STRUCTURE: []}
    given: list[Any] = []
    parameters: list[str] = []
    for value, entry in zip(inputs, sample, strict=True):
        name = f"x{len(given)}"
        number = CONTAINERS
        if isinstance(entry, dict) and value.type().kind() == "DictType":
            found = [f"len({name}) == {len(entry)}", *(f"{key!r} in {name}" for key in entry)]
        elif isinstance(entry, list) and value.type().kind() == "ListType":
            found = [f"len({name}) == {len(entry)}"]
        elif isinstance(entry, tuple) and value.type().kind() == "TupleType":
            number = STRUCTURE
            found = [
                f"{name}[{k}].dim() == {part.dim()}"
                for k, part in enumerate(entry)
                if isinstance(part, torch.Tensor)
            ]
        else:
            continue
        terms[number] += found
        shown[number] += [one.replace(name, value.debugName()) for one in found]
        parameters.append(f"{name}: {value.type().annotation_str}")
        given.append(value)
    lines = [f"def check({', '.join(parameters)}) -> None:"]
    for number, conditions in terms.items():
        if conditions:
            code = " & ".join(f"({one})" for one in conditions)
            lines += [f"    if not ({code}):", f"        raise RuntimeError('{MARK}{number}')"]
    if len(lines) == 1:
        return {}
    unit: Any = torch.jit.CompilationUnit("\n".join([*lines, "    return None", ""]))
    graph.insertGraph(unit.check.graph, given)
    return {number: " and ".join(texts) for number, texts in shown.items() if texts}


def _identity(tensors: Sequence[tuple[Any, torch.Tensor, str]]) -> list[tuple[str, str]]:
    """Which of the tensors are one and the same object, and which are not."""
    found = []
    for k, (_, first, name) in enumerate(tensors):
        for j, (_, second, other) in enumerate(tensors[:k]):
            if first.dim() == second.dim() and first.dtype == second.dtype:
                word = "is" if first is second else "is not"
                found.append((f"x{j} {word} x{k}", f"{other} {word} {name}"))
    return found
