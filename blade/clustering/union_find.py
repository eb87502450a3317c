# SPDX-License-Identifier: Apache-2.0
"""Disjoint sets over ``0 .. n-1`` (Tarjan 1975), with the root chosen by the caller."""


class UnionFind:
    """``find`` halves paths, which alone keeps it at O(log n) amortized for any choice of roots."""

    def __init__(self, size: int) -> None:
        self._parent = list(range(size))

    def find(self, node: int) -> int:
        """The representative of ``node``'s set."""
        parent = self._parent
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    def attach(self, root: int, other: int) -> None:
        """Put the set represented by ``other`` under ``root``; both must be representatives."""
        assert self._parent[root] == root and self._parent[other] == other, (root, other)
        self._parent[other] = root

    def members(self) -> dict[int, list[int]]:
        """Root -> its nodes, ascending."""
        sets: dict[int, list[int]] = {}
        for node in range(len(self._parent)):
            sets.setdefault(self.find(node), []).append(node)
        return sets
