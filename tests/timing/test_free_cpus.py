# SPDX-License-Identifier: Apache-2.0
"""on_free_cpus: calls beside neighbours run with fewer threads, and torch's setting stays."""

from collections.abc import Iterator

import pytest
import torch
from fake_clock import Clock

from blade.timing import free_cpus
from blade.timing.free_cpus import CALLS, LONG_S, FreeCpus
from blade.timing.neighbours import Quiet
from blade.timing.one_thread import at_most


class Crowded(Quiet):
    """Others take so many of its CPUs."""

    taken = 0.0
    marks = 0

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def mark(self):
        self.marks += 1
        return super().mark()

    def since(self, mark):
        return self.taken, 1.0


@pytest.fixture
def cpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[FreeCpus]:
    clock = Clock()  # on a busy machine a short call may take long
    monkeypatch.setattr(free_cpus, "perf_counter", clock)
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    yield FreeCpus(Crowded(clock))
    assert torch.get_num_threads() == 8
    torch.set_num_threads(before)


def _threads(cpus: FreeCpus, calls: int = 1, seconds: float = 2 * LONG_S) -> list[int]:
    """Of each of so many calls, as the block and torch have it."""
    found = []
    for _ in range(calls):
        with cpus.use() as threads:
            assert torch.get_num_threads() == threads
            found.append(threads)
            cpus.machine.clock.now += seconds
    return found


def test_a_quiet_machine_gives_all_threads(cpus: FreeCpus) -> None:
    assert _threads(cpus, 5) == [8] * 5


def test_a_neighbour_takes_a_thread_until_all_are_tried_again(cpus: FreeCpus) -> None:
    cpus.machine.taken = 0.9
    assert _threads(cpus, 2) == [8, 8]  # the first tells that calls are long
    cpus.machine.taken = 0.1
    assert _threads(cpus, CALLS) == [7] * CALLS
    assert _threads(cpus, 2) == [8, 8]


def test_more_neighbours_take_more_but_one(cpus: FreeCpus) -> None:
    cpus.machine.taken = 2.5
    assert _threads(cpus, 6) == [8, 8, 5, 2, 1, 1]


def test_short_calls_are_not_looked_at(cpus: FreeCpus) -> None:
    cpus.machine.taken = 5.0
    assert _threads(cpus, 5, seconds=0) == [8] * 5
    assert cpus.machine.marks == 0


def test_an_exception_passes_and_threads_come_back(cpus: FreeCpus) -> None:
    with pytest.raises(KeyError), cpus.use():
        raise KeyError


def test_at_most_never_adds_threads(cpus: FreeCpus) -> None:
    with at_most(16) as is_fewer:
        assert not is_fewer and torch.get_num_threads() == 8
    with at_most(3) as is_fewer:
        assert is_fewer and torch.get_num_threads() == 3
