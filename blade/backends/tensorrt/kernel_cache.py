# SPDX-License-Identifier: Apache-2.0
"""Cache the kernels that TensorRT-RTX compiles on the device that runs them.

kernels = open_kernels(library, engine, key)     # None: this library compiles when it builds
context = engine.create_execution_context(kernels.config)
...                                              # the first execution compiles
kernels.keep()
"""

from dataclasses import dataclass
from typing import Any

import torch

from blade.backends.tensorrt.library import TensorRTLibrary
from blade.core.disk_cache import DiskCache, digest, open_cache

KIND = "tensorrt-kernels"


@dataclass
class KernelCache:
    """``config`` is for one execution context; ``known`` bytes of kernels came from the cache."""

    config: Any
    runtime_cache: Any
    cache: DiskCache
    key: str
    known: int

    def keep(self) -> None:
        """Store the kernels if there are new ones. Call after the context has executed."""
        data = self.runtime_cache.serialize()
        if data is not None and len(blob := bytes(data)) > self.known:
            self.cache.put(KIND, self.key, blob)
            self.known = len(blob)


def open_kernels(library: TensorRTLibrary, engine: Any, key: str) -> KernelCache | None:
    """A cache with kernels of earlier processes for this engine and device; ``key`` "" stores nothing."""
    cache = open_cache(bool(key))
    if not library.is_rtx or cache is None or not hasattr(engine, "create_runtime_config"):
        return None
    config = engine.create_runtime_config()
    runtime_cache = config.create_runtime_cache()
    whole = digest([key, library.stamp, device_name()])
    stored = cache.get(KIND, whole)
    used = stored is not None and runtime_cache.deserialize(stored)  # False: made by another driver
    config.set_runtime_cache(runtime_cache)
    return KernelCache(config, runtime_cache, cache, whole, len(stored) if stored and used else 0)


def device_name() -> str:
    """The properties of the current CUDA device that code depends on; "none" without a device."""
    if not torch.cuda.is_available():
        return "none"
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()} {major}.{minor}"
