# SPDX-License-Identifier: Apache-2.0
"""What else runs on the machine while something is timed: how much of a span other processes took.

    mark = NEIGHBOURS.mark()
    ...                                              # what is timed
    taken, busy = NEIGHBOURS.since(mark)             # 0.4: threads waited for 40 % of the span; 1.97 CPUs busy
    NEIGHBOURS.slowdown()                            # 1.0; 1.5 if a fixed loop takes half as long again

On Linux the scheduler tells how long threads of this process waited for a CPU (``schedstat``), and the
hypervisor what it stole (``/proc/stat``). Elsewhere, and in containers that hide these files, CPU time per wall
time and the loop remain.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Protocol

MOST_THREADS = 64  # of this process that are asked how long they waited
SWITCH_S = (
    5e-6  # seconds of waiting per switch between threads of this process that are no neighbour's
)
LOOP = 2000  # steps of the calibrated loop: about 50 us
LOOPS = 3  # of which the fastest counts
PROC = Path("/proc")


@dataclass(frozen=True)
class Mark:
    """Seconds at the beginning of a span: by the wall clock, of CPU time, and stolen; and those that each thread
    has waited for a CPU."""

    wall: float
    cpu: float
    stolen: float
    waited: Mapping[str, float]


class Machine(Protocol):
    """What ``measure`` asks about the machine; tests have machines of their own."""

    def mark(self) -> Mark: ...

    def since(self, mark: Mark) -> tuple[float, float]:
        """Return the share of the span that others took, and the CPU seconds per second of this process."""

    def slowdown(self) -> float:
        """Return how many times as long as at its fastest a fixed loop takes now."""


class Neighbours:
    """The machine that this process runs on, by what the operating system tells."""

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._fastest = float("inf")

    def mark(self) -> Mark:
        waited, stolen = self._waited(), self._stolen()
        return Mark(perf_counter(), process_time(), stolen, waited)

    def since(self, mark: Mark) -> tuple[float, float]:
        cpu, wall = process_time() - mark.cpu, max(perf_counter() - mark.wall, 1e-9)
        lost = max(self._stolen() - mark.stolen, 0.0)
        for thread, waited in self._waited().items():
            lost += max(waited - mark.waited.get(thread, waited), 0.0)
        return lost / wall, cpu / wall

    def slowdown(self) -> float:
        now = min(_loop_s() for _ in range(LOOPS))
        self._fastest = min(self._fastest, now)
        return now / self._fastest

    def describe(self) -> str:
        """``load 1.9, 12 % of the last 10 s some task waited for a CPU``; "" where nothing is known."""
        parts = []
        with suppress(OSError, AttributeError):
            parts.append(f"load {os.getloadavg()[0]:.1f}")
        with suppress(OSError, ValueError, IndexError):
            words = (self._proc / "pressure/cpu").read_text().split()
            share = float(words[1].removeprefix("avg10="))
            parts.append(f"{share:.0f} % of the last 10 s some task waited for a CPU")
        return ", ".join(parts)

    def _waited(self) -> dict[str, float]:
        """Seconds that each thread of this process was ready to run and had no CPU, less what switches take."""
        found: dict[str, float] = {}
        with suppress(OSError):
            for name in os.listdir(self._proc / "self/task")[:MOST_THREADS]:
                with suppress(OSError, ValueError):  # a thread may have ended
                    text = (self._proc / f"self/task/{name}/schedstat").read_text()
                    _, waited, switches = map(int, text.split())
                    found[name] = 1e-9 * waited - SWITCH_S * switches
        return found

    def _stolen(self) -> float:
        """Seconds per CPU that the hypervisor gave to other machines; 0 if that is unknown."""
        with suppress(OSError, ValueError, IndexError):
            with open(self._proc / "stat") as file:
                ticks = int(file.readline().split()[8])
            return ticks / os.sysconf("SC_CLK_TCK") / (os.cpu_count() or 1)
        return 0.0


def _loop_s() -> float:
    start = perf_counter()
    total = 0
    for i in range(LOOP):
        total += i
    return perf_counter() - start


class Quiet:
    """A machine without neighbours, for clocks that are not the host's."""

    def mark(self) -> Mark:
        return Mark(0.0, 0.0, 0.0, {})

    def since(self, mark: Mark) -> tuple[float, float]:
        return 0.0, 0.0

    def slowdown(self) -> float:
        return 1.0


NEIGHBOURS = Neighbours()
QUIET = Quiet()
