# SPDX-License-Identifier: Apache-2.0
"""Timing is done alone: nothing converts in this process, or for it, while something is timed.

    with TURNS.converting(): ...      # any number at once
    with TURNS.timing(): ...          # alone; conversions that want to begin wait

Neither may be entered inside the other, or again by a thread that is in one of them.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """Readers and a writer; whoever wants to time goes before conversions that have not begun."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._converting = 0
        self._waiting = 0
        self._timing = False

    @contextmanager
    def converting(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._timing and not self._waiting)
            self._converting += 1
        try:
            yield
        finally:
            with self._changed:
                self._converting -= 1
                self._changed.notify_all()

    @contextmanager
    def timing(self) -> Iterator[None]:
        with self._changed:
            self._waiting += 1
            self._changed.wait_for(lambda: not self._timing and not self._converting)
            self._waiting -= 1
            self._timing = True
        try:
            yield
        finally:
            with self._changed:
                self._timing = False
                self._changed.notify_all()


TURNS = Turns()
