# SPDX-License-Identifier: Apache-2.0
"""A lock that keeps conversions, in this process or for it, from running during a measurement.

    with TIMING_LOCK.converting(): ...      # any number at once
    with TIMING_LOCK.timing(): ...          # alone; new conversions wait

A conversion may time something itself: meanwhile it does not count as converting.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class TimingLock:
    """A readers-writer lock that prefers the writer: timing precedes conversions that have not begun."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._converting: dict[int, int] = {}  # thread -> nesting depth
        self._waiting = 0
        self._timing = False

    @contextmanager
    def converting(self) -> Iterator[None]:
        mine = threading.get_ident()
        with self._changed:
            if mine not in self._converting:
                self._changed.wait_for(lambda: not self._timing and not self._waiting)
            self._converting[mine] = self._converting.get(mine, 0) + 1
        try:
            yield
        finally:
            with self._changed:
                self._converting[mine] -= 1
                if not self._converting[mine]:
                    del self._converting[mine]
                self._changed.notify_all()

    @contextmanager
    def timing(self) -> Iterator[None]:
        mine = threading.get_ident()
        with self._changed:
            mine_before = self._converting.pop(mine, 0)
            self._changed.notify_all()
            self._waiting += 1
            self._changed.wait_for(lambda: not self._timing and not self._converting)
            self._waiting -= 1
            self._timing = True
        try:
            yield
        finally:
            with self._changed:
                self._timing = False
                if mine_before:
                    self._converting[mine] = mine_before
                self._changed.notify_all()


TIMING_LOCK = TimingLock()
