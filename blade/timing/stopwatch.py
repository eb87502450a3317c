# SPDX-License-Identifier: Apache-2.0
"""A stopwatch: seconds spent in several blocks together, without the time between them.

spent = Stopwatch()
budget = TimeBudget(30.0, clock=spent)
with spent: ...                          # converts
with spent: ...                          # minutes later: verifies and measures
"""

import threading
from time import monotonic
from types import TracebackType


class Stopwatch:
    """A clock that runs while any thread is inside; calling it returns its seconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._before, self._since, self._inside = 0.0, 0.0, 0

    def __call__(self) -> float:
        with self._lock:
            return self._before + (monotonic() - self._since if self._inside else 0.0)

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._since = monotonic()
            self._inside += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._before += monotonic() - self._since
