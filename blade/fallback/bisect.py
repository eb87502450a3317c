# SPDX-License-Identifier: Apache-2.0
"""Find the node that makes a group fail, so that it does not cost the rest.

    node, why = find_culprit(group, reason, why_fails)
    result, culprits = without_culprits(labels, build, blame)

The search is git's: the shortest prefix of the group, in program order, that fails; its last node is
the culprit. A prefix of a convex group is convex, so each one can be compiled on its own.
"""

from collections.abc import Callable, Sequence
from time import monotonic
from typing import TypeVar

from blade.reason import Reason

MAX_CULPRITS = 4  # rounds of bisecting, one culprit per failing group each
BISECT_S = 60.0  # no new round after this many seconds of bisecting

Labels = list[frozenset[str]]
WhyFails = Callable[[Sequence[int]], Reason | None]
Result = TypeVar("Result")
Failure = TypeVar("Failure")


def without_culprits(
    labels: Sequence[frozenset[str]],
    build: Callable[[Labels], tuple[Result, Sequence[Failure]]],
    blame: Callable[[Failure], tuple[int, Reason]],
    has_time: Callable[[], bool] = lambda: True,
) -> tuple[Result, list[Reason]]:
    """``build`` until nothing fails: each failure costs a node its label, and the rest is tried again.

    ``build(labels)`` gives a result and what failed in it; ``blame`` the node of a failure, and why. That node
    stays where it is, or loses the one backend that the reason names. Ends early after ``MAX_CULPRITS``,
    ``BISECT_S`` or where ``has_time`` says so, with the last result, failures and all.
    """
    left = list(labels)
    culprits: list[Reason] = []
    spent = 0.0
    while True:
        result, failures = build(left)
        if not failures or spent > BISECT_S or len(culprits) >= MAX_CULPRITS or not has_time():
            return result, culprits
        start = monotonic()
        for failure in failures:
            node, why = blame(failure)
            left[node] = frozenset() if why.backend is None else left[node] - {why.backend.lower()}
            culprits.append(why)
        spent += monotonic() - start


def find_culprit(nodes: Sequence[int], reason: Reason, why_fails: WhyFails) -> tuple[int, Reason]:
    """The last node of the shortest failing prefix of ``nodes``, and why that prefix fails.

    ``nodes`` as a whole fail with ``reason``. Calls ``why_fails`` at most log2(len(nodes)) times,
    rounded up. A failure that needs several nodes together blames the last of them.
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
