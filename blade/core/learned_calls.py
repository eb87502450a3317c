# SPDX-License-Identifier: Apache-2.0
"""How many calls were answered by paths that were captured after the module was made, by the original's number.

count(number, 1)
calls_of(number)      # 1
"""

import threading
from collections import Counter

_calls: Counter[int] = Counter()
_lock = threading.RLock()  # ``forget`` runs wherever an object dies


def count(number: int, calls: int) -> None:
    """Add ``calls`` (below 0: what was counted too early)."""
    with _lock:
        _calls[number] += calls


def calls_of(number: int) -> int:
    """The calls counted for ``number``."""
    with _lock:
        return _calls.get(number, 0)


def forget(number: int) -> None:
    """Drop the count of ``number``."""
    with _lock:
        _calls.pop(number, None)
