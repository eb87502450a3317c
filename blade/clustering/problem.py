# SPDX-License-Identifier: Apache-2.0
"""What clustering is asked and what it answers, in plain ints.

Nodes are ``0 .. n-1`` in any order; a data edge is ``(producer, consumer, bytes)`` with the bytes
the value would cost at a boundary, an effect edge ``(earlier, later)`` is an order and nothing
else.

    problem = Problem(labels=[both, both, nobody], edges=[(0, 1, 4096), (1, 2, 64)])
    cluster(problem).groups      # (Group(nodes=(0, 1), label=frozenset({"disc"})),)
"""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Cost:
    """What a boundary costs, in the unit of ``Problem.benefit``. No field may be negative.

    ``call``: one engine call (guard and dispatch). ``byte``: one byte through a group's boundary.
    ``horizontal``: what is lost by merging two groups that hand each other no data. Such a merge
    saves one call and the second read of the largest value that both read, and is done where that
    is more than ``horizontal``; with the defaults it always is.
    """

    call: float = 1.0
    byte: float = 0.0
    horizontal: float = 0.0


@dataclass(frozen=True)
class Problem:
    """A DAG of ops with what is needed to group them.

    ``labels[v]`` names the backends that take node v; empty means that it stays where it is.
    ``benefit[v]`` is what running v in an engine gains; one unit per node where not given. A group
    of fewer than ``min_size`` nodes, or whose benefit is below its boundary's cost, is dissolved.
    """

    labels: Sequence[frozenset[str]]
    edges: Sequence[tuple[int, int, int]]
    effects: Sequence[tuple[int, int]] = ()
    benefit: Sequence[float] | None = None
    min_size: int = 1
    cost: Cost = field(default_factory=Cost)

    def __post_init__(self) -> None:
        """Raises ``ValueError`` for what no caller can mean; a cycle is found by ``cluster``."""
        n = len(self.labels)
        if self.benefit is not None and len(self.benefit) != n:
            raise ValueError(f"benefit has {len(self.benefit)} entries for {n} nodes")
        if min(self.cost.call, self.cost.byte, self.cost.horizontal) < 0:
            raise ValueError(f"a cost is negative: {self.cost}")
        for edge in [*self.edges, *self.effects]:
            if not (0 <= edge[0] < n and 0 <= edge[1] < n) or edge[0] == edge[1]:
                raise ValueError(f"edge {edge} is not between two of the {n} nodes")

    def arcs(self) -> list[tuple[int, int]]:
        """Everything that constrains the order: data edges, then effect edges."""
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
