# SPDX-License-Identifier: Apache-2.0
"""How much memory this process and its children hold, watched from a thread; too much ends the process.

watch = Watch(limit_mb=4000)
watch.begin()           # what was held so far does not count
watch.peak_mb()
"""

import os
import threading
from pathlib import Path

EXCEEDED = 77  # the exit code
EVERY_S = 0.2


def held_mb(process: int) -> float:
    """Resident MiB of ``process`` and all below it that no file backs: libraries do not count.

    Of pages that a fork shares with others, each process has its part.
    """
    try:
        rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
    except OSError:
        return 0.0
    lines = dict(line.split(":", 1) for line in rollup.splitlines() if ":" in line)
    own = int(lines.get("Pss_Anon", "0 kB").split()[0]) / 1024
    return own + sum(map(held_mb, _children(process)))


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
