# SPDX-License-Identifier: Apache-2.0
"""Python's thresholds while a model is optimized, and after."""

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import blade
from blade.process.gc_pause import GC_THRESHOLD, relaxed_gc


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[tuple[int, int, int]]:
    before = gc.get_threshold()
    gc.set_threshold(700, 9, 8)
    yield gc.get_threshold()
    gc.set_threshold(*before)


def test_they_come_back_after_optimize_and_where_it_raises() -> None:
    seen: list[int] = []

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(gc.get_threshold()[0])
            return x + 1

    blade.optimize(Model().eval(), torch.ones(3))
    assert set(seen) == {GC_THRESHOLD} and gc.get_threshold() == (700, 9, 8)
    with pytest.raises(blade.InputError):
        blade.optimize(Model().train(), torch.ones(3))
    assert gc.get_threshold() == (700, 9, 8)


def test_of_several_threads_the_last_one_brings_them_back() -> None:
    first, second, done = threading.Event(), threading.Event(), threading.Event()

    def other() -> None:
        with relaxed_gc():
            first.set()
            assert second.wait(10)
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    assert first.wait(10)
    with relaxed_gc():
        second.set()
        assert done.wait(10)
        assert gc.get_threshold() == (GC_THRESHOLD, 9, 8)
    thread.join()
    assert gc.get_threshold() == (700, 9, 8)


@pytest.mark.parametrize("least", [0, 2 * GC_THRESHOLD])
def test_who_collects_as_rarely_is_left_alone(least: int) -> None:
    gc.set_threshold(least, 9, 8)
    with relaxed_gc():
        assert gc.get_threshold() == (least, 9, 8)
    assert gc.get_threshold() == (least, 9, 8)


def test_what_others_set_meanwhile_stays() -> None:
    with relaxed_gc():
        gc.set_threshold(50, 9, 8)
    assert gc.get_threshold() == (50, 9, 8)


def test_cycles_are_still_found() -> None:
    class Node:
        def __init__(self) -> None:
            self.me = self

    with relaxed_gc():
        found = weakref.ref(Node())
        kept = [[k] for k in range(3 * GC_THRESHOLD)]
        assert found() is None and len(kept) == 3 * GC_THRESHOLD


def test_what_was_there_before_is_not_scanned() -> None:
    with relaxed_gc(), relaxed_gc():
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0


def test_what_others_froze_stays_frozen() -> None:
    gc.freeze()
    try:
        with relaxed_gc():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
