# SPDX-License-Identifier: Apache-2.0
"""Gives memory that nobody uses back to the system: that of trials, which took several times the model's."""

import ctypes
import gc
from collections.abc import Callable, Iterable

import torch

_pools: list[Callable[[], None]] = []
_kept: dict[torch.device, int] = {}  # bytes that stayed unused: temporaries of CUDA graphs


def empties(release: Callable[[], None]) -> Callable[[], None]:
    """Have ``release`` called before the cache is emptied: it lets go of a pool of memory."""
    _pools.append(release)
    return release


def give_memory_back() -> None:
    """Collect young cycles, then empty torch's cache of GPU memory and the free part of glibc's heap."""
    gc.collect(1)
    if torch.cuda.is_initialized():
        empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)


def empty_cache() -> None:
    """Empty torch's cache of GPU memory, pools of our own included."""
    for release in _pools:
        release()
    torch.cuda.empty_cache()


def free_unused(tensors: Iterable[torch.Tensor]) -> None:
    """Empty torch's cache of GPU memory, if any of ``tensors`` is on a GPU and much of the cache is new.

    What one trial took is in other pieces than the next one needs.
    """
    device = next((t.device for t in tensors if t.is_cuda), None)
    if device is not None:
        _free_unused(device)


def _free_unused(device: torch.device) -> None:
    unused = _unused(device)
    if unused - _kept.get(device, 0) < _MUCH:
        _kept[device] = min(unused, _kept.get(device, 0))
        return
    empty_cache()
    _kept[device] = _unused(device)


def _unused(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


_MUCH = 256 << 20
"""Bytes."""
