# SPDX-License-Identifier: Apache-2.0
"""Which backends try which group: those that take it, less what would not tell anything new.

    ways = cut(graph_view, labels, backends, min_size)
    attempts = assign(ways, labels, backends, graph_view, losers)

The graph is cut in several ways. The mixture's groups are for all; those of a graph that was cut for one
backend are for that one, and what it does not take of it for backends that convert in this process, which is
quick. Of groups that are nearly the same, each backend tries one.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from blade.backends.base import Backend
from blade.clustering.problem import Clustering, Group
from blade.fallback.builder import Attempt
from blade.graph.group import group
from blade.graph.listing import kind_of
from blade.graph.view import GraphView
from blade.reason import Code, Reason, Stage

MIXTURE = "mixture"
RIM = 0.05  # of the nodes of two groups: as much may differ of what counts as nearly the same
RIM_NODES = 4  # of small groups

_NOBODY: Mapping[str, tuple[int, ...]] = MappingProxyType({})
# Where the time goes: groups that differ in one of these are different groups.
_HEAVY = frozenset(
    f"aten::{name}"
    for name in (
        "linear matmul mm bmm addmm baddbmm addbmm einsum _convolution convolution conv1d conv2d conv3d "
        "conv_transpose1d conv_transpose2d conv_transpose3d scaled_dot_product_attention lstm gru rnn_tanh "
        "rnn_relu embedding_bag"
    ).split()
)


@dataclass(frozen=True)
class Way:
    """One way to cut the graph; ``name`` is the backend's for which it was cut, or ``MIXTURE``."""

    name: str
    clustering: Clustering


def cut(
    view: GraphView, labels: Sequence[frozenset[str]], backends: Sequence[Backend], min_size: int
) -> list[Way]:
    """The mixture, and the graph cut for each of ``backends``; equal ones once."""
    different: dict[tuple[tuple[int, ...], ...], Way] = {}

    def add(name: str, own: Sequence[frozenset[str]]) -> None:
        way = Way(name, group(view, own, min_size=min_size))
        different.setdefault(tuple(g.nodes for g in way.clustering.groups), way)

    add(MIXTURE, labels)
    for name in (b.name.lower() for b in backends):
        add(name, _for_one(labels, name))
    return list(different.values())


def assign(
    ways: Sequence[Way],
    labels: Sequence[frozenset[str]],
    backends: Sequence[Backend],
    view: GraphView,
    losers: Mapping[str, tuple[int, ...]] = _NOBODY,
) -> list[Attempt]:
    """Every group of ``ways`` once, with its takers and why others do not try it.

    ``losers`` try no group but the one that is said of each, by its nodes.
    """
    made_for: dict[tuple[int, ...], list[str]] = {}
    for way in ways:
        for one in way.clustering.groups:
            made_for.setdefault(one.nodes, []).append(way.name)
    quick = {b.name.lower() for b in backends if getattr(b, "in_process", False)}
    groups = [_with_takers(nodes, labels) for nodes in made_for]
    willing = {
        g.nodes: frozenset(
            name
            for name in _willing(g, made_for[g.nodes], quick)
            if losers.get(name, g.nodes) == g.nodes
        )
        for g in groups
    }
    alike = _nearly_the_same(view, groups)
    attempts = []
    for one in groups:
        takers, reasons = set(willing[one.nodes]), []
        for name in sorted(willing[one.nodes]):
            others = [g for g in alike[one.nodes] if name in willing[g.nodes]]
            best = max([one, *others], key=lambda g: _preference(g, made_for[g.nodes], name))
            if best is not one:
                takers.discard(name)
                reasons.append(_not_tried(view, one, best, name))
        attempts.append(Attempt(one, frozenset(takers), tuple(reasons)))
    return attempts


def scouts(
    labels: Sequence[frozenset[str]], backends: Sequence[Backend], view: GraphView, min_size: int
) -> list[Attempt]:
    """For each backend the largest of the groups that it has in the graph that is cut for it."""
    takers: dict[tuple[int, ...], set[str]] = {}
    for name in (b.name.lower() for b in backends):
        every = group(view, _for_one(labels, name), min_size=min_size).groups
        groups = [g for g in every if name in g.label]
        if groups:
            takers.setdefault(max(groups, key=lambda g: len(g.nodes)).nodes, set()).add(name)
    return [
        Attempt(_with_takers(nodes, labels), frozenset(names)) for nodes, names in takers.items()
    ]


def _for_one(labels: Sequence[frozenset[str]], name: str) -> list[frozenset[str]]:
    """With this backend alone wherever it takes a node."""
    alone = frozenset({name})
    return [alone if name in label else label for label in labels]


def _with_takers(nodes: tuple[int, ...], labels: Sequence[frozenset[str]]) -> Group:
    """A group with all that take it, not only those that it was clustered for."""
    return Group(nodes, frozenset.intersection(*(labels[n] for n in nodes)))


def _willing(group: Group, made_for: Sequence[str], quick: Collection[str]) -> frozenset[str]:
    if MIXTURE in made_for:
        return group.label
    return group.label & frozenset(made_for) or group.label & frozenset(quick)


def _preference(
    group: Group, made_for: Sequence[str], name: str
) -> tuple[bool, int, tuple[int, ...]]:
    """What was cut for this very backend, then the larger one."""
    return name in made_for, len(group.nodes), group.nodes


def _nearly_the_same(
    view: GraphView, groups: Sequence[Group]
) -> dict[tuple[int, ...], list[Group]]:
    """For each group the others that have the same heavy ops and almost the same others."""
    heavy = {i for i, node in enumerate(view.nodes) if kind_of(node) in _HEAVY}
    sets = {g.nodes: frozenset(g.nodes) for g in groups}

    def is_near(a: frozenset[int], b: frozenset[int]) -> bool:
        rim = a ^ b
        few = len(rim) <= max(RIM * len(a | b), min(RIM_NODES, len(a & b) / 2))
        return few and not rim & heavy

    return {
        one.nodes: [g for g in groups if g is not one and is_near(sets[one.nodes], sets[g.nodes])]
        for one in groups
    }


def _not_tried(view: GraphView, one: Group, instead: Group, name: str) -> Reason:
    more, less = set(instead.nodes) - set(one.nodes), set(one.nodes) - set(instead.nodes)
    rim: Iterable[str] = sorted({kind_of(view.nodes[n]) for n in more | less})
    detail = (
        f"{name} tries nearly the same ops instead, {len(more)} more and {len(less)} fewer "
        f"({', '.join(rim)})."
    )
    subject = view.nodes[one.nodes[0]].name
    return Reason(Stage.CONVERT, Code.NOT_TRIED, name, subject, detail)
