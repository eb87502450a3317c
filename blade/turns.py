# SPDX-License-Identifier: Apache-2.0
"""Timing is done alone: nothing converts in this process, or for it, while something is timed.

    with TURNS.converting(): ...      # any number at once
    with TURNS.timing(): ...          # alone; conversions that want to begin wait

A conversion that has to time something may do so: until it is done it does not count as converting.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """Readers and a writer; whoever wants to time goes before conversions that have not begun."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._converting: dict[int, int] = {}  # by thread, how often it is inside
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


TURNS = Turns()
