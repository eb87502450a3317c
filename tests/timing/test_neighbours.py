# SPDX-License-Identifier: Apache-2.0
"""neighbours: what the files below /proc say, and what is known without them."""

import os
from pathlib import Path

import pytest
import torch
from fake_clock import Clock

from blade.timing.interleaved import MORE, PATIENCE, measure
from blade.timing.neighbours import SWITCH_S, Mark, Neighbours

X = (torch.ones(2, 3),)


def proc(tmp_path: Path, waited: dict[int, str], steal: int = 0) -> Path:
    for thread, text in waited.items():
        folder = tmp_path / f"self/task/{thread}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "schedstat").write_text(text)
    (tmp_path / "stat").write_text(f"cpu  1 2 3 4 5 6 7 {steal} 0 0\ncpu0 1\n")
    return tmp_path


def test_threads_that_wait_and_stolen_time_count_and_short_switches_do_not(tmp_path: Path) -> None:
    machine = Neighbours(proc(tmp_path, {1: "5 100 1", 2: "5 100 1"}))
    mark = machine.mark()
    switches = 1000
    own = int(1e9 * SWITCH_S * switches)  # the waiting of threads that take turns
    proc(tmp_path, {1: f"9 {100 + own} {1 + switches}", 2: "9 100 1"})
    assert machine.since(mark)[0] == pytest.approx(0, abs=1e-6)
    proc(tmp_path, {1: "9 100 1", 2: f"9 {10**12} 2"})
    assert machine.since(mark)[0] > 1
    proc(tmp_path, {1: "9 100 1", 2: "9 100 1"}, steal=10**6)
    assert machine.since(mark)[0] > 1


def test_without_the_files_cpu_time_and_the_loop_are_left(tmp_path: Path) -> None:
    machine = Neighbours(tmp_path / "nothing")
    mark = machine.mark()
    sum(range(10**6))
    taken, busy = machine.since(mark)
    assert taken == 0 and busy > 0
    assert machine.slowdown() == 1.0 and machine.slowdown() >= 1.0
    assert isinstance(machine.describe(), str)


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="no schedstat")
def test_this_machine_tells_something() -> None:
    machine = Neighbours()
    mark = machine.mark()
    assert str(os.getpid()) in mark.waited
    assert machine.since(mark)[0] >= 0


class Disturbed:
    """Takes half of the first ``rounds`` rounds, of two turns each."""

    def __init__(self, rounds: int) -> None:
        self.left = 2 * rounds

    def mark(self) -> Mark:
        return Mark(0.0, 0.0, 0.0, {})

    def since(self, mark: Mark) -> tuple[float, float]:
        self.left -= 1
        return (0.5 if self.left >= 0 else 0.0), 1.0

    def slowdown(self) -> float:
        return 1.0


def test_disturbed_rounds_are_repeated_and_do_not_count() -> None:
    clock = Clock()
    engine = clock.costs(*[0.010] * 4, *[0.2] * 12, *[0.010] * 9999)  # four calls warm it up
    t = measure(engine, clock.costs(0.020), X, 15, clock, machine=Disturbed(6))
    assert t.disturbed == 6 and t.rounds >= 6 + 5
    assert t.speedup == pytest.approx(2.0) and t.low == pytest.approx(2.0)


def test_on_a_machine_that_is_never_quiet_rounds_end_with_the_budget() -> None:
    clock = Clock()
    times = (0.001, 0.004, 0.001, 0.0025, 0.0017)
    t = measure(clock.costs(*times), clock.costs(0.0018), X, 15, clock, machine=Disturbed(10**6))
    assert t.disturbed == t.rounds <= PATIENCE * MORE * 15
    assert t.low < 1.8 < t.high * 1.2
