# SPDX-License-Identifier: Apache-2.0
"""Adds arguments that decide between paths by their values, such as flags and names of modes, and their checks.

check_arguments(graph, (x, "mean", None), {1: 0, 2: 1})       # if mode != 'mean': raise ...; if mask is not None: raise
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from blade.graph.torchscript.decision_checks import MARK

_PLAIN: Mapping[str, Any] = {
    "Tensor": torch._C.TensorType.get(),
    "str": torch._C.StringType.get(),
    "bool": torch._C.BoolType.get(),
    "int": torch._C.IntType.get(),
    "float": torch._C.FloatType.get(),
}


def type_of(annotation: str) -> Any:
    """The TorchScript type that ``annotation``, such as "Optional[str]", names."""
    plain = annotation.removeprefix("Optional[").removesuffix("]")
    kind = _PLAIN[plain]
    return kind if plain == annotation else torch._C.OptionalType(kind)


def add_arguments(
    graph: torch._C.Graph, names: Sequence[str], guards: Mapping[str, str]
) -> Sequence[str]:
    """Add inputs for those of ``guards``, which have annotations by name, that are not in ``names``, the first
    inputs of ``graph``; return all names, those of ``guards`` last. Other inputs follow them.

    What is optional and in ``names`` becomes a tensor where it is read.
    """
    if not guards:
        return names
    own: Any = graph
    plain = [name for name in names if name not in guards]
    order = list(range(len(plain)))
    rest = range(len(names), len(list(own.inputs())))
    for name, annotation in guards.items():
        if name in names:
            order.append(list(names).index(name))
        else:
            order.append(len(list(own.inputs())))
            own.addInput().setType(type_of(annotation))
    own.permuteInputs([*order, *rest])
    first = next(iter(own.nodes()), own.return_node())
    for value, (name, annotation) in zip(list(own.inputs())[len(plain) :], guards.items()):
        if name in names and annotation != "Tensor":
            cast = own.create("prim::unchecked_cast", [value], 1)
            cast.insertBefore(first)
            value.replaceAllUsesWith(cast.output())
            cast.replaceInput(0, value)
            cast.output().setType(value.type())
            value.setType(type_of(annotation))
    return [*plain, *guards]


def unwrapped(value: Any) -> Any:
    """The tensor that a graph makes of the optional tensor ``value``, an input; other values as they are."""
    casts = [use.user for use in value.uses() if use.user.kind() == "prim::unchecked_cast"]
    return casts[0].output() if casts else value


def check_arguments(
    graph: torch._C.Graph, sample: Sequence[Any], numbers: Mapping[int, int]
) -> dict[int, str]:
    """Write a check in front of ``graph`` for each entry of ``sample`` in ``numbers``, which maps its index to
    the number of a decision. Return the conditions by number.
    """
    given: Any = graph.inputs()
    _, *inputs = given
    own: Any = graph
    own.setInsertPoint(next(iter(graph.nodes()), own.return_node()))
    texts = {}
    for index, number in numbers.items():
        value, entry = inputs[index], sample[index]
        kind = value.type().annotation_str
        name = value.debugName().partition(".")[0]
        if isinstance(entry, torch.Tensor) and not kind.startswith("Optional"):
            continue
        lines = [f"def check(x: {kind}) -> None:", *_fails(entry, kind)]
        lines += [
            "    if fails:",
            f"        raise RuntimeError('{MARK}{number}')",
            "    return None",
        ]
        unit: Any = torch.jit.CompilationUnit("\n".join([*lines, ""]))
        own.insertGraph(unit.check.graph, [value])
        is_tensor = isinstance(entry, torch.Tensor)
        shown = "is not None" if is_tensor else "is None" if entry is None else f"== {entry!r}"
        texts[number] = f"{name} {shown}"
    own.setInsertPoint(own.block())
    return texts


def _fails(entry: Any, kind: str) -> list[str]:
    if isinstance(entry, torch.Tensor):
        return ["    fails = x is None"]
    if entry is None:
        return ["    fails = x is not None"]
    if kind.startswith("Optional"):
        return ["    fails = True", "    if x is not None:", f"        fails = x != {entry!r}"]
    return [f"    fails = x != {entry!r}"]
