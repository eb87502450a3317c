# SPDX-License-Identifier: Apache-2.0
"""The graph of groups: always acyclic, with a topological order that is kept up to date.

Merging groups x and y leaves the graph acyclic only if everything on a path between them joins
too: their *hull*. Edges are never removed and labels only shrink, so a hull that no backend takes
as a whole stays impossible whatever else is merged later: one "no" per pair is final, and nothing
has to be tried twice.

The hull is found by a two-way search ordered by the maintained order, and the order is repaired
by moving only what that search visited: incremental topological ordering after Pearce and Kelly
(2006) with the compatible two-way search of Haeupler, Kavitha, Mathew, Sen and Tarjan (2012),
whose bound is O(m^(3/2)) for m arcs in the worst case; graphs of models stay close to linear.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from blade.clustering.topological_order import ListOrder, sort_topologically
from blade.clustering.union_find import UnionFind


@dataclass(frozen=True)
class Hull:
    """What has to become one group, and how the order is repaired around it.

    ``before`` (ancestors) and ``after`` (descendants) of the hull move to its two sides, where
    ``anchor`` ends.
    """

    groups: set[int]
    before: list[int]
    after: list[int]
    anchor: int


class Quotient:
    """Groups are named by a representative node. ``masks[v]`` has one bit per backend taking v."""

    def __init__(self, masks: Sequence[int], arcs: Sequence[tuple[int, int]]) -> None:
        size = len(masks)
        self.sets = UnionFind(size)
        self.mask = list(masks)
        self.succ: list[set[int]] = [set() for _ in range(size)]
        self.pred: list[set[int]] = [set() for _ in range(size)]
        for before, after in arcs:
            self.succ[before].add(after)
            self.pred[after].add(before)
        self.order = ListOrder(sort_topologically(size, arcs))
        self._refused: set[tuple[int, int]] = set()

    def merge(self, x: int, y: int) -> bool:
        """Make one group of the hull of nodes x and y; False if no backend takes all of it."""
        first, last = self.sets.find(x), self.sets.find(y)
        if first == last:
            return True
        if self.order.key[first] > self.order.key[last]:
            first, last = last, first
        if not self.mask[first] & self.mask[last] or (first, last) in self._refused:
            return False
        hull = self._find_hull(first, last)
        if hull is None:
            # Groups only grow under the name of their representative: the pair stays refused.
            self._refused.add((first, last))
            return False
        root = self.contract(hull.groups)
        moved = hull.groups.union(hull.before, hull.after)
        self.order.replace(moved, hull.anchor, [*hull.before, root, *hull.after])
        return True

    def contract(self, groups: set[int]) -> int:
        """Join ``groups`` and their arcs, order aside; returns the new representative."""
        succ, pred = self.succ, self.pred
        # The one with most arcs stays, so that an arc is rewritten O(log n) times in all.
        root = max(groups, key=lambda g: len(succ[g]) + len(pred[g]))
        for g in groups:
            if g == root:
                continue
            self.sets.attach(root, g)
            self.mask[root] &= self.mask[g]
            for near, far in ((succ, pred), (pred, succ)):
                for other in near[g]:
                    far[other].discard(g)
                    if other not in groups:
                        far[other].add(root)
                        near[root].add(other)
                near[g] = set()
        succ[root] -= groups
        pred[root] -= groups
        assert self.mask[root], groups
        return root

    def reorder(self) -> None:
        """Sort all groups anew after bare ``contract`` calls; a cycle is a ``ValueError``."""
        groups = [g for g in range(len(self.mask)) if self.sets.find(g) == g]
        place = {g: i for i, g in enumerate(groups)}
        arcs = [(place[g], place[s]) for g in groups for s in self.succ[g]]
        self.order.reset([groups[i] for i in sort_topologically(len(groups), arcs)])

    def _find_hull(self, first: int, last: int) -> Hull | None:
        """The hull of two groups, ``first`` the earlier one; None if no backend takes it."""
        key, mask, succ, pred = self.order.key, self.mask, self.succ, self.pred
        # Discovered groups -> backends that take everything on one path to (from) there.
        ahead = {first: mask[first] & mask[last]}
        behind = {last: mask[first] & mask[last]}
        rising, falling = [(key[first], first)], [(-key[last], last)]
        passed_up: list[int] = []
        passed_down: list[int] = []
        hull = {first, last}
        cost_up, cost_down = len(succ[first]), len(pred[last])
        while rising and falling and rising[0][0] < -falling[0][0]:
            if cost_up <= cost_down:
                step = _expand(rising, succ, ahead, behind, (first, last), key, mask, 1)
                cost_up += len(succ[rising[0][1]]) if rising else 0
                passed = passed_up
            else:
                step = _expand(falling, pred, behind, ahead, (last, first), key, mask, -1)
                cost_down += len(pred[falling[0][1]]) if falling else 0
                passed = passed_down
            group, meets = step
            passed.append(group)
            if meets is None:
                return None
            hull.update(meets)
        if len(hull) > 2:
            _close(hull, passed_up, succ)
            _close(hull, passed_down, pred)
        common = mask[first]
        for g in hull:
            common &= mask[g]
        if not common:
            return None
        return self._plan(hull, passed_up, passed_down, rising, falling)

    def _plan(
        self,
        hull: set[int],
        passed_up: list[int],
        passed_down: list[int],
        rising: list[tuple[int, int]],
        falling: list[tuple[int, int]],
    ) -> Hull:
        """Where the hull goes: between what the two searches have not passed."""
        key = self.order.key
        if falling:
            cut = falling[0][1]
            anchor = cut
        else:
            cut = rising[0][1]
            anchor = self.order.previous(cut)
        at = key[cut]
        before = [g for g in reversed(passed_down) if key[g] > at and g not in hull]
        after = [g for g in passed_up if key[g] < at and g not in hull]
        return Hull(hull, before, after, anchor)


def _expand(
    heap: list[tuple[int, int]],
    arcs: list[set[int]],
    mine: dict[int, int],
    theirs: dict[int, int],
    ends: tuple[int, int],
    key: list[int],
    mask: list[int],
    sign: int,
) -> tuple[int, list[int] | None]:
    """One step of one side: the group expanded and the groups where it met the other side.

    None instead of the latter if a path was closed that no backend takes as a whole.
    """
    start, goal = ends
    group = heappop(heap)[1]
    limit = sign * key[goal]
    taken = mine[group]
    meets: list[int] = []
    for other in arcs[group]:
        if other in theirs and not (group == start and other == goal):
            if not taken & theirs[other]:
                return group, None
            meets += (group, other)
        at = sign * key[other]
        if other not in mine and at < limit:
            mine[other] = taken & mask[other]
            heappush(heap, (at, other))
    return group, meets


def _close(hull: set[int], passed: list[int], arcs: list[set[int]]) -> None:
    """Add every passed group with an arc into the hull; ``passed`` as the search went."""
    for group in reversed(passed):
        if group not in hull and not hull.isdisjoint(arcs[group]):
            hull.add(group)
