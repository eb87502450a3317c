# SPDX-License-Identifier: Apache-2.0
"""The reports of the graphs that were compiled in this process, oldest first."""

import threading
from collections import deque
from collections.abc import Callable

from blade.report import Report

KEPT = 256

_lock = threading.Lock()
_made: deque[Callable[[], Report]] = deque(maxlen=KEPT)


def reports() -> list[Report]:
    """One per graph that ``torch.compile`` handed to blade: forward and backward are two. The last 256 are kept.

    What a graph's engines do is known after its first call: until then they are not verified.
    """
    with _lock:
        made = list(_made)
    return [make() for make in made]


def add(make: Callable[[], Report]) -> None:
    with _lock:
        _made.append(make)
