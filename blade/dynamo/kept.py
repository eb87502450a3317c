# SPDX-License-Identifier: Apache-2.0
"""The graphs that ``torch.compile`` handed to blade and that are still in use, oldest first."""

import threading
import weakref
from typing import TYPE_CHECKING

from blade.report import Report

if TYPE_CHECKING:
    from blade.dynamo.graph import CompiledGraph

_lock = threading.Lock()
_made: list["weakref.ref[CompiledGraph]"] = []


def reports() -> list[Report]:
    """One per graph: forward and backward are two.

    What a graph's engines do is known after its first call: until then they are not verified.
    """
    return [graph.report() for graph in alive()]


def stats() -> dict[str, dict[str, int]]:
    """Run-time counters per engine, as ``blade.stats`` tells them of an optimized module."""
    return {name: counts for graph in alive() for name, counts in graph.stats().items()}


def keep(graph: "CompiledGraph") -> None:
    """Remember ``graph`` as long as somebody can call it."""
    with _lock:
        _made.append(weakref.ref(graph, _made.remove))


def alive() -> list["CompiledGraph"]:
    """Those that somebody can still call."""
    with _lock:
        found = [ref() for ref in _made]
    return [graph for graph in found if graph is not None]
