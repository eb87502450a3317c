# SPDX-License-Identifier: Apache-2.0
"""Real calls decide between a graph with engines and the user's own, where that one writes in place.

Engines are timed against the functional form, which copies a whole tensor for each write to a part of it. The user's
graph does not, and may be faster than both. To run it for its time alone would write twice, so the first calls are
served by the two in turns, and the faster one serves from then on.
"""

import threading
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
from torch.fx import Graph

from blade.config import Config
from blade.core.reason import Code, Reason, Stage

Fn = Callable[..., Any]
aten = torch.ops.aten
_WRITES = frozenset(
    (
        *(aten.copy_.default, aten.copy.default, aten.slice_scatter.default),
        *(aten.select_scatter.default, aten.diagonal_scatter.default),
        *(aten.as_strided_scatter.default, aten.index_put.default, aten.index_copy.default),
    )
)
ROUNDS = 3  # calls of each
PATIENCE = 24  # calls after which engines serve, if sizes never stay the same for so many
MARGIN = 1.1  # the user's graph has to be faster by this factor


def is_decided_by_calls(functional: Graph, config: Config) -> bool:
    """Whether ``functional`` has what writes in place become, and ``config`` has engines timed."""
    return config.timing and any(node.target in _WRITES for node in functional.nodes)


class InTurns:
    """``compiled`` and ``original`` in turns, then the faster one; ``yield_to`` hears of it if that is ``original``."""

    def __init__(self, compiled: Fn, original: Fn, yield_to: Callable[[Reason], None]) -> None:
        self._sides = (compiled, original)
        self._yield_to = yield_to
        self._lock = threading.Lock()
        self._chosen: Fn | None = None
        self._left = PATIENCE
        self._sizes: object = None
        self._seconds: tuple[list[float], list[float]] = ([], [])

    def __call__(self, *args: Any) -> Any:
        if self._chosen is not None:
            return self._chosen(*args)
        sizes = _sizes_of(args)
        with self._lock:
            if sizes != self._sizes:
                self._sizes, self._seconds = sizes, ([], [])
            seconds = self._seconds
            which = len(seconds[0]) > len(seconds[1])
        devices = {one.device for one in args if isinstance(one, torch.Tensor) and one.is_cuda}
        _wait_for(devices)
        start = perf_counter()
        answer = self._sides[which](*args)
        _wait_for(devices)
        spent = perf_counter() - start
        with self._lock:
            seconds[which].append(spent)
            self._left -= 1
            self._decide(seconds)
        return answer

    def _decide(self, seconds: Sequence[list[float]]) -> None:
        compiled, original = self._sides
        if self._chosen is not None:
            return
        if min(map(len, seconds)) >= ROUNDS:
            ours, theirs = map(min, seconds)
            is_lost = theirs * MARGIN < ours
            self._chosen = original if is_lost else compiled
            if is_lost:
                self._yield_to(_slower(ours, theirs))
        elif self._left <= 0:
            self._chosen = compiled


def _slower(ours: float, theirs: float) -> Reason:
    detail = f"A call took {1e3 * ours:.3g} ms, and {1e3 * theirs:.3g} ms by your own graph, which writes in place."
    return Reason(Stage.SELECT, Code.SLOWER, None, "graph", detail)


def _sizes_of(args: Sequence[Any]) -> object:
    """Of tensors alone: a position in a cache changes with each call."""
    return tuple(one.shape for one in args if isinstance(one, torch.Tensor))


def _wait_for(devices: set[torch.device]) -> None:
    for device in devices:
        torch.cuda.synchronize(device)
