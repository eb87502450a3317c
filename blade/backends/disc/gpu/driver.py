# SPDX-License-Identifier: Apache-2.0
"""Compiled units on the GPU of this process, through the CUDA driver: for measuring, not for running programs.

functions = load(compile_units(units, target, cache), {unit.name for unit in units})
functions["linear_5f3a.."].launch((72, 1, 1), (x, w, out), (32,))      # on torch's current stream
"""

import contextlib
import ctypes
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

_SHARED_UNASKED = 48 * 1024  # bytes that every function may have
_SERIALIZED_LOOSELY = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


class DriverError(RuntimeError):
    """The driver refused; the message has its number."""


@dataclass(frozen=True)
class Function:
    """One loaded unit. ``module`` keeps it: it is unloaded with the process."""

    handle: Any
    threads: int
    shared: int
    early: bool

    def launch(
        self, grid: tuple[int, int, int], pointers: Sequence[torch.Tensor], ints: Sequence[int]
    ) -> None:
        """On torch's current stream; a grid with a 0 is nothing."""
        if 0 in grid:
            return
        values: list[Any] = [ctypes.c_void_p(p.data_ptr()) for p in pointers]
        values += [ctypes.c_int64(i) for i in ints]
        values += [
            ctypes.c_void_p(0),
            ctypes.c_void_p(0),
        ]  # Triton's scratch, of which we have none
        addresses = [ctypes.cast(ctypes.pointer(v), ctypes.c_void_p) for v in values]
        array = (ctypes.c_void_p * len(values))(*addresses)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        attribute = _Attribute(_SERIALIZED_LOOSELY, 0, (ctypes.c_int * 16)(1))
        config = _Config(*grid, self.threads, 1, 1, self.shared, stream)
        config.attributes, config.count = ctypes.pointer(attribute), int(self.early)
        _call("cuLaunchKernelEx", ctypes.byref(config), self.handle, array, None)


@cache
def own_stream(device: int) -> torch.cuda.ExternalStream:
    """One that nobody else has, as torch's may be: what is captured there is ours."""
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # torch makes the context current
        stream = ctypes.c_void_p()
        _call("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
    return torch.cuda.ExternalStream(stream.value, device=torch.device("cuda", device))


@cache
def _pool(device: int) -> tuple[int, int]:
    """Where memory is from that is allocated while a graph is captured; it stays as long as the process.

    No ``torch.cuda.MemPool``: dropping one while another thread of the user's captures ends the process.
    """
    pool: tuple[int, int] = torch.cuda.graph_pool_handle()
    torch._C._cuda_beginAllocateCurrentThreadToPool(device, pool)
    torch._C._cuda_endAllocateToPool(device, pool)  # and stays one user more than the captures
    return pool


@contextlib.contextmanager
def _allocating(device: int) -> Iterator[None]:
    """This thread's allocations are from the pool."""
    pool = _pool(device)
    torch._C._cuda_beginAllocateCurrentThreadToPool(device, pool)
    try:
        yield
    finally:
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)


class Graph:
    """What a block enqueues on torch's current stream, as one launch.

        with Graph(own_stream(0)) as graph:
            torch.mm(x, w, out=out)
        graph.launch()

    torch's own graphs tell its default generator of a capture, and other threads of the user's that draw
    numbers meanwhile are refused; this one tells nobody. One at a time.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._handle, self._launched = ctypes.c_void_p(), ctypes.c_void_p()
        self._inside = contextlib.ExitStack()

    def __enter__(self) -> "Graph":
        torch.cuda.current_stream().synchronize()  # not the device: another thread may capture
        self._inside.enter_context(torch.cuda.stream(self._stream))
        self._inside.enter_context(_allocating(self._stream.device_index))
        try:
            _call("cuStreamBeginCapture_v2", self._on(), _THREAD_LOCAL)
        except DriverError:
            self._inside.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            _call("cuStreamEndCapture", self._on(), ctypes.byref(self._handle))
        except DriverError:
            if kind is None:  # else what the block raised says more
                raise
        finally:
            self._inside.close()
        if kind is None:
            into = ctypes.byref(self._launched)
            _call("cuGraphInstantiateWithFlags", into, self._handle, ctypes.c_ulonglong(0))

    def launch(self) -> None:
        """On torch's current stream."""
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        _call("cuGraphLaunch", self._launched, stream)

    def close(self) -> None:
        """Once what was launched has ended."""
        for name, handle in (("Exec", self._launched), ("", self._handle)):
            if handle.value is not None:
                _call(f"cuGraph{name}Destroy", handle)
                handle.value = None

    def _on(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._stream.cuda_stream)


def load(data: bytes, names: Container[str]) -> dict[str, Function]:
    """These functions of an object (compile.py), in the current context."""
    torch.cuda.current_stream()  # torch makes the context current
    magic, _, rest = data.partition(b"\n")
    assert magic == b"blade.cubins 1", magic
    count, _, rest = rest.partition(b"\n")
    lines: list[list[str]] = []
    for _ in range(int(count)):
        line, _, rest = rest.partition(b"\n")
        lines.append(line.decode().split())
    found: dict[str, Function] = {}
    for _isa, name, threads, shared, size, *early in lines:
        if name in names:
            found[name] = _function(name, rest[: int(size)], int(threads), int(shared), bool(early))
        rest = rest[int(size) :]
    return found


def _function(name: str, code: bytes, threads: int, shared: int, early: bool) -> Function:
    module, handle = ctypes.c_void_p(), ctypes.c_void_p()
    _call("cuModuleLoadData", ctypes.byref(module), code)
    _call("cuModuleGetFunction", ctypes.byref(handle), module, name.encode())
    if shared > _SHARED_UNASKED:
        _call("cuFuncSetAttribute", handle, _MAX_DYNAMIC_SHARED, shared)
    return Function(handle, threads, shared, early)


def _call(name: str, *args: Any) -> None:
    code = getattr(_driver(), name)(*args)
    if code != 0:
        raise DriverError(f"{name}: CUDA error {code}")


@cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(f"the CUDA driver's library cannot be loaded: {error}") from error
