# SPDX-License-Identifier: Apache-2.0
"""A random graph whose labels are sets of strings, and its groups; a process of its own computes them, too."""

from random import Random

from blade.clustering import Problem, cluster


def labelled() -> list[tuple[int, ...]]:
    """The nodes of each group."""
    r = Random(7)
    names = [frozenset(), frozenset({"x"}), frozenset({"x", "yy"}), frozenset({"zzz", "x"})]
    labels = [r.choice(names) for _ in range(300)]
    edges = [(r.randrange(v), v, r.randrange(4)) for v in range(1, 300) for _ in range(2)]
    return [tuple(group.nodes) for group in cluster(Problem(labels, edges)).groups]
