# SPDX-License-Identifier: Apache-2.0
"""Gives memory that nobody uses back to the system: that of trials, which took several times the model's."""

import ctypes
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_pools: list[Callable[[], None]] = []
_kept: dict[
    torch.device, int
] = {}  # bytes that emptying the cache left unused: temporaries of CUDA graphs


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
    """Empty torch's cache of GPU memory between two trials, if any of ``tensors`` is on a GPU and there is much.

    What one trial took is in other pieces than the next one needs.
    """
    if (device := _gpu_of(tensors)) is not None:
        _free_unused(device)


@contextmanager
def freeing_unused(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Do so between the ops inside, too: a run of a model leaves pieces of ever other sizes."""
    device = _gpu_of(tensors)
    if device is None:
        yield
    else:
        with _FreesUnused(device):
            yield


class _FreesUnused(TorchDispatchMode):
    supports_higher_order_operators = True  # they run unchanged

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self._ops = device, 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        self._ops += 1
        if self._ops % _OPS == 0:
            _free_unused(self._device)
        return made


def _gpu_of(tensors: Iterable[torch.Tensor]) -> torch.device | None:
    return next((t.device for t in tensors if t.is_cuda), None)


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
_OPS = 32
"""After so many it is asked how much is unused, which takes as long as some of them."""
