# SPDX-License-Identifier: Apache-2.0
"""Restore torch's global state.

with torch_state_kept():
    ...                 # traces, converts and measures
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def torch_state_kept() -> Iterator[None]:
    """Restore grad mode, inference mode, autocast, number of threads and random generators afterwards.

    Autocast is restored because it caches cast weights, which a trace would record as constants.
    """
    threads, keeps = torch.get_num_threads(), torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=devices), torch.inference_mode(False), torch.no_grad():
        try:
            yield
        finally:
            torch.set_autocast_cache_enabled(keeps)
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)
