# SPDX-License-Identifier: Apache-2.0
"""Run a block with fewer OpenMP threads in this thread alone; torch's setting for others stays what it is.

with one_thread() as is_one:
    ...          # is_one: whether that was possible, and makes a difference
with at_most(3):
    ...
"""

import ctypes
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path

import torch

_LIBRARIES = ("libtorch_cpu.so", "libtorch_cpu.dylib", "torch_cpu.dll")


def one_thread() -> AbstractContextManager[bool]:
    """Run the block with one thread."""
    return at_most(1)


@contextmanager
def at_most(threads: int) -> Iterator[bool]:
    """Run the block with so many threads.

    ``torch.set_num_threads`` would reach threads that a program starts meanwhile.
    """
    before = torch.get_num_threads()
    library = _openmp()
    if library is None or before <= threads:
        yield False
        return
    library.omp_set_num_threads(threads)
    try:
        yield torch.get_num_threads() == threads
    finally:
        library.omp_set_num_threads(before)


@cache
def _openmp() -> ctypes.CDLL | None:
    """The OpenMP library that torch is linked to, by way of torch's own."""
    for name in _LIBRARIES:
        path = Path(torch.__file__).parent / "lib" / name
        if path.exists():
            library = ctypes.CDLL(str(path))
            return library if hasattr(library, "omp_set_num_threads") else None
    return None
