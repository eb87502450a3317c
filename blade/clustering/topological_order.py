# SPDX-License-Identifier: Apache-2.0
"""Topological orders: a static one, and a list order whose elements can be moved anywhere."""

import heapq
from collections.abc import Iterable, Iterator, Sequence

_GAP = 1 << 32


def sort_topologically(size: int, arcs: Iterable[tuple[int, int]]) -> list[int]:
    """Return an order of ``0 .. size-1`` in which every arc goes forward, close to the numbering.

    Among the nodes that are ready the smallest goes first. Raises ``ValueError`` on a cycle.
    """
    succ: list[list[int]] = [[] for _ in range(size)]
    missing = [0] * size
    for before, after in arcs:
        succ[before].append(after)
        missing[after] += 1
    ready = [v for v in range(size) if not missing[v]]
    order: list[int] = []
    while ready:
        v = heapq.heappop(ready)
        order.append(v)
        for s in succ[v]:
            missing[s] -= 1
            if not missing[s]:
                heapq.heappush(ready, s)
    if len(order) < size:
        stuck = [v for v in range(size) if missing[v]]
        raise ValueError(
            f"the graph has a cycle; {len(stuck)} nodes are in or behind it: {stuck[:10]}"
        )
    return order


class ListOrder:
    """A total order as a linked list with integer keys (order maintenance).

    ``key[x] < key[y]`` tells in O(1) whether x comes before y. Keys leave gaps; when a gap is used up, all
    keys are renumbered.
    """

    def __init__(self, sequence: Sequence[int]) -> None:
        size = len(sequence)
        # One sentinel at both ends makes the list circular: first and last need no special case.
        self._end = size
        self.key = [0] * (size + 1)
        self._next = [size] * (size + 1)
        self._prev = [size] * (size + 1)
        self.respreads = 0
        self.reset(sequence)

    def __iter__(self) -> Iterator[int]:
        node = self._next[self._end]
        while node != self._end:
            yield node
            node = self._next[node]

    def reset(self, sequence: Sequence[int]) -> None:
        """Make ``sequence`` the whole list."""
        self._next[self._end] = self._prev[self._end] = self._end
        self._link(self._end, sequence)
        self._spread()

    def previous(self, node: int) -> int:
        """Return the element before ``node``; the first one's is a sentinel that ``replace`` accepts."""
        return self._prev[node]

    def replace(self, out: set[int], anchor: int, sequence: Sequence[int]) -> None:
        """Remove ``out`` from the list and insert ``sequence`` (some of them) where ``anchor`` ends."""
        while anchor in out:
            anchor = self._prev[anchor]
        for node in out:
            before, after = self._prev[node], self._next[node]
            self._next[before], self._prev[after] = after, before
        after = self._next[anchor]
        low = 0 if anchor == self._end else self.key[anchor]
        high = low + _GAP * (len(sequence) + 1) if after == self._end else self.key[after]
        self._link(anchor, sequence)
        step = (high - low) // (len(sequence) + 1)
        if step == 0:
            self._spread()
            return
        for i, node in enumerate(sequence, 1):
            self.key[node] = low + i * step

    def _link(self, anchor: int, sequence: Sequence[int]) -> None:
        after = self._next[anchor]
        for node in sequence:
            self._next[anchor], self._prev[node] = node, anchor
            anchor = node
        self._next[anchor], self._prev[after] = after, anchor

    def _spread(self) -> None:
        self.respreads += 1
        for i, node in enumerate(self, 1):
            self.key[node] = i * _GAP
