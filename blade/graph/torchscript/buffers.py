# SPDX-License-Identifier: Apache-2.0
"""Finds buffers: the values that certainly are views of one tensor, and how each is made from it.

    y = x * 2; v = y[0]; v.neg_(); z = y.reshape(-1)      buffer {y, v} with v = select(y, 0, 0); buffer {z}

Two values that are the same view share one *name*: what an in-place op returns is named like what it wrote.
What a Loop carries is named like its initial value if each iteration returns that very view; otherwise it
is a buffer of its own, as is whatever may or may not be a view (``reshape``, ``to``, the result of an If, a
list). ``private_writes.py`` decides when such buffers can be treated as copies.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import torch

from blade.graph.torchscript.bind_overloads import resolve
from blade.graph.torchscript.program import Line, Program

VIEWS = frozenset(
    "slice select narrow diagonal view view_as unflatten unsqueeze squeeze transpose swapaxes swapdims t "
    "numpy_T mT permute movedim moveaxis expand expand_as broadcast_to alias detach view_as_real "
    "view_as_complex".split()
)
"""ATen ops whose result always is a view of the first argument, whatever its memory layout."""

PIECES = frozenset("chunk split split_with_sizes tensor_split unbind".split())
"""ATen ops that return a list of views of the first argument."""

_FILLS = ("aten::append", "aten::extend", "aten::insert")
"""Kinds that return the list which they put elements into."""

_DROPOUTS = ("dropout_", "feature_dropout_", "alpha_dropout_", "feature_alpha_dropout_")


@dataclass(frozen=True)
class ViewOf:
    """A view: ``line`` makes it from ``base``; ``pick`` is its place in the list that ``line`` returns."""

    line: Line
    base: int
    pick: int | None = None


@dataclass
class Buffers:
    """Names of values, views by name, and the buffer (the name of its whole tensor) of each name.

    ``carried`` has the slots of Loops that are buffers of their own.
    """

    program: Program
    names: dict[int, int] = field(default_factory=dict)
    views: dict[int, ViewOf] = field(default_factory=dict)
    carried: set[int] = field(default_factory=set)
    _lists: dict[int, Line] = field(default_factory=dict)

    def name(self, value: int) -> int:
        return self.names.get(value, value)

    def buffer(self, value: int) -> int:
        name = self.name(value)
        while name in self.views:
            name = self.views[name].base
        return name

    @cached_property
    def members(self) -> dict[int, list[int]]:
        """Buffer -> its values."""
        found: dict[int, list[int]] = {}
        for value in self.program.values:
            found.setdefault(self.buffer(value), []).append(value)
        return found


def find_buffers(program: Program) -> Buffers:
    """The buffers of ``program``; a slot of a Loop is its initial value unless an iteration disproves it."""
    carried: set[int] = set()
    while True:
        found = Buffers(program, carried=carried)
        disproved = set(_name_block(found, 0))
        if not disproved:
            return found
        carried = carried | disproved


def _name_block(found: Buffers, block: int) -> Iterable[int]:
    program = found.program
    for index in program.blocks[block].lines:
        line = program.lines[index]
        if line.kind == "prim::Loop":
            yield from _name_loop(found, line)
        elif line.kind == "prim::If":
            yield from _name_if(found, line)
        elif not line.free:
            _name_results(found, line)


def _name_loop(found: Buffers, line: Line) -> Iterable[int]:
    body = found.program.blocks[line.blocks[0]]
    slots = list(zip(body.inputs[1:], line.inputs[2:], line.outputs, strict=True))
    for slot, first, _ in slots:
        if slot not in found.carried and found.program.is_tensor(slot):
            found.names[slot] = found.name(first)
    yield from _name_block(found, body.index)
    for (slot, _, result), returned in zip(slots, body.returns[1:], strict=True):
        found.names[result] = found.name(slot)
        if not found.program.is_tensor(slot):
            del found.names[result]
        elif slot not in found.carried and found.name(returned) != found.name(slot):
            yield slot


def _name_if(found: Buffers, line: Line) -> Iterable[int]:
    for block in line.blocks:
        yield from _name_block(found, block)
    ways = [found.program.blocks[block].returns for block in line.blocks]
    for value, returned in zip(line.outputs, zip(*ways, strict=True), strict=True):
        given = {found.name(v) for v in returned if not _is_absent(found.program, v)}
        if len(given) == 1 and found.program.is_tensor(value):
            found.names[value] = given.pop()


def _is_absent(program: Program, value: int) -> bool:
    maker = program.maker(value)
    return maker is not None and maker.kind == "prim::Uninitialized"


def _name_results(found: Buffers, line: Line) -> None:
    if line.outputs and line.kind in ("prim::unchecked_cast", *_FILLS):
        found.names[line.outputs[0]] = found.name(line.inputs[0])
        return
    if line.kind == "prim::ListUnpack" and line.inputs[0] in found._lists:
        source = found._lists[line.inputs[0]]
        for pick, value in enumerate(line.outputs):
            found.views[value] = ViewOf(source, found.name(source.inputs[0]), pick)
        return
    overload = resolve(line.node)
    if overload is None:
        return
    op = name_of(overload)
    if writes_first(overload) or drops_nothing(found.program, line):
        found.names[line.outputs[0]] = found.name(line.inputs[0])
    elif op in PIECES:
        found._lists[line.outputs[0]] = line
    elif op in VIEWS and overload._overloadname != "dtype":
        found.views[line.outputs[0]] = ViewOf(line, found.name(line.inputs[0]))


def name_of(overload: torch._ops.OpOverload) -> str:
    return str(overload._schema.name.partition("::")[2])


def writes_first(overload: torch._ops.OpOverload) -> bool:
    """Whether this op writes its first argument, keeps its sizes, and returns it, and writes nothing else."""
    schema = overload._schema
    if not schema.is_mutable or torch.Tag.inplace_view in overload.tags or len(schema.returns) != 1:
        return False
    written = [
        a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write
    ]
    return name_of(overload).endswith("_") and written == ["self"] == [schema.arguments[0].name]


def drops_nothing(program: Program, line: Line) -> bool:
    """Whether ``line`` is an in-place dropout that is switched off: it is its argument."""
    overload = resolve(line.node)
    if overload is None or name_of(overload) not in _DROPOUTS:
        return False
    return program.constant(line.inputs[2]) and program.held(line.inputs[2]) is False
