# SPDX-License-Identifier: Apache-2.0
"""Functions of the CUDA driver that torch does not offer.

call("cuGraphLaunch", graph, stream)                  # DriverError with the driver's error number if it fails
"""

import ctypes
from functools import cache
from typing import Any


class DriverError(RuntimeError):
    """A call of the driver failed; the message has the error number."""


def call(name: str, *args: Any) -> None:
    """Call the driver's function ``name``; raises ``DriverError``."""
    code = getattr(_library(), name)(*args)
    if code != 0:
        raise DriverError(f"{name}: CUDA error {code}")


def make_context_current(device: int) -> None:
    """Make the context that torch uses on the device ``device`` this thread's, if it has none.

    Torch does so at a thread's first kernel only.
    """
    context, of = ctypes.c_void_p(), ctypes.c_int()
    call("cuCtxGetCurrent", ctypes.byref(context))
    if context.value is None:
        call("cuDeviceGet", ctypes.byref(of), device)
        call("cuDevicePrimaryCtxRetain", ctypes.byref(context), of)
        call("cuCtxSetCurrent", context)


@cache
def _library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(f"the CUDA driver's library cannot be loaded: {error}") from error
