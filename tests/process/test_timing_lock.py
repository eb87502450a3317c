# SPDX-License-Identifier: Apache-2.0
"""Nothing converts while something is timed, also where a conversion does the timing."""

import threading
from collections.abc import Callable

from blade.process.timing_lock import TimingLock

WAIT_S = 20.0


def started(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def is_waiting(turns: TimingLock) -> bool:
    return turns._waiting > 0


def until(condition: Callable[[], bool]) -> None:
    """Busy, for a few switches of threads."""
    event = threading.Event()
    for _ in range(int(WAIT_S / 0.001)):
        if condition():
            return
        event.wait(0.001)
    raise AssertionError("it never came to that")


def test_timing_waits_for_conversions_and_goes_before_new_ones() -> None:
    turns, may_end, order = TimingLock(), threading.Event(), list[str]()
    begun = threading.Event()

    def first() -> None:
        with turns.converting():
            begun.set()
            assert may_end.wait(WAIT_S)
            order.append("first conversion")

    def timing() -> None:
        with turns.timing():
            order.append("timing")

    def late() -> None:
        with turns.converting():
            order.append("late conversion")

    threads = [started(first)]
    assert begun.wait(WAIT_S)
    threads.append(started(timing))
    until(lambda: is_waiting(turns))
    threads.append(started(late))
    assert order == []
    may_end.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert order == ["first conversion", "timing", "late conversion"]


def test_a_conversion_may_time_and_is_then_alone() -> None:
    turns, order = TimingLock(), list[str]()
    both, other_may_end = threading.Barrier(2), threading.Event()

    def times() -> None:
        with turns.converting():
            both.wait(WAIT_S)
            with turns.timing():
                order.append("timing")
            order.append("converting again")

    def converts() -> None:
        with turns.converting():
            both.wait(WAIT_S)
            assert other_may_end.wait(WAIT_S)
            order.append("other conversion")

    threads = [started(times), started(converts)]
    until(lambda: is_waiting(turns))
    assert order == []
    other_may_end.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert order == ["other conversion", "timing", "converting again"]


def test_two_conversions_that_time_take_turns() -> None:
    turns, both = TimingLock(), threading.Barrier(2)
    alone, seen = threading.Lock(), list[bool]()

    def times() -> None:
        with turns.converting():
            both.wait(WAIT_S)
            with turns.timing():
                seen.append(alone.acquire(blocking=False))
                threading.Event().wait(0.01)
                alone.release()

    threads = [started(times), started(times)]
    for thread in threads:
        thread.join(WAIT_S)
    assert seen == [True, True]
    with turns.timing():
        assert not turns._converting
