# SPDX-License-Identifier: Apache-2.0
"""Undoes writes to arguments where a check of a decision fails behind them.

    cache.add_(x)                               saved = clone(cache); cache.add_(x)
    if cache.sum() <= 0:                ->      if cache.sum() <= 0:
        raise RuntimeError(text)                    cache.copy_(saved); raise RuntimeError(text)

A call that no path answers leaves its arguments alone, and another path, or the original, begins with them as they
were. What is written to is saved, not the whole argument: ``cache[:, at] = x`` saves a slice. Writes of sizes, such
as ``resize_``, stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from blade.core.jit_nodes import blocks_of
from blade.graph.torchscript.alias import OUTSIDE, Aliases, find_aliases, schema_of
from blade.graph.torchscript.bind_overloads import resolve
from blade.graph.torchscript.decision_checks import Check, check_of
from blade.graph.torchscript.insert import Inserter
from blade.graph.torchscript.program import Line, Program, read

Value = Any  # torch._C.Value


def undo_writes(graph: torch._C.Graph) -> None:
    """Rewrite ``graph``, whose checks are no branches yet, in place."""
    if not any(check_of(node) is not None for node in graph.nodes()):
        return
    program = read(graph)
    aliases = find_aliases(program)
    lines = [program.lines[index] for index in program.blocks[0].lines]
    last = max(k for k, line in enumerate(lines) if check_of(line.node) is not None)
    written: list[tuple[Value, Value]] = []  # a tensor, and what it was
    known: set[int] = set()
    for line in lines[: last + 1]:
        check = check_of(line.node)
        if check is not None:
            _restore(graph, check, written)
        elif OUTSIDE in aliases.writes.get(line.index, frozenset()):
            insert = Inserter(graph, line.node)
            for target in _written(program, aliases, line):
                if (whole := _same(program, target)) not in known:
                    known.add(whole)
                    value = program.values[target]
                    saved = insert.op("aten::clone", [value, insert.constant(None)])
                    written.append((value, saved))


def restoring(check: Check) -> list[torch._C.Node]:
    """The nodes that undo what was written before ``check``."""
    failed, _ = blocks_of(check.node)
    return [node for node in failed.nodes() if node.kind() == "aten::copy_"]


def _restore(graph: torch._C.Graph, check: Check, written: list[tuple[Value, Value]]) -> None:
    if not written:
        return
    waits = Inserter(graph, check.node).constant(False)
    failed, _ = blocks_of(check.node)
    insert = Inserter(graph, next(iter(failed.nodes())))
    for value, saved in reversed(written):
        insert.op("aten::copy_", [value, saved, waits])


def _written(program: Program, aliases: Aliases, line: Line) -> Iterator[int]:
    """The tensors that ``line`` writes elements of, or whole arguments of its blocks."""
    if line.blocks:
        for value in dict.fromkeys(line.reads):
            is_outside = OUTSIDE in aliases.roots.get(value, ())
            if is_outside and program.is_tensor(value) and not program.constant(value):
                yield value
        return
    overload, schema = resolve(line.node), schema_of(line.node)
    if overload is None or schema is None or torch.Tag.inplace_view in overload.tags:
        return
    for argument, value in zip(schema.arguments, line.inputs, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors(program, value)


def _tensors(program: Program, value: int) -> Iterator[int]:
    """``value``, or the tensors of the list that it is."""
    if program.is_tensor(value):
        yield value
    elif (maker := program.maker(value)) is not None and maker.kind == "prim::ListConstruct":
        yield from maker.inputs


def _same(program: Program, value: int) -> int:
    """The first name of the tensor ``value``: an op that writes returns what it was given."""
    maker = program.maker(value)
    if maker is None or maker.blocks or len(maker.outputs) != 1 or not maker.inputs:
        return value
    schema = schema_of(maker.node)
    if schema is None or not schema.arguments or not schema.returns:
        return value
    given, made = schema.arguments[0].alias_info, schema.returns[0].alias_info
    is_same = given is not None and made is not None and given.is_write and made.is_write
    return _same(program, maker.inputs[0]) if is_same else value
