# SPDX-License-Identifier: Apache-2.0
"""Launch compiled units through the CUDA driver, for measurements only; the runtime runs programs.

functions = load(compile_units(units, target, cache), {unit.name for unit in units})
functions["linear_5f3a.."].launch((72, 1, 1), (x, w, out), (32,))      # on torch's current stream
"""

import ctypes
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from blade.backends.disc.gpu.compile.compile import read_object
from blade.core.cuda_driver import call

_SHARED_UNASKED = 48 * 1024  # bytes that every function may use without an attribute
_SERIALIZED_LOOSELY = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16))


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("count", ctypes.c_uint),
    )


@dataclass(frozen=True)
class CudaFunction:
    """One loaded unit. ``module`` stays loaded until the process ends."""

    handle: Any
    threads: int
    shared: int
    early: bool

    def launch(
        self, grid: tuple[int, int, int], pointers: Sequence[torch.Tensor], ints: Sequence[int]
    ) -> None:
        """Launch on torch's current stream; a grid with a 0 launches nothing."""
        if 0 in grid:
            return
        values: list[Any] = [ctypes.c_void_p(p.data_ptr()) for p in pointers]
        values += [ctypes.c_int64(i) for i in ints]
        values += [
            ctypes.c_void_p(0),
            ctypes.c_void_p(0),
        ]  # Triton's scratch memory, which is unused
        addresses = [ctypes.cast(ctypes.pointer(v), ctypes.c_void_p) for v in values]
        array = (ctypes.c_void_p * len(values))(*addresses)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        attribute = _LaunchAttribute(_SERIALIZED_LOOSELY, 0, (ctypes.c_int * 16)(1))
        config = _LaunchConfig(*grid, self.threads, 1, 1, self.shared, stream)
        config.attributes, config.count = ctypes.pointer(attribute), int(self.early)
        call("cuLaunchKernelEx", ctypes.byref(config), self.handle, array, None)


def load(data: bytes, names: Container[str]) -> dict[str, CudaFunction]:
    """Load the functions ``names`` of an object (compile.py) in the current context."""
    torch.cuda.current_stream()  # torch makes the context current
    lines, rest = read_object(data)
    found: dict[str, CudaFunction] = {}
    for _isa, name, threads, shared, size, *early in map(str.split, lines):
        if name in names:
            found[name] = _function(name, rest[: int(size)], int(threads), int(shared), bool(early))
        rest = rest[int(size) :]
    return found


def _function(name: str, code: bytes, threads: int, shared: int, early: bool) -> CudaFunction:
    module, handle = ctypes.c_void_p(), ctypes.c_void_p()
    call("cuModuleLoadData", ctypes.byref(module), code)
    call("cuModuleGetFunction", ctypes.byref(handle), module, name.encode())
    if shared > _SHARED_UNASKED:
        call("cuFuncSetAttribute", handle, _MAX_DYNAMIC_SHARED, shared)
    return CudaFunction(handle, threads, shared, early)
