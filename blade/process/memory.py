# SPDX-License-Identifier: Apache-2.0
"""Gives memory that nobody uses back to the system: that of trials, which took several times the model's."""

import ctypes
import gc

import torch


def give_memory_back() -> None:
    """Collect young cycles, then empty torch's cache of GPU memory and the free part of glibc's heap."""
    gc.collect(1)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)
