# SPDX-License-Identifier: Apache-2.0
"""An order of the units in which large values do not wait to be read.

A gradient's sum over the batch and a copy that the caller gets are often computed last in the model, and what they
read would live until then. Here they follow what they read:

    %1 = conv; %2 = relu %1; ...; %90 = copy %2     ->     %1 = conv; %2 = relu %1; %90 = copy %2; ...
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from math import prod

import sympy

from blade.backends.disc.fusion.fuse import Fused, FusionGroup, FusionUnit, members
from blade.backends.disc.ir.graph import LEAVES, Shape, Value
from blade.backends.disc.ir.late_sizes import late_operands
from blade.backends.disc.ir.views import memory_of

LARGE = 1 << 16
"""Bytes of a value that is worth an earlier place for its reader."""

_LASTING = ("input", "const", "packed", "carried", "written")
_UNKNOWN_SIZE = 64  # counts for a size that varies
_SHRINKS = 2  # what is read, over what stays: a reader that frees less keeps its place


def shorten_lives(fused: Fused) -> Fused:
    """``fused`` with groups that read much and keep little right behind what they read."""
    return replace(fused, units=tuple(_Order(fused).units()))


class _Order:
    def __init__(self, fused: Fused) -> None:
        self.fused = fused
        self.late = late_operands(fused.graph.values)
        self.returned = {memory_of(v).id for v in fused.graph.outputs}
        self.unit_of = {m.id: k for k, unit in enumerate(fused.units) for m in members(unit)}
        self.read = [set(self._read_by(k)) for k in range(len(fused.units))]

    def units(self) -> Iterator[FusionUnit]:
        """The units, each after what it reads."""
        early = [self._goes_early(k) for k in range(len(self.fused.units))]
        readers: dict[int, list[int]] = {}
        missing = [len(units) for units in self.read]
        for k, units in enumerate(self.read):
            for made in units:
                readers.setdefault(made, []).append(k)
        begun: set[int] = set()
        for k in range(len(self.fused.units)):
            stack = [k]
            while stack:
                now = stack.pop()
                if now in begun:
                    continue
                begun.add(now)
                yield self.fused.units[now]
                ready = []
                for reader in readers.get(now, ()):
                    missing[reader] -= 1
                    if not missing[reader] and early[reader]:
                        ready.append(reader)
                stack += reversed(ready)

    def _goes_early(self, k: int) -> bool:
        """Whether unit ``k`` lets go of more memory than it takes."""
        unit = self.fused.units[k]
        if not isinstance(unit, FusionGroup):
            return False  # may draw random numbers or raise
        kept = sum(
            bytes_of(m)
            for m in unit.members
            if m.id in self.fused.stored and m.id not in self.returned
        )
        freed = sum(bytes_of(v) for v in self._operands(unit) if self._is_let_go(v))
        return freed >= max(LARGE, _SHRINKS * kept)

    def _is_let_go(self, value: Value) -> bool:
        """Whether the memory of ``value`` is free after its last reader."""
        return value.op not in (*LEAVES, *_LASTING) and value.id not in self.returned

    def _operands(self, unit: FusionUnit) -> set[Value]:
        """The memory that ``unit`` reads and does not make."""
        inside = {m.id for m in members(unit)}
        found = {memory_of(a) for m in members(unit) for a in self._args(m)}
        return {v for v in found if v.id not in inside}

    def _args(self, value: Value) -> Iterator[Value]:
        yield from value.args
        yield from self.late.get(value.id, ())

    def _read_by(self, k: int) -> Iterator[int]:
        """The units that make what unit ``k`` reads, through values that are no instructions."""
        stack = [a for m in members(self.fused.units[k]) for a in self._args(m)]
        seen: set[int] = set()
        while stack:
            value = stack.pop()
            if value.id in seen:
                continue
            seen.add(value.id)
            made = self.unit_of.get(value.id)
            if made is None:
                stack += self._args(value)
            elif made != k:
                yield made


def bytes_of(value: Value) -> int:
    """Sizes that vary count as if they were small."""
    return _numel(value.shape) * value.dtype.itemsize


def _numel(shape: Shape) -> int:
    return prod(n if isinstance(n, int) else _at_unknown_sizes(n) for n in shape)


@cache
def _at_unknown_sizes(size: sympy.Basic) -> int:
    return int(size.subs(dict.fromkeys(size.free_symbols, _UNKNOWN_SIZE)))
