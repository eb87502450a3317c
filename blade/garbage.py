# SPDX-License-Identifier: Apache-2.0
"""Python looks for garbage less often while a model is optimized.

    with rarely_collected():
        ...                        # makes millions of small objects that stay

Python looks after every few hundred new objects, and then, now and then, at all that torch and others hold: a tenth of
what ``optimize`` takes. Cycles that hold tensors are still found, later.
"""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

OBJECTS = 20_000
"""New objects after which Python looks."""

_lock = threading.Lock()
_inside = 0  # how many threads
_before = (0, 0, 0)


@contextmanager
def rarely_collected() -> Iterator[None]:
    """Thresholds that are 0 (never) or higher stay; what others set meanwhile does, too."""
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter() -> None:
    global _inside, _before
    with _lock:
        _inside += 1
        if _inside == 1:
            _before = gc.get_threshold()
            if 0 < _before[0] < OBJECTS:
                gc.set_threshold(OBJECTS, *_before[1:])


def _leave() -> None:
    global _inside
    with _lock:
        _inside -= 1
        if _inside == 0 and 0 < _before[0] < OBJECTS and gc.get_threshold()[0] == OBJECTS:
            gc.set_threshold(*_before)
