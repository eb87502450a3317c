# SPDX-License-Identifier: Apache-2.0
"""Report the progress of ``optimize`` to a watcher; without one it costs nothing.

    with watched(print):                                   # the command line draws a bar
        announce("convert", 3, 12, "cluster_3")            # 3 of 12 are done, now cluster_3

A watcher is kept per thread and per asyncio task, like the active ``Config``.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """``done`` of ``total`` parts of ``stage`` are finished (0 of 0: unknown); ``what`` is next."""

    stage: str
    done: int = 0
    total: int = 0
    what: str = ""


Watcher = Callable[[Step], None]


def announce(stage: str, done: int = 0, total: int = 0, what: str = "") -> None:
    """Pass a ``Step`` to the watcher, if there is one."""
    if (watcher := _watcher.get()) is not None:
        watcher(Step(stage, done, total, what))


def is_watched() -> bool:
    """Whether there is a watcher, which may be drawing."""
    return _watcher.get() is not None


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Call ``watcher`` at every step inside the block, in the thread that does the work."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


_watcher: ContextVar[Watcher | None] = ContextVar("blade_progress", default=None)
