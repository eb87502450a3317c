# SPDX-License-Identifier: Apache-2.0
"""Run the user's model beside busy neighbours with as many threads as there are free CPUs.

    with on_free_cpus():
        want = model(x)          # not to be timed

The threads of OpenMP wait for each other at every op. Where another process has the CPU of one of them, each op
takes as long as the scheduler lets that process run: BERT-base on two CPUs beside one busy process takes 1.7 s a
call with two threads and 0.3 s with one. What is timed runs with the threads that the user's own calls have.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import torch

from blade.timing.neighbours import NEIGHBOURS, Machine
from blade.timing.one_thread import at_most

DISTURBED = 0.25  # of a call's time, that its threads waited for a CPU
LONG_S = 5e-3  # of a call: shorter ones are not looked at
CALLS = 16  # with fewer threads, before all are tried again


@dataclass
class FreeCpus:
    """``fewer``: by how many threads the next ``left`` calls have less. Threads of a program share it: they share the
    CPUs."""

    machine: Machine
    fewer: int = 0
    left: int = 0
    is_long: bool = False

    @contextmanager
    def use(self) -> Iterator[int]:
        """Yield the number of threads of the block, and look at how far it was disturbed."""
        if self.left == 0:
            self.fewer = 0
        threads = max(1, torch.get_num_threads() - self.fewer)
        mark = self.machine.mark() if self.is_long and threads > 1 else None
        start = perf_counter()
        with at_most(threads):
            yield threads
        self.is_long = perf_counter() - start >= LONG_S
        self.left = max(0, self.left - 1)
        if mark is None or not self.is_long:
            return
        taken, _ = self.machine.since(mark)
        if taken >= DISTURBED:
            self.fewer, self.left = self.fewer + math.ceil(taken), CALLS


_here = FreeCpus(NEIGHBOURS)
on_free_cpus = _here.use
