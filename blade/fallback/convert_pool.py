# SPDX-License-Identifier: Apache-2.0
"""Run several conversions at once: each thread here waits for a converting process (``isolated_convert``).

    with ConvertPool(size_of_pool(config)) as pool:
        futures = [pool.submit(convert, cluster) for cluster in clusters]
        results = [future.result() for future in futures]

The threads are daemons. ``concurrent.futures`` has none: its threads are joined when the interpreter exits,
and a conversion may take minutes.
"""

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Generic, TypeVar

from blade.config import Config
from blade.core.attempt import attempt
from blade.core.reason import Reason, Stage
from blade.errors import ConfigError, InputError

T = TypeVar("T")
MIB_EACH = 2048  # MiB assumed per conversion


def size_of_pool(config: Config) -> int:
    """Return one conversion per core, limited by free memory; at least one."""
    cores = len(os.sched_getaffinity(0))
    each = MIB_EACH if config.conversion_memory_mb is None else config.conversion_memory_mb
    free = _free_mib()
    return max(1, cores if free is None else min(cores, free // each))


class ConvertPool(Generic[T]):
    """``size`` threads, started on demand. Leaving the block drops conversions that have not begun."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._waiting: queue.SimpleQueue[tuple[Future[T | Reason], Callable[[], T]] | None] = (
            queue.SimpleQueue()
        )
        self._threads: list[threading.Thread] = []

    def submit(self, fn: Callable[..., T], *args: Any) -> Future[T | Reason]:
        """Run ``fn(*args)`` in one of the threads, in the order of submission; an exception becomes a Reason,
        except those that ``attempt`` lets pass."""
        future: Future[T | Reason] = Future()
        self._waiting.put((future, lambda: fn(*args)))
        if len(self._threads) < self._size:
            thread = threading.Thread(target=self._serve, name="blade-convert", daemon=True)
            self._threads.append(thread)
            thread.start()
        return future

    def __enter__(self) -> "ConvertPool[T]":
        return self

    def __exit__(self, *error: object) -> None:
        while not self._waiting.empty():
            if (item := self._waiting.get()) is not None:
                item[0].cancel()
        for _ in self._threads:
            self._waiting.put(None)

    def _serve(self) -> None:
        while (item := self._waiting.get()) is not None:
            future, work = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(attempt(Stage.CONVERT, None, "a conversion", work))
            except (ConfigError, InputError) as error:  # raised again by ``Future.result``
                future.set_exception(error)


def _free_mib() -> int | None:
    """Return the memory available without swapping, in MiB; ``None`` if the system does not report it."""
    info = Path("/proc/meminfo")
    lines = info.read_text().splitlines() if info.exists() else []
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) >> 10 if found else None
