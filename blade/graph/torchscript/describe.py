# SPDX-License-Identifier: Apache-2.0
"""Makes an ``OpNode`` from a line: its overload, its arguments, and observed facts about its values."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from blade.core.cluster import OpNode, ValueInfo, unknown_target
from blade.graph.shapes.observed_layout import ObservedRun
from blade.graph.torchscript.bind_overloads import resolve, split_arguments, to_python
from blade.graph.torchscript.boundary_scalars import tensor_form, tensor_info_of
from blade.graph.torchscript.program import Line, Program, is_tensor_type
from blade.graph.torchscript.scalar_lines import reads_elements

_KINDS = {
    "IntType": "int",
    "FloatType": "float",
    "BoolType": "bool",
    "StringType": "str",
    "NoneType": "none",
    "ListType": "list",
}


@dataclass(frozen=True)
class ObservedFacts:
    """The facts on which all runs agree, per value.

    Nothing is known about a value in a block that no run entered.
    """

    program: Program
    runs: Sequence[ObservedRun]

    def info(self, value: int) -> ValueInfo:
        constant = self.program.tensor_constant(value)
        if constant is not None:
            form = constant.dtype, constant.device, constant.dim(), tuple(constant.shape)
            return ValueInfo("tensor", *form, constant=True)
        kind = self.program.values[value].type()
        if not is_tensor_type(kind):
            return ValueInfo(_KINDS.get(kind.kind(), "other"))
        seen = [fact for run in self.runs for fact in run.get(value, ())]
        if not seen:
            return ValueInfo("tensor")
        return ValueInfo(
            "tensor",
            _agreed([f.dtype for f in seen]),
            _agreed([f.device for f in seen]),
            _agreed([len(f.sizes) for f in seen]),
            seen[0].sizes,
        )


def describe(
    program: Program,
    facts: ObservedFacts,
    cheap: frozenset[int],
    line: Line,
    results: Sequence[int],
    scalars: frozenset[int] = frozenset(),
) -> OpNode:
    """The node that a backend judges. A line without an overload gets a stand-in target.

    ``scalars`` are numbers that cross a boundary: the overload is then the one for tensors.
    """
    overload = resolve(line.node)
    name = _name(program, line)
    outputs = tuple(facts.info(v) for v in results)
    if overload is None:
        infos = tuple(facts.info(v) for v in line.inputs)
        return OpNode(name, unknown_target(), infos, {}, outputs, source(line))
    values = {
        a.name: tensor_info_of(program, v)
        if v in scalars
        else _argument(program, facts, cheap, a, v)
        for a, v in zip(overload._schema.arguments, line.inputs, strict=True)
    }
    overload = tensor_form(overload) if scalars else overload
    args, kwargs = split_arguments(overload, values)
    return OpNode(name, overload, args, kwargs, outputs, source(line))


def source(line: Line) -> str:
    """The user's source: module scope, then file and line."""
    where = str(line.node.sourceRange())
    found = re.search(r'File "([^"]+)", line (\d+)', where) or re.search(
        r"(\S+?)\((\d+)\): ", where
    )
    place = f"{found[1]}:{found[2]}" if found else ""
    return " ".join(part for part in (line.node.scopeName(), place) if part)


def _name(program: Program, line: Line) -> str:
    if not line.outputs:
        return f"{line.kind}#{line.index}"
    return f"%{program.values[line.outputs[0]].debugName()} = {line.kind}"


def _argument(
    program: Program,
    facts: ObservedFacts,
    cheap: frozenset[int],
    argument: torch._C.Argument,
    value: int,
) -> Any:
    line = program.maker(value)
    if line is None or line.index not in cheap:
        return facts.info(value)
    if line.kind == "prim::Constant":
        held = program.held(value)
        return facts.info(value) if isinstance(held, torch.Tensor) else to_python(argument, held)
    if line.kind == "prim::ListConstruct":
        return [_element(program, facts, cheap, v) for v in line.inputs]
    if line.kind == "prim::dtype":
        return facts.info(line.inputs[0]).dtype or facts.info(value)
    if line.kind == "prim::device":
        return facts.info(line.inputs[0]).device or facts.info(value)
    is_read = reads_elements(program, cheap, value)
    return replace(facts.info(value), is_size=program.is_tensor(value), is_read=is_read)


def _element(program: Program, facts: ObservedFacts, cheap: frozenset[int], value: int) -> Any:
    if program.constant(value) and program.tensor_constant(value) is None:
        return program.held(value)
    return replace(facts.info(value), is_read=reads_elements(program, cheap, value))


def _agreed(seen: list[Any]) -> Any:
    return seen[0] if all(s == seen[0] for s in seen) else None
