# SPDX-License-Identifier: Apache-2.0
"""Alias analysis: the values that may share memory, and the memory that is ever written.

Every value has a set of *roots*, the places where its bytes may live: a fresh result is its own root, a
view has its base's roots, a container those of its elements. All graph inputs share the root ``OUTSIDE``,
because a caller may pass the same tensor twice. The schemas' alias annotations give the roots of results.
The result of an If has the roots that either branch returns; values carried by a Loop are iterated to a
fixed point; a node without a schema that is no control flow may alias and write everything it touches.

The analysis is flow insensitive, and finer than ``torch._C.AliasDb`` in two places that matter: the pieces
of ``aten::chunk`` alias their base, not every graph input; and appending tensors to a list writes the list,
not the tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache

import torch

from blade.graph.torchscript.program import Line, Program, is_tensor_type

OUTSIDE = -1
"""The root of everything that a caller can reach: graph inputs and the module itself."""

OUTSIDE_CONTAINER = -2
"""The second root of values outside that are no tensors: lists, dicts, objects."""

STRUCTURE = frozenset(
    "prim::ListConstruct prim::TupleConstruct prim::DictConstruct prim::ListUnpack "
    "prim::TupleUnpack prim::unchecked_cast prim::Constant prim::NumToTensor prim::Uninitialized "
    "prim::GetAttr prim::CreateObject prim::TupleIndex prim::TupleSlice".split()
)
"""Kinds that only pass their inputs on and write nothing. Some have a schema, which tells less."""

_VARIABLE = ("VarType", "AnyType")
_IMMUTABLE = frozenset(
    "BoolType IntType FloatType ComplexType NumberType StringType NoneType DeviceObjType EnumType "
    "ScalarTypeType LayoutType MemoryFormatType SymIntType SymBoolType FunctionType".split()
)

_RESIZERS = ("set_", "resize_", "resize_as_")


@dataclass
class Aliases:
    """Roots per value, roots that each line may write, and all roots that may be written or resized."""

    roots: dict[int, frozenset[int]] = field(default_factory=dict)
    writes: dict[int, frozenset[int]] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)
    resized: set[int] = field(default_factory=set)
    _held: dict[int, frozenset[int]] = field(
        default_factory=dict
    )  # container -> roots added to it later
    _filled: dict[int, frozenset[int]] = field(default_factory=dict)  # line -> containers it writes

    def may_be_written(self, value: int) -> bool:
        return not self.written.isdisjoint(self.roots[value])

    def may_be_resized(self, value: int) -> bool:
        return not self.resized.isdisjoint(self.roots[value])

    def union(self, values: Iterable[int]) -> frozenset[int]:
        return frozenset[int]().union(*(self.roots[v] for v in values))


def find_aliases(program: Program) -> Aliases:
    """Roots and writes of every value and line of ``program``."""
    found = Aliases()
    merges: list[frozenset[int]] = []
    for value in program.inputs:
        whole = {OUTSIDE} if program.is_tensor(value) else {OUTSIDE, OUTSIDE_CONTAINER}
        found.roots[value] = frozenset(whole)
    _apply_block(program, 0, found, merges)
    _merge(found, _add_held(found, merges))
    return found


def _apply_block(
    program: Program, block: int, found: Aliases, merges: list[frozenset[int]]
) -> None:
    for index in program.blocks[block].lines:
        line = program.lines[index]
        if line.blocks:
            _apply_control(program, line, found, merges)
        elif line.kind in STRUCTURE:
            _pass_on(program, line, line.outputs, found)
        elif (schema := schema_of(line.node)) is not None and not line.free:
            _apply_schema(program, line, schema, found, merges)
        else:
            _apply_unknown(line, found, merges)


def _pass_on(program: Program, line: Line, values: Iterable[int], found: Aliases) -> None:
    """``values``, results of ``line``, are its inputs or parts of them; a number has no memory to share."""
    base = found.union(line.reads)
    for value in values:
        alone = _is_immutable(program.values[value].type())
        found.roots[value] = frozenset({value}) if alone else base | {value}


def _apply_control(
    program: Program, line: Line, found: Aliases, merges: list[frozenset[int]]
) -> None:
    """Apply the bodies of an If or Loop, then derive its results from their returns and its writes from
    theirs.
    """
    if line.kind == "prim::Loop":
        _apply_loop(program, line, found, merges)
    else:
        for block in line.blocks:
            _apply_block(program, block, found, merges)
        ways = [program.blocks[block].returns for block in line.blocks]
        for value, returned in zip(line.outputs, zip(*ways, strict=True), strict=True):
            found.roots[value] = found.union(returned) | {value}
    for block in line.blocks:
        for inner in program.blocks[block].lines:
            for table in (found.writes, found._filled):
                if inner in table:
                    table[line.index] = table.get(line.index, frozenset()) | table[inner]


def _apply_loop(program: Program, line: Line, found: Aliases, merges: list[frozenset[int]]) -> None:
    [index] = line.blocks
    body = program.blocks[index]
    counter, *carried = body.inputs
    found.roots[counter] = frozenset({counter})
    for value, first in zip(carried, line.inputs[2:], strict=True):
        found.roots[value] = found.roots[first] | {value}
    while True:
        _apply_block(program, index, found, merges)
        grown = [found.union(pair) for pair in zip(carried, body.returns[1:], strict=True)]
        if all(found.roots[v] == roots for v, roots in zip(carried, grown, strict=True)):
            break
        found.roots.update(zip(carried, grown, strict=True))
    for value, roots in zip(line.outputs, grown, strict=True):
        found.roots[value] = roots | {value}


def schema_of(node: torch._C.Node) -> torch._C.FunctionSchema | None:
    """The operator schema that ``node`` was resolved to; ``None`` without one and for calls into Python."""
    text = node.schema()
    unknown = text == "(no schema)" or node.kind() == "prim::PythonOp"
    return None if unknown else _parsed(text)


@cache
def _parsed(schema: str) -> torch._C.FunctionSchema:
    return torch._C.parse_schema(schema)


def _apply_schema(
    program: Program,
    line: Line,
    schema: torch._C.FunctionSchema,
    found: Aliases,
    merges: list[frozenset[int]],
) -> None:
    by_set: dict[str, frozenset[int]] = {}
    wrote = frozenset[int]()
    for argument, value in zip(schema.arguments, line.inputs, strict=False):
        info = argument.alias_info
        if info is None:
            continue
        for name in info.before_set:
            by_set[name] = by_set.get(name, frozenset()) | found.roots[value]
        if not info.is_write:
            continue
        if program.is_tensor(value):
            wrote |= found.roots[value]
        elif (
            OUTSIDE_CONTAINER in found.roots[value]
        ):  # a container of the caller, which now holds the other arguments
            wrote |= found.roots[value]
            merges.append(found.union(line.inputs))
        else:
            _fill(program, line, value, found)
    for result, value in zip(schema.returns, line.outputs, strict=False):
        info = result.alias_info
        names: Iterable[str] = () if info is None else info.before_set
        shared = frozenset[int]().union(*(by_set.get(n, frozenset()) for n in names))
        if info is not None and not shared:  # wildcard: an element of some argument
            shared = found.union(v for v in line.inputs if not _is_plain(program, v))
        if info is None:
            shared = _unannotated(program, line, value, result.type.kind() in _VARIABLE, found)
        found.roots[value] = shared if shared else frozenset({value})
    # "-> ...": as many results as the node has
    _pass_on(program, line, line.outputs[len(schema.returns) :], found)
    if (
        schema.is_mutable and not wrote and line.index not in found._filled
    ):  # the annotation is inside a list type
        wrote = found.union(line.inputs)
    if wrote:
        _record_write(line, wrote, found, resizes=_resizes(schema.name))


def _unannotated(
    program: Program, line: Line, value: int, is_variable: bool, found: Aliases
) -> frozenset[int]:
    """Roots of a result that the schema says nothing about; none if it is fresh.

    A result of any type (``is_variable``) may be an argument. A new container, such as a slice or copy of a
    list, may hold what containers among the arguments hold.
    """
    kind = program.values[value].type()
    if _is_immutable(kind):
        return frozenset()
    if is_variable:
        return found.union(line.inputs) | {value}
    if not _is_container(kind) or all(map(_is_immutable, _contained(kind))):
        return frozenset()
    held_in = [v for v in line.inputs if _is_container(program.values[v].type())]
    return found.union(held_in) | {value}


def _is_container(kind: torch._C.JitType) -> bool:
    return not is_tensor_type(kind) and bool(_contained(kind))


def _is_immutable(kind: torch._C.JitType) -> bool:
    """Whether values of this type have no memory that can be written: numbers, and tuples of them."""
    if kind.kind() in ("OptionalType", "TupleType", "UnionType"):
        return all(map(_is_immutable, _contained(kind)))
    return kind.kind() in _IMMUTABLE


def _contained(kind: torch._C.JitType) -> list[torch._C.JitType]:
    """The types that ``kind`` is made of: elements of a list or tuple, keys and values of a dict."""
    found: list[torch._C.JitType] = kind.containedTypes()  # type: ignore[attr-defined]
    return found


def _is_plain(program: Program, value: int) -> bool:
    """Whether ``value`` is a number, a string, nothing, or a list of such: no part of a tensor."""
    kind = program.values[value].type()
    if _is_container(kind):
        return all(map(_is_immutable, _contained(kind)))
    return _is_immutable(kind)


def _apply_unknown(line: Line, found: Aliases, merges: list[frozenset[int]]) -> None:
    """Calls, attribute writes, raises: outputs may alias any input, and everything touched may be written."""
    touched = found.union(line.reads)
    if line.kind in ("prim::RaiseException", "prim::Print"):
        wrote = frozenset[int]()
    else:
        touched |= {OUTSIDE, OUTSIDE_CONTAINER}
        wrote = touched
    for value in line.outputs:
        found.roots[value] = touched | {value}
    if wrote:
        merges.append(touched)
        _record_write(line, wrote, found, resizes=True)


def _fill(program: Program, line: Line, container: int, found: Aliases) -> None:
    """``line`` puts its other arguments into ``container``: this writes the container's roots, not theirs."""
    own = frozenset(r for r in found.roots[container] if r >= 0 and not program.is_tensor(r))
    added = found.union(v for v in line.inputs if v != container)
    for root in own:
        found._held[root] = found._held.get(root, frozenset()) | added
    found._filled[line.index] = found._filled.get(line.index, frozenset()) | own


