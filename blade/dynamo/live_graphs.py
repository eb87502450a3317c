# SPDX-License-Identifier: Apache-2.0
"""The graphs of ``torch.compile`` that blade compiled and that are still alive, oldest first."""

import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from blade.report import Report
    from blade.runtime.engine import Engine


class LiveGraph(Protocol):
    """A graph that was compiled here, or elsewhere and loaded."""

    @property
    def name(self) -> str: ...
    def report(self) -> "Report": ...
    def engines(self) -> "Mapping[str, Engine]": ...


_lock = threading.Lock()
_made: list["weakref.ref[LiveGraph]"] = []


def reports() -> list["Report"]:
    """One report per graph: forward and backward are two graphs.

    A graph's engines are verified and selected at its first call; before it the report lacks these results.
    """
    return [graph.report() for graph in live_graphs()]


def stats() -> dict[str, dict[str, int]]:
    """Run-time counters per engine, in the form of ``blade.stats``."""
    return {name: counts for graph in live_graphs() for name, counts in stats_of(graph).items()}


def stats_of(graph: LiveGraph) -> dict[str, dict[str, int]]:
    """The same of one graph."""
    return {name: dict(engine.stats()) for name, engine in graph.engines().items()}


def trim_others(name: str) -> None:
    """Free what engines keep between calls, but for those of the graph that ``name`` is of, forward and backward; they
    take it again at their next call.

    A graph of other sizes takes the place of one that Dynamo may never call again, and needs as much.
    """
    own = name.split(".")[0]
    for graph in live_graphs():
        if graph.name.split(".")[0] != own:
            for engine in graph.engines().values():
                engine.trim()


def track(graph: LiveGraph) -> None:
    """Remember ``graph`` as long as it is alive."""
    with _lock:
        _made.append(weakref.ref(graph, _remove))


def _remove(ref: "weakref.ref[LiveGraph]") -> None:
    with suppress(ValueError):  # forgotten
        _made.remove(ref)


def forget(graph: LiveGraph) -> None:
    """Another graph takes its place."""
    with _lock:
        _made[:] = [ref for ref in _made if ref() is not graph]


def live_graphs() -> list[LiveGraph]:
    """The graphs that are still alive."""
    with _lock:
        found = [ref() for ref in _made]
    return [graph for graph in found if graph is not None]
