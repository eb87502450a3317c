# SPDX-License-Identifier: Apache-2.0
"""Which values may share memory, and which memory is ever written.

Every value has a set of *roots*, the places its bytes may live: a fresh result is its own root, a
view has its base's roots, a container those of its elements. All graph inputs share the root
``OUTSIDE``, because a caller may pass the same tensor twice. The schemas' alias annotations drive
it; what has no schema (control flow, calls) may alias and write everything it touches. It is flow
insensitive, and finer than ``torch._C.AliasDb`` in one place that matters: the pieces of
``aten::chunk`` alias their base, not every graph input.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from blade.graph.program import Line, Program, nested

OUTSIDE = -1
"""The root of everything a caller can reach: graph inputs and the module itself."""

STRUCTURE = frozenset(
    "prim::ListConstruct prim::TupleConstruct prim::DictConstruct prim::ListUnpack "
    "prim::TupleUnpack prim::unchecked_cast prim::Constant prim::NumToTensor prim::Uninitialized "
    "prim::GetAttr prim::CreateObject prim::TupleIndex prim::TupleSlice".split()
)
"""Kinds without a schema that neither write nor do anything but pass their inputs on."""

_RESIZERS = ("set_", "resize_", "resize_as_")


@dataclass
class Aliases:
    """``roots`` per value; ``writes`` per line (roots it may write); ``resized`` may change size."""

    roots: dict[int, frozenset[int]] = field(default_factory=dict)
    writes: dict[int, frozenset[int]] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)
    resized: set[int] = field(default_factory=set)

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
        found.roots[value] = frozenset({OUTSIDE})
    for line in program.lines:
        schema = schema_of(line.node)
        if schema is not None and not line.free:
            _apply_schema(program, line, schema, found, merges)
        elif line.kind in STRUCTURE:
            base = found.union(line.reads)
            for value in line.outputs:
                found.roots[value] = base | {value}
        else:
            _apply_unknown(line, found, merges)
    _merge(found, merges)
    return found


def schema_of(node: torch._C.Node) -> torch._C.FunctionSchema | None:
    """The operator schema ``node`` was resolved to, if any."""
    text = node.schema()
    return None if text == "(no schema)" else torch._C.parse_schema(text)


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
        if info.is_write:
            wrote |= found.roots[value]
            if not program.is_tensor(value):  # a container now holds the other arguments
                merges.append(found.union(line.inputs))
    for result, value in zip(schema.returns, line.outputs, strict=False):
        info = result.alias_info
        names: Iterable[str] = () if info is None else info.before_set
        shared = frozenset[int]().union(*(by_set.get(n, frozenset()) for n in names))
        if info is not None and not shared:  # a wildcard: an element of some argument
            shared = found.union(line.inputs)
        found.roots[value] = shared if shared else frozenset({value})
    if schema.is_mutable and not wrote:  # the annotation sits inside a list type
        wrote = found.union(line.inputs)
    if wrote:
        _record_write(line, wrote, found, resizes=_resizes(schema.name))


def _apply_unknown(line: Line, found: Aliases, merges: list[frozenset[int]]) -> None:
    """Control flow, calls, attribute writes: outputs may be any input; writes what its ops write."""
    touched = found.union(line.reads)
    inner = list(nested(line.node))
    if line.kind in ("prim::If", "prim::Loop") and not any(_may_write(n) for n in inner):
        wrote = frozenset[int]()
    elif line.kind in ("prim::RaiseException", "prim::Print"):
        wrote = frozenset()
    else:
        touched |= {OUTSIDE}
        wrote = touched
    for value in line.outputs:
        found.roots[value] = touched | {value}
    if wrote:
        merges.append(touched)
        _record_write(line, wrote, found, resizes=True)


def _may_write(node: torch._C.Node) -> bool:
    schema = schema_of(node)
    if schema is not None:
        return any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
    harmless = STRUCTURE | {"prim::If", "prim::Loop", "prim::RaiseException", "prim::Print"}
    return node.kind() not in harmless


def _resizes(name: str) -> bool:
    """Whether this in-place op may change sizes or strides; unknown libraries are assumed to."""
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
    """Make every root of one merge mean every other: they may be reached through one container."""
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
