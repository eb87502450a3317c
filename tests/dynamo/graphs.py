# SPDX-License-Identifier: Apache-2.0
"""The graphs that the running test compiled."""

from typing import TYPE_CHECKING

from blade.dynamo import live_graphs as kept
from blade.report import Report

if TYPE_CHECKING:
    from blade.dynamo.compile_graph import CompiledGraph

_earlier: set[str] = set()


def forget() -> None:
    _earlier.update(graph.name for graph in kept.live_graphs())


def made() -> "list[CompiledGraph]":
    return [graph for graph in kept.live_graphs() if graph.name not in _earlier]


def reports() -> list[Report]:
    return [graph.report() for graph in made()]


def served() -> dict[str, str]:
    """Cluster -> who serves it."""
    return {c.name: c.backend for r in reports() for c in r.clusters}


def stats() -> dict[str, dict[str, int]]:
    return {name: counts for graph in made() for name, counts in kept.stats_of(graph).items()}
