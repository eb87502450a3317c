# SPDX-License-Identifier: Apache-2.0
"""Gives memory that nobody uses back to the system: that of trials, which took several times the model's."""

import ctypes
import gc
from collections.abc import Iterable

import torch


def give_memory_back() -> None:
    """Collect young cycles, then empty torch's cache of GPU memory and the free part of glibc's heap."""
    gc.collect(1)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)


def free_unused(tensors: Iterable[torch.Tensor]) -> None:
    """Empty torch's cache of GPU memory between two trials, if any of ``tensors`` is on a GPU and there is much.

    What one trial took is in other pieces than the next one needs.
    """
    device = next((t.device for t in tensors if t.is_cuda), None)
    if device is None:
        return
    if torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) >= _MUCH:
        torch.cuda.empty_cache()


_MUCH = 256 << 20
"""Bytes."""