def _add_held(found: Aliases, merges: list[frozenset[int]]) -> list[frozenset[int]]:
    """Add to each value with a container's root the roots ever put into it; do the same for ``merges``."""
    reach = {root: _reachable(root, found._held) for root in found._held}

    def whole(roots: Iterable[int]) -> frozenset[int]:
        return frozenset[int]().union(*(reach.get(r, frozenset({r})) for r in roots))

    found.roots = {value: whole(roots) for value, roots in found.roots.items()}
    found.writes = {line: whole(roots) for line, roots in found.writes.items()}
    found.written = set(whole(found.written))
    found.resized = set(whole(found.resized))
    for index, roots in found._filled.items():
        found.writes[index] = found.writes.get(index, frozenset()) | roots
        found.written |= roots
        found.resized |= roots
    return [whole(merge) for merge in merges]


def _reachable(root: int, held: dict[int, frozenset[int]]) -> frozenset[int]:
    seen = {root}
    pending = [root]
    while pending:
        fresh = held.get(pending.pop(), frozenset()) - seen
        seen |= fresh
        pending.extend(fresh)
    return frozenset(seen)


def _resizes(name: str) -> bool:
    """Whether this in-place op may change sizes or strides; ops of unknown libraries are assumed to."""
    library, _, op = name.partition("::")
    if library != "aten":
        return True
    packet = getattr(torch.ops.aten, op, None)
    if op in _RESIZERS or packet is None:
        return True
    return any(torch.Tag.inplace_view in getattr(packet, o).tags for o in packet.overloads())


def _record_write(line: Line, wrote: frozenset[int], found: Aliases, *, resizes: bool) -> None:
    found.writes[line.index] = found.writes.get(line.index, frozenset()) | wrote
    found.written |= wrote
    if resizes:
        found.resized |= wrote


def _merge(found: Aliases, merges: list[frozenset[int]]) -> None:
    """Make the roots of one merge equivalent: they may be reached through one container."""
    if not merges:
        return
    groups: list[set[int]] = []
    for merge in merges:
        group = set(merge)
        for other in [g for g in groups if not g.isdisjoint(group)]:
            group |= other
            groups.remove(other)
        groups.append(group)
    widen = {root: frozenset(group) for group in groups for root in group}

    def wide(roots: Iterable[int]) -> frozenset[int]:
        return frozenset[int]().union(*(widen.get(r, frozenset({r})) for r in roots))

    found.roots = {value: wide(roots) for value, roots in found.roots.items()}
    found.writes = {line: wide(roots) for line, roots in found.writes.items()}
    found.written = set(wide(found.written))
    found.resized = set(wide(found.resized))
