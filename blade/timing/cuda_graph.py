# SPDX-License-Identifier: Apache-2.0
"""Time a step on the GPU in microseconds, as one CUDA graph of many steps.

    microseconds(lambda i: torch.mm(x, weights[i], out=out), count=16)

A kernel may take less time than its launch. In a captured graph, steps follow each other with the gaps that
they have in a program, whatever the host does.
"""

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from functools import cache
from statistics import median

import torch

from blade.core.cuda_driver import DriverError, call, make_context_current
from blade.process.memory import empties

REPLAYS = 5  # the first one, which uploads the graph, does not count
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL

_lock = threading.Lock()


def microseconds(step: Callable[[int], None], count: int) -> float:
    """Return the median time of a step, from graphs of ``step(0)`` .. ``step(count - 1)``.

    Only one thread measures at a time.
    """
    with _lock:
        return _microseconds(step, count)


def _microseconds(step: Callable[[int], None], count: int) -> float:
    stream = own_stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(0)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.current_stream().synchronize()
    with CudaGraph(stream) as graph:
        for i in range(count):
            step(i)
    times: list[float] = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.launch()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    graph.close()
    return 1e3 * median(times[1:]) / count


@cache
def own_stream(device: int) -> torch.cuda.ExternalStream:
    """Return a stream outside torch's pool: only work of this module is captured there."""
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # torch makes the context
        make_context_current(device)
        stream = ctypes.c_void_p()
        call("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
    return torch.cuda.ExternalStream(stream.value, device=torch.device("cuda", device))


_pools: dict[int, tuple[int, int]] = {}


def _pool(device: int) -> tuple[int, int]:
    """Return the memory pool for allocations during a capture; it lives until it is released.

    It is no ``torch.cuda.MemPool``: dropping one while another thread of the user's captures ends the
    process.
    """
    if device not in _pools:
        pool: tuple[int, int] = torch.cuda.graph_pool_handle()
        torch._C._cuda_beginAllocateCurrentThreadToPool(device, pool)
        torch._C._cuda_endAllocateToPool(device, pool)  # the extra user keeps the pool alive
        _pools[device] = pool
    return _pools[device]


@empties
def _release_pools() -> None:
    """Let go of what no graph uses, unless a thread measures."""
    if _lock.acquire(blocking=False):
        try:
            for device in list(_pools):
                torch._C._cuda_releasePool(device, _pools.pop(device))
        finally:
            _lock.release()


@contextlib.contextmanager
def _allocating(device: int) -> Iterator[None]:
    """Make this thread allocate from the pool."""
    pool = _pool(device)
    torch._C._cuda_beginAllocateCurrentThreadToPool(device, pool)
    try:
        yield
    finally:
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)


class CudaGraph:
    """One launch of all work that a block enqueues on torch's current stream.

        with CudaGraph(own_stream(0)) as graph:
            torch.mm(x, w, out=out)
        graph.launch()

    torch's own graphs register the capture with its default generator, which then raises in other threads of
    the user that draw numbers meanwhile. This class does not. One capture at a time.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._handle, self._launched = ctypes.c_void_p(), ctypes.c_void_p()
        self._inside = contextlib.ExitStack()

    def __enter__(self) -> "CudaGraph":
        torch.cuda.current_stream().synchronize()  # not the device: another thread may capture
        self._inside.enter_context(torch.cuda.stream(self._stream))
        self._inside.enter_context(_allocating(self._stream.device_index))
        try:
            call("cuStreamBeginCapture_v2", self._on(), _THREAD_LOCAL)
        except DriverError:
            self._inside.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            call("cuStreamEndCapture", self._on(), ctypes.byref(self._handle))
        except DriverError:
            if kind is None:  # otherwise the block's exception says more
                raise
        finally:
            self._inside.close()
        if kind is None:
            into = ctypes.byref(self._launched)
            call("cuGraphInstantiateWithFlags", into, self._handle, ctypes.c_ulonglong(0))

    def launch(self) -> None:
        """Launch on torch's current stream."""
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        call("cuGraphLaunch", self._launched, stream)

    def close(self) -> None:
        """Free the graph once its launches have ended."""
        for name, handle in (("Exec", self._launched), ("", self._handle)):
            if handle.value is not None:
                call(f"cuGraph{name}Destroy", handle)
                handle.value = None

    def _on(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._stream.cuda_stream)
