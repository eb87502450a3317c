# SPDX-License-Identifier: Apache-2.0
"""How much memory this process and its children hold, watched from a thread; too much ends the process.

watch = Watch(limit_mb=4000)
watch.begin()           # what was held so far does not count
watch.peak_mb()
"""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

EXCEEDED = 77  # the exit code
EVERY_S = 0.2


def held_mb(process: int) -> float:
    """Resident MiB of ``process`` and all below it that no file backs: libraries do not count.

    Of pages that a fork shares with others, each process has its part. To look for these takes 7 ms per GiB, which a
    process that is timed alone does not pay.
    """
    below = list(_descendants(process))
    if not below:
        return _number_of(process, "status", "RssAnon")
    return sum(_number_of(one, "smaps_rollup", "Pss_Anon") for one in (process, *below))


def _number_of(process: int, file: str, name: str) -> float:
    """MiB that a file of ``/proc`` tells; 0 if the process is gone."""
    try:
        text = Path(f"/proc/{process}/{file}").read_text()
    except OSError:
        return 0.0
    lines = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return int(lines.get(name, "0 kB").split()[0]) / 1024


def _descendants(process: int) -> Iterator[int]:
    for child in _children(process):
        yield child
        yield from _descendants(child)


def _children(process: int) -> list[int]:
    found: list[int] = []
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        try:
            found += map(int, path.read_text().split())
        except OSError:
            continue
    return found


class Watch:
    """``before_mb``: what was held when it began."""

    def __init__(self, limit_mb: float) -> None:
        self._limit, self._most, self.before_mb = limit_mb, 0.0, 0.0
        self._ended = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def begin(self) -> None:
        self.before_mb = self._most = held_mb(os.getpid())

    def peak_mb(self) -> float:
        self._look()
        return self._most - self.before_mb

    def _look(self) -> None:
        self._most = max(self._most, held_mb(os.getpid()))

    def _watch(self) -> None:
        while not self._ended.wait(EVERY_S):
            self._look()
            if self._most > self._limit:
                os._exit(EXCEEDED)
