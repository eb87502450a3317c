# SPDX-License-Identifier: Apache-2.0
"""Finds views of a group's inputs that leave the group, where the input is not contiguous.

    leading = LeadingViews(graph_view)
    leading.of((3, 4, 5, 6))        # {3}: a split of a transposed tensor, with a part that others read

An engine returns such a view in the memory of its input. It copies an input that is not contiguous, so that it would
have to decline each call (``guard_shape``). Outside of the group the view costs next to nothing.
"""

from collections.abc import Sequence
from functools import cached_property

import torch

from blade.graph.torchscript.view import RETURN, GraphView


class LeadingViews:
    """The leading views of groups of ``view``."""

    def __init__(self, view: GraphView) -> None:
        self._view = view

    def of(self, group: Sequence[int]) -> set[int]:
        """The nodes of ``group`` that are better left out of it."""
        inside = set(group)
        leaving = [node for node in group if self._leaves(node, inside)]
        return {found for node in leaving for found in self._views_up_to(node, inside)}

    def _leaves(self, node: int, inside: set[int]) -> bool:
        readers = self._view.readers
        lines = {
            line for value in self._view.units[node].results for line in readers.get(value, ())
        }
        return any(
            line == RETURN or self._view.unit_of.get(line, node) not in inside for line in lines
        )

    def _views_up_to(self, node: int, inside: set[int]) -> list[int]:
        """The views from an input of the group to ``node``; none if that is no view or the input is contiguous."""
        found: list[int] = []
        while True:
            base = self._base(node)
            if base is None:
                return []
            found.append(node)
            made_by = self._maker(base)
            if (self._producers.get(node, set()) & inside) - {made_by}:
                return []
            if made_by not in inside:
                return [] if self._is_contiguous(base) else found
            assert made_by is not None, node
            node = made_by

    def _base(self, node: int) -> int | None:
        """The tensor that ``node`` makes views of."""
        program, roots = self._view.program, self._view.aliases.roots
        unit = self._view.units[node]
        head = program.lines[unit.lines[0]]
        if head.blocks or head.kind == "aten::contiguous":  # a copy where this matters
            return None
        made = self._view.aliases.union(unit.results)
        bases = [
            v for v in head.inputs if program.is_tensor(v) and roots.get(v, frozenset()) & made
        ]
        if len(bases) != 1 or self._dtype(bases[0]) not in map(self._dtype, unit.results):
            return None
        return bases[0]

    def _dtype(self, value: int) -> torch.dtype | None:
        return self._view.info(value).dtype

    def _maker(self, value: int) -> int | None:
        line = self._view.program.maker(value)
        return None if line is None else self._view.unit_of.get(line.index)

    def _is_contiguous(self, value: int) -> bool:
        """Whether ``value`` was seen contiguous at the first sample, or was not seen."""
        return all(
            fact.order is not None and list(fact.order) == sorted(fact.order)
            for fact in self._view.facts[0].get(value, ())
        )

    @cached_property
    def _producers(self) -> dict[int, set[int]]:
        found: dict[int, set[int]] = {}
        for producer, consumer, _ in self._view.edges:
            found.setdefault(consumer, set()).add(producer)
        return found
