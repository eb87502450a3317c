# SPDX-License-Identifier: Apache-2.0
"""Restore torch's global state.

with torch_state_kept():
    ...                 # traces, converts and measures
with seeded_generators(0):
    model(x)            # draws the same numbers each time
with generators_left_alone():
    ...                 # the two above touch no generator, which other threads draw from
"""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

_thread = threading.local()


@contextmanager
def torch_state_kept() -> Iterator[None]:
    """Restore grad mode, inference mode, autocast, number of threads and random generators afterwards.

    Autocast is restored because it caches cast weights, which a trace would record as constants.
    """
    threads, keeps = torch.get_num_threads(), torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    with _forked_generators(), torch.inference_mode(False), torch.no_grad():
        try:
            yield
        finally:
            torch.set_autocast_cache_enabled(keeps)
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)


@contextmanager
def seeded_generators(seed: int) -> Iterator[None]:
    """Seed all random generators, and restore them afterwards."""
    with _forked_generators():
        if not _are_left_alone():
            torch.manual_seed(seed)
        yield


@contextmanager
def generators_left_alone() -> Iterator[None]:
    """For work on this thread that draws no numbers: generators belong to the process, and what restores them takes
    the numbers back that other threads have drawn meanwhile."""
    before, _thread.leaves_alone = _are_left_alone(), True
    try:
        yield
    finally:
        _thread.leaves_alone = before


def _are_left_alone() -> bool:
    return bool(getattr(_thread, "leaves_alone", False))


def _forked_generators() -> AbstractContextManager[None]:
    if _are_left_alone():
        return nullcontext()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    return torch.random.fork_rng(devices=devices)
