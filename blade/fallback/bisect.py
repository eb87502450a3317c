# SPDX-License-Identifier: Apache-2.0
"""Find the node that makes a group fail, so that the rest of the group can be compiled.

    node, why = bisect(Failure("cluster_0", nodes, label, reason), build)
    built, culprits = build_without_culprits(labels, build_all, find_failures, find_node)

``build(name, nodes)`` returns why ``nodes`` fail, ``None`` if they work: ``blade.optimize`` builds verified
engines, ``torch.compile`` engines that convert, and ``python -m blade bisect`` compares values.

The search works as git's: it finds the shortest prefix of the group, in program order, that fails; its last
node is the culprit. A prefix of a convex group is convex, so each one can be compiled on its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from time import monotonic
from typing import TypeVar

from blade.core.reason import Reason

T = TypeVar("T")

MAX_CULPRITS = 4  # rounds of bisecting, one culprit per failing group each
BISECT_S = 60.0  # no new round after this many seconds of bisecting

Labels = list[frozenset[str]]
WhyFails = Callable[[Sequence[int]], Reason | None]
Build = Callable[[str, Sequence[int]], Reason | None]


@dataclass(frozen=True)
class Failure:
    """A group of nodes that fails for ``reason``; ``label`` names the backends that take all of it."""

    name: str
    nodes: Sequence[int]
    label: frozenset[str]
    reason: Reason


def find_culprit(nodes: Sequence[int], reason: Reason, why_fails: WhyFails) -> tuple[int, Reason]:
    """Return the last node of the shortest failing prefix of ``nodes``, and why that prefix fails.

    ``nodes`` as a whole fail with ``reason``. Calls ``why_fails`` at most log2(len(nodes)) times, rounded up.
    A failure that needs several nodes together blames the last of them.
    """
    assert nodes, reason
    works, fails = 0, len(nodes)
    while fails - works > 1:
        middle = (works + fails) // 2
        shorter = why_fails(nodes[:middle])
        if shorter is None:
            works = middle
        else:
            fails, reason = middle, shorter
    return nodes[fails - 1], reason


def bisect(failure: Failure, build: Build) -> tuple[int, Reason]:
    """Return the culprit of ``failure``, and why the prefix up to it fails; prefix names hold lengths."""
    return find_culprit(
        failure.nodes,
        failure.reason,
        lambda prefix: build(f"{failure.name}[:{len(prefix)}]", prefix),
    )


def build_without_culprits(
    labels: Sequence[frozenset[str]],
    build_all: Callable[[Labels], T],
    find_failures: Callable[[T], Sequence[Failure]],
    find_node: Callable[[Failure], tuple[int, Reason]],
    is_over: Callable[[], bool] = lambda: False,
) -> tuple[T, list[Reason]]:
    """Return ``build_all(labels)`` without the nodes that make groups fail, and their reasons.

    ``find_node`` returns the node of a failure and why it fails. That node loses the label of the backend
    that fails (of all backends, if the reason names none), and everything is built again. The search ends
    after ``MAX_CULPRITS`` nodes, ``BISECT_S`` seconds, or when ``is_over()``, which is asked before each node.
    """
    left = list(labels)
    culprits: list[Reason] = []
    spent = 0.0
    while True:
        built = build_all(left)
        failures = find_failures(built)
        if not failures or len(culprits) >= MAX_CULPRITS or spent > BISECT_S:
            return built, culprits
        start = monotonic()
        found = [find_node(one) for one in takewhile(lambda _: not is_over(), failures)]
        if not found:
            return built, culprits
        for failure, (node, why) in zip(failures, found, strict=False):
            left[node] -= failure.label if why.backend is None else {why.backend.lower()}
            culprits.append(why)
        spent += monotonic() - start


def blamed(failure: Failure, why: Reason, name: str) -> Reason:
    """Return ``why`` as the reason against the node called ``name``."""
    whole = failure.reason.detail
    other = "" if whole == why.detail else f" As a whole they fail so: {whole}"
    detail = f"{why.detail} (Found by bisecting {failure.name}, {len(failure.nodes)} ops.{other})"
    return replace(why, subject=name, detail=detail)
