# SPDX-License-Identifier: Apache-2.0
"""The quotient graph of groups: always acyclic, with a topological order that is updated incrementally.

Merging groups x and y leaves the graph acyclic only if every group on a path between them joins too: their
*hull*. Edges are never removed and labels only shrink, so a hull that no backend takes as a whole stays
impossible under later merges: one refusal per pair is final, and no pair has to be tried twice.

The hull is found by a two-way search ordered by the maintained order, and the order is repaired by moving
only the groups that this search visited: incremental topological ordering after Pearce and Kelly (2006) with
the compatible two-way search of Haeupler, Kavitha, Mathew, Sen and Tarjan (2012), whose bound is O(m^(3/2))
for m arcs in the worst case; graphs of models stay close to linear.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from blade.clustering.topological_order import ListOrder, sort_topologically
from blade.clustering.union_find import UnionFind


@dataclass(frozen=True)
class Hull:
    """Groups that have to become one, and the repair of the order around them.

    ``before`` (ancestors) and ``after`` (descendants) of the hull move to its two sides, where ``anchor``
    ends.
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
        # Groups known to be behind (ahead of) a group, with a group between that no backend takes together
        # with it. This never becomes false; names of merged groups are never looked up.
        self._cut_after: dict[int, set[int]] = {}
        self._cut_before: dict[int, set[int]] = {}

    def merge(self, x: int, y: int) -> bool:
        """Make one group of the hull of nodes x and y; False if no backend takes all of it."""
        first, last = self.sets.find(x), self.sets.find(y)
        if first == last:
            return True
        if self.order.key[first] > self.order.key[last]:
            first, last = last, first
        if not self.mask[first] & self.mask[last]:
            return False
        hull = self._find_hull(first, last)
        if hull is None:
            self._cut_after[first].add(last)  # only saves work when the pair is tried again
            return False
        root = self.contract(hull.groups)
        moved = hull.groups.union(hull.before, hull.after)
        self.order.replace(moved, hull.anchor, [*hull.before, root, *hull.after])
        return True

    def contract(self, groups: set[int]) -> int:
        """Join ``groups`` and their arcs without the order; return the new representative."""
        succ, pred = self.succ, self.pred
        # Keep the group with the most arcs, so that an arc is rewritten O(log n) times in all.
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
        for cut in (self._cut_after, self._cut_before):
            known = sorted((cut.pop(g) for g in groups if g in cut), key=len)
            if known:
                cut[root] = known.pop()
                cut[root].update(*known)
        assert self.mask[root], groups
        return root

    def reorder(self) -> None:
        """Sort all groups again after bare ``contract`` calls; raise ``ValueError`` on a cycle."""
        groups = [g for g in range(len(self.mask)) if self.sets.find(g) == g]
        place = {g: i for i, g in enumerate(groups)}
        arcs = [(place[g], place[s]) for g in groups for s in self.succ[g]]
        self.order.reset([groups[i] for i in sort_topologically(len(groups), arcs)])

    def _find_hull(self, first: int, last: int) -> Hull | None:
        """Return the hull of two groups, ``first`` the earlier one; None if no backend takes it."""
        key, mask = self.order.key, self.mask
        after = self._cut_after.setdefault(first, set())
        before = self._cut_before.setdefault(last, set())
        if last in after or first in before:
            return None
        up = _Front(first, last, self.succ, key, mask, after, 1)
        down = _Front(last, first, self.pred, key, mask, before, -1)
        hull = {first, last}
        while up.heap and down.heap and up.heap[0][0] < -down.heap[0][0]:
            near, far = (up, down) if up.cost <= down.cost else (down, up)
            if not near.advance(far, hull):
                return None
        if len(hull) > 2:
            up.close(hull)
            down.close(hull)
        # Each path alone may have a backend, but no backend all of them.
        common = mask[first]
        for g in hull:
            common &= mask[g]
        return self._plan(hull, up, down) if common else None

    def _plan(self, hull: set[int], up: "_Front", down: "_Front") -> Hull:
        """Place the hull between the parts that the two searches have not passed."""
        key = self.order.key
        if down.heap:
            cut = anchor = down.heap[0][1]
        else:
            cut = up.heap[0][1]
            anchor = self.order.previous(cut)
        at = key[cut]
        # The first filter always holds and only mirrors the second: ``down`` passes nothing that is
        # not behind the next of ``up``, and in descending order. The second is needed: ``down`` can
        # jump ahead of what ``up`` has passed, which is then behind the cut and has to stay there.
        before = [g for g in reversed(down.passed) if key[g] > at and g not in hull]
        after = [g for g in up.passed if key[g] < at and g not in hull]
        return Hull(hull, before, after, anchor)


class _Front:
    """One side of the search, from ``start`` towards ``goal`` along ``arcs``, nearest in order first.

    ``seen`` maps each discovered group to the backends that take all of one path to it, ``cut`` collects the
    groups without such a backend, ``passed`` lists the groups whose arcs were followed and ``cost`` is the
    number of arcs after the next step.
    """

    def __init__(
        self,
        start: int,
        goal: int,
        arcs: list[set[int]],
        key: list[int],
        mask: list[int],
        cut: set[int],
        sign: int,
    ) -> None:
        self.start, self.goal, self.arcs = start, goal, arcs
        self.key, self.mask, self.cut, self.sign = key, mask, cut, sign
        self.seen = {start: mask[start]}
        self.heap = [(sign * key[start], start)]
        self.passed: list[int] = []
        self.cost = len(arcs[start])

    def advance(self, other: "_Front", hull: set[int]) -> bool:
        """Take one step; add to ``hull`` where the sides meet. False if a path cannot become a group."""
        key, mask, sign, seen = self.key, self.mask, self.sign, self.seen
        group = heappop(self.heap)[1]
        self.passed.append(group)
        limit = sign * key[self.goal]
        taken = seen[group]
        for near in self.arcs[group]:
            if near in other.seen and not (group == self.start and near == self.goal):
                if not taken & other.seen[near]:
                    return False  # only saves work: the mask of the whole hull is empty as well
                hull.add(group)
                hull.add(near)
            at = sign * key[near]
            if at >= limit or near in seen:
                continue
            seen[near] = taken & mask[near]
            if not seen[near]:
                self.cut.add(near)
            if near in other.cut:
                return False  # only saves work, as above
            heappush(self.heap, (at, near))
        if self.heap:
            self.cost += len(self.arcs[self.heap[0][1]])
        return True

    def close(self, hull: set[int]) -> None:
        """Add every passed group with an arc into the hull, the last one passed first."""
        for group in reversed(self.passed):
            if not hull.isdisjoint(self.arcs[group]):
                hull.add(group)
