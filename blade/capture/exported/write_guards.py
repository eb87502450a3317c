# SPDX-License-Identifier: Apache-2.0
"""Writes the checks at the beginning of a module made from an exported program.

One branch decides whether all of them hold, which is what a call costs. Its other side raises RuntimeError
with the first that does not. Of a model that was exported here, each is a check like those of a trace, so that
the original can answer.
"""

import operator
from collections.abc import Sequence
from functools import reduce
from typing import Any

import sympy
import torch
from torch.export import ExportedProgram

from blade.capture.exported.guards import Leaf, find_guards, text_of
from blade.capture.exported.numbers import write_call, write_expression
from blade.core.reason import Code
from blade.errors import InputError, Refused
from blade.graph.torchscript.bind_overloads import SCALAR_TYPES
from blade.graph.torchscript.decision_checks import NO_PATH
from blade.graph.torchscript.writer import BOOL, INT, ScriptWriter, Values

_Check = tuple[torch._C.Value, str]
_WHY = "the program was exported for it"


def write_guards(
    writer: ScriptWriter,
    program: ExportedProgram,
    leaves: Sequence[Leaf],
    given: Sequence[Any],
    all_ranges: bool,
    as_checks: bool,
) -> None:
    """Write checks of dtypes, ranks and sizes of ``given``, the values of ``leaves``.

    ``as_checks``: one branch per condition, in the form that ``decision_checks`` finds.
    Raises ``InputError`` for a constant other than that of the export.
    """
    checks: list[_Check] = []
    for leaf, value in zip(leaves, given, strict=True):
        if isinstance(leaf.given, torch.Tensor):
            checks += _form(writer, leaf, value)
        elif not isinstance(leaf.given, (int, torch.SymInt)) or isinstance(leaf.given, bool):
            checks += _constant(writer, leaf, value)
    write = _write_checks if as_checks else _write
    write(writer, checks, 0)  # before the sizes, which a tensor of another rank does not have
    found = find_guards(program, leaves, all_ranges)
    used = set().union(*(one.free_symbols for one in found.conditions))
    sizes = {
        symbol: _number(writer, given[index], axis)
        for symbol, (index, axis) in found.symbols.items()
        if symbol in used
    }
    of_sizes = [one for c in found.conditions if (one := _size_check(writer, c, sizes))]
    write(writer, of_sizes, len(checks))


def _write_checks(writer: ScriptWriter, checks: Sequence[_Check], first: int) -> None:
    for index, (condition, text) in enumerate(checks, first):
        message = f"{NO_PATH} [{index}]: {text} does not hold; {_WHY}."

        def fail(message: str = message) -> Values:
            writer.fail(writer.constant(message))
            return []

        writer.branch(writer.op("aten::__not__", [condition], BOOL), fail, list)


def _write(writer: ScriptWriter, checks: Sequence[_Check], _: int) -> None:
    if not checks:
        return
    conditions = [condition for condition, _ in checks]
    every = reduce(lambda a, b: writer.op("aten::__and__", [a, b], BOOL), conditions)

    def fail() -> Values:
        string = torch._C.StringType.get()
        texts = [writer.constant(f"{NO_PATH}: {text} does not hold; {_WHY}.") for _, text in checks]
        false = writer.constant(False)
        first = writer.op("aten::index", [writer.list_of(conditions, BOOL), false], INT)
        every_text = writer.list_of(texts, string)
        writer.fail(writer.op("aten::__getitem__", [every_text, first], string))
        return []

    writer.branch(every, list, fail)


def _form(writer: ScriptWriter, leaf: Leaf, value: torch._C.Value) -> list[_Check]:
    numbers = {dtype: number for number, dtype in SCALAR_TYPES.items()}
    fake = leaf.given
    rank = writer.op("aten::dim", [value], INT)
    dtype = writer.op("prim::dtype", [value], INT)
    return [
        (_equal(writer, rank, fake.dim()), f"{leaf.name}.dim() == {fake.dim()}"),
        (_equal(writer, dtype, numbers[fake.dtype]), f"{leaf.name}.dtype == {fake.dtype}"),
    ]


def _constant(writer: ScriptWriter, leaf: Leaf, value: Any) -> list[_Check]:
    if not isinstance(value, torch._C.Value):
        same = type(value) is type(leaf.given) and (value == leaf.given or value != value)
        if not same:
            raise InputError(
                f"inputs: {leaf.name} is {value!r}; the program was exported for {leaf.given!r}."
            )
        return []
    if value.type().kind() == "NoneType":
        return []
    if value.type().kind() not in ("BoolType", "FloatType", "StringType"):
        raise Refused(Code.EXPORT_FAILED, f"{leaf.name} is a {value.type()}, which has no check.")
    return [(_equal(writer, value, leaf.given), f"{leaf.name} == {leaf.given!r}")]


def _equal(writer: ScriptWriter, value: torch._C.Value, constant: Any) -> torch._C.Value:
    made = write_call(writer, operator.eq, [value, constant], BOOL)
    assert isinstance(made, torch._C.Value), made
    return made


def _number(writer: ScriptWriter, value: Any, axis: int | None) -> Any:
    """The size along ``axis``, or an int itself."""
    if axis is None:
        return value
    return writer.op("aten::size", [value, writer.constant(axis)], INT)


def _size_check(
    writer: ScriptWriter, condition: Any, sizes: dict[sympy.Symbol, Any]
) -> _Check | None:
    made = write_expression(writer, condition, sizes)
    if isinstance(made, torch._C.Value):
        return made, text_of(condition)
    if made:
        return None
    raise InputError(f"inputs: {text_of(condition)} does not hold; {_WHY}.")
