# SPDX-License-Identifier: Apache-2.0
"""Problem and result of clustering, in plain ints.

Nodes are ``0 .. n-1`` in any order. A data edge is ``(producer, consumer, bytes)`` with the bytes that the
value would cost at a boundary; an effect edge ``(earlier, later)`` is only an order.

    problem = Problem(labels=[both, both, none], edges=[(0, 1, 4096), (1, 2, 64)])
    cluster(problem).groups      # (Group(nodes=(0, 1), label=frozenset({"disc"})),)
"""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Cost:
    """Cost of a boundary, in the unit of ``Problem.benefit``. No field may be negative.

    ``call``: one engine call (guard and dispatch). ``byte``: one byte through a group's boundary.
    ``horizontal``: the loss from merging two groups without data between them. Such a merge saves one call
    and the second read of the largest value that both read, and is done if that exceeds ``horizontal``; with
    the defaults it always does.
    """

    call: float = 1.0
    byte: float = 0.0
    horizontal: float = 0.0


@dataclass(frozen=True)
class Problem:
    """A DAG of ops with labels, benefits and costs.

    ``labels[v]`` names the backends that take node v; an empty label keeps v out of groups. ``benefit[v]`` is
    the gain from running v in an engine; one unit per node by default. ``ops[v]`` counts the ops of v, one
    by default: a loop has several. A group of fewer than ``min_size`` ops, or with a benefit below its
    boundary's cost, is dissolved.
    """

    labels: Sequence[frozenset[str]]
    edges: Sequence[tuple[int, int, int]]
    effects: Sequence[tuple[int, int]] = ()
    benefit: Sequence[float] | None = None
    min_size: int = 1
    cost: Cost = field(default_factory=Cost)
    ops: Sequence[int] | None = None

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for inconsistent fields; ``cluster`` detects cycles."""
        n = len(self.labels)
        if self.benefit is not None and len(self.benefit) != n:
            raise ValueError(f"benefit has {len(self.benefit)} entries for {n} nodes")
        if self.ops is not None and len(self.ops) != n:
            raise ValueError(f"ops has {len(self.ops)} entries for {n} nodes")
        if min(self.cost.call, self.cost.byte, self.cost.horizontal) < 0:
            raise ValueError(f"a cost is negative: {self.cost}")
        for edge in [*self.edges, *self.effects]:
            if not (0 <= edge[0] < n and 0 <= edge[1] < n) or edge[0] == edge[1]:
                raise ValueError(f"edge {edge} is not between two of the {n} nodes")

    def arcs(self) -> list[tuple[int, int]]:
        """Return all constraints on the order: data edges, then effect edges."""
        return [(p, c) for p, c, _ in self.edges] + list(self.effects)


@dataclass(frozen=True)
class Group:
    """Nodes of one engine: ``nodes`` ascending, ``label`` the backends that take all of them."""

    nodes: tuple[int, ...]
    label: frozenset[str]


@dataclass(frozen=True)
class Dissolved:
    """A legal group that is not worth an engine; ``detail`` says why, with the numbers."""

    nodes: tuple[int, ...]
    label: frozenset[str]
    detail: str


@dataclass(frozen=True)
class Clustering:
    """The groups and the dissolved ones, each ordered by smallest node."""

    groups: tuple[Group, ...]
    dissolved: tuple[Dissolved, ...]
