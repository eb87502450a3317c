# SPDX-License-Identifier: Apache-2.0
"""Make Python's garbage collection rarer and shorter while a model is optimized.

    with relaxed_gc():
        ...                        # makes millions of small long-lived objects

By default Python collects after every few hundred new objects and, less often, scans all objects, those of
torch included: a tenth of the time of ``optimize``. Objects that are there before are not scanned inside
(``gc.freeze``). Cycles that hold tensors are still found, but later.
"""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

GC_THRESHOLD = 20_000
"""New objects per collection."""

_lock = threading.Lock()
_inside = 0  # number of threads in ``relaxed_gc``
_before = (0, 0, 0)
_froze = False


@contextmanager
def relaxed_gc() -> Iterator[None]:
    """Raise the threshold; it stays if it is 0 (never), already higher, or changed by others meanwhile.

    Nothing is frozen where others have frozen objects: these could not be told apart afterwards.
    """
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter() -> None:
    global _inside, _before, _froze
    with _lock:
        _inside += 1
        if _inside == 1:
            _froze = gc.get_freeze_count() == 0
            if _froze:
                gc.freeze()
            _before = gc.get_threshold()
            if 0 < _before[0] < GC_THRESHOLD:
                gc.set_threshold(GC_THRESHOLD, *_before[1:])


def _leave() -> None:
    global _inside
    with _lock:
        _inside -= 1
        if _inside == 0 and _froze:
            gc.unfreeze()
        if _inside == 0 and 0 < _before[0] < GC_THRESHOLD and gc.get_threshold()[0] == GC_THRESHOLD:
            gc.set_threshold(*_before)
