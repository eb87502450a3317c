# SPDX-License-Identifier: Apache-2.0
"""A process-wide setting that holds while any thread is inside a block.

switch = SharedSwitch(turn_off, turn_on)
with switch:                     # the first to enter calls turn_off, the last to leave turn_on with its result
    ...
"""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class SharedSwitch(Generic[T]):
    """A context manager that several threads may enter at once, also nested."""

    def __init__(self, begin: Callable[[], T], end: Callable[[T], None]) -> None:
        self._begin, self._end = begin, end
        self._lock = threading.Lock()
        self._began: list[T] = []
        self._inside = 0

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._began = [self._begin()]
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._end(self._began.pop())
