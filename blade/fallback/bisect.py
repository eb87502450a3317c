# SPDX-License-Identifier: Apache-2.0
"""Find the node that makes a group fail, so that it does not cost the rest.

    node, why = find_culprit(group, reason, why_fails)

The search is git's: the shortest prefix of the group, in program order, that fails; its last node is
the culprit. A prefix of a convex group is convex, so each one can be compiled on its own.
"""

from collections.abc import Callable, Sequence

from blade.reason import Reason

WhyFails = Callable[[Sequence[int]], Reason | None]


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
