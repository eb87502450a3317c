# SPDX-License-Identifier: Apache-2.0
"""Load a library that TVM compiled, and call it from many threads at once.

    run = load("cluster_0", payload, constants, program)
    outputs = run([x, y])

Only TVM's runtime is loaded here, not its compiler: the virtual machine's functions are reached through
``tvm_ffi``. A virtual machine serves one call at a time, so every thread has its own. Tensors cross as
DLPack, without a copy.
"""

import ctypes
import importlib.util
import tempfile
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from blade.backends.shared.archive import EngineArchive, read
from blade.backends.shared.library_payload import why_no_orders
from blade.backends.shared.output_buffers import restore
from blade.backends.shared.weight_versions import WeightVersions
from blade.backends.tvm.versions import stamp
from blade.errors import BackendError
from blade.runtime.engine import Runner

LIBRARY = "model.so"
ALIGNMENT = 64  # bytes, which TVM's code assumes
_CPU, _POOLED = 1, 2  # DLPack's device type; the allocator that keeps buffers for the next call
_RUNTIME = ("libtvm_runtime.so", "libtvm_runtime_extra.so")


def load(name: str, payload: torch.Tensor, constants: list[torch.Tensor], program: str) -> Runner:
    """The runner of an engine. Raises ``BackendError`` if the library cannot run in this process."""
    archive = read(payload.numpy().tobytes(), stamp(), "TVM", {LIBRARY})
    given: Any = archive.facts.get("weights")
    orders: Any = archive.facts.get("orders")
    counted = type(given) is int and 0 <= given <= len(constants)
    if not counted or why_no_orders(orders) is not None or LIBRARY not in archive.files:
        raise BackendError("what TVM compiled is damaged (its head is in another form).")
    return _TvmModel(_open(archive), constants[:given], constants[given:], orders)


class _TvmModel:
    """One loaded library over one set of weights."""

    def __init__(
        self,
        executable: Any,
        weights: Sequence[torch.Tensor],
        folded: Sequence[torch.Tensor],
        orders: Sequence[Sequence[int] | None],
    ) -> None:
        self._executable = executable
        self._weights = [_aligned(t) for t in weights]
        copied = [t for t, own in zip(weights, self._weights, strict=True) if t is not own]
        self._written = WeightVersions([*folded, *copied])
        self._orders = orders
        self._mine = threading.local()

    def __call__(self, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        main: Callable[..., Any] | None = getattr(self._mine, "main", None)
        if main is None:
            main = self._mine.main = self._machine()
        if self._written.since():
            raise BackendError("a weight that TVM computed with beforehand was written in place.")
        results = main(*map(_aligned, inputs), *self._weights)
        outputs = map(from_dlpack, results)
        return [restore(one, order) for one, order in zip(outputs, self._orders, strict=True)]

    def _machine(self) -> Callable[..., Any]:
        machine = self._executable["vm_load_executable"]()
        machine["vm_initialization"](_CPU, 0, _POOLED)
        main: Callable[..., Any] = machine["main"]
        return main


def _open(archive: EngineArchive) -> Any:
    _load_runtime()
    import tvm_ffi

    with tempfile.TemporaryDirectory(prefix="blade-tvm-") as folder:
        path = Path(folder, LIBRARY)
        path.write_bytes(archive.files[LIBRARY])
        try:
            return tvm_ffi.load_module(path)
        except (RuntimeError, OSError) as error:
            first = str(error).strip().partition("\n")[0]
            raise BackendError(f"TVM's library cannot be loaded: {first}") from error


@cache
def _load_runtime() -> None:
    """Load the runtime as ``import tvm`` does, but without 250 MB of compiler."""
    spec = importlib.util.find_spec("tvm")
    if spec is None or spec.origin is None or importlib.util.find_spec("tvm_ffi") is None:
        raise BackendError("TVM is not installed: `pip install apache-tvm`.")
    import tvm_ffi  # noqa: F401 - loads dependencies of the runtime

    folder = Path(spec.origin).parent / "lib"
    for name in _RUNTIME:
        try:
            ctypes.CDLL(str(folder / name), ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise BackendError(f"TVM's runtime cannot be loaded: {error}") from error


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` if it is row-major and aligned, else a copy that is."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor
