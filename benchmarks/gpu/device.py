# SPDX-License-Identifier: Apache-2.0
"""The device that is measured on: placing models, waiting for it, counting what it was asked to do.

    where = Where("cuda", "float16")
    model = placed(MODELS["bert"](), where)
    work = traced(lambda k: model.module(*inputs), where, calls=4)      # kernels per call and their time

On "cpu" all of it works, without kernels to count: for trying the scripts on a machine without a GPU.
"""

import copy
import importlib.metadata
import json
import platform
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from zoo.model import Model, Shape, Tensors

_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_HOST_CALLS = ("launch", "memcpy", "memset")


@dataclass(frozen=True)
class Where:
    """``dtype`` by name, of weights and floating-point inputs."""

    device: str = "cuda"
    dtype: str = "float16"
    channels_last: bool = False

    @property
    def is_cuda(self) -> bool:
        return self.device.startswith("cuda")

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = getattr(torch, self.dtype) if tensor.is_floating_point() else tensor.dtype
        return self.moved(tensor.to(dtype))

    def moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """There, as it is."""
        made = tensor.to(self.device)
        images = self.channels_last and made.dim() == 4
        return made.contiguous(memory_format=torch.channels_last) if images else made

    def wait(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()


@dataclass(frozen=True)
class Work:
    """What one call asks of the device: kernels, copies, calls of the host, microseconds in which it is busy."""

    kernels: float
    copies: float
    host_calls: float
    device_us: float


def placed(model: Model, where: Where) -> Model:
    """``model`` on the device, its inputs made there."""
    module = model.module.to(where.device, getattr(torch, where.dtype))
    if where.channels_last:
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def inputs(shape: Shape, seed: int) -> Tensors:
        return tuple(map(where.place, model.inputs(shape, seed)))

    return replace(model, module=module, inputs=inputs)


def exact(module: torch.nn.Module, dtype: torch.dtype = torch.float64) -> Callable[..., Tensors]:
    """The same weights, computed in ``dtype``."""
    doubled = copy.deepcopy(module).to(dtype)

    def run(*inputs: torch.Tensor) -> Tensors:
        made = doubled(*(t.to(dtype) if t.is_floating_point() else t for t in inputs))
        return made if isinstance(made, tuple) else (made,)

    return run


def distance(got: Any, want: Sequence[torch.Tensor]) -> float:
    """The largest ``|got - want| / |want|`` (2-norms) of the results; infinite for shapes or NaNs."""
    got = got if isinstance(got, (tuple, list)) else (got,)
    if [g.shape for g in got] != [w.shape for w in want]:
        return float("inf")
    found = [
        float((g.double() - w.double()).norm() / w.double().norm().clamp_min(1e-30))
        for g, w in zip(got, want, strict=True)
        if w.is_floating_point() and w.numel()
    ]
    return max((f if f == f else float("inf") for f in found), default=0.0)


def traced(call: Callable[[int], Any], where: Where, calls: int) -> Work | None:
    """``call(0)``, ``call(1)`` ... under torch's profiler; ``None`` where it sees no device work."""
    return work_of(recorded(call, where, calls), calls)


def recorded(call: Callable[[int], Any], where: Where, calls: int) -> list[dict[str, Any]]:
    """The events of a Chrome trace; none without a GPU."""
    if not where.is_cuda:
        for k in range(calls):
            call(k)
        return []
    where.wait()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for k in range(calls):
            call(k)
        where.wait()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def work_of(events: Sequence[dict[str, Any]], calls: int) -> Work | None:
    """The events of a Chrome trace that ``calls`` calls left."""
    device = [e for e in events if e.get("cat") in _DEVICE_WORK]
    host = [e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    kernels = sum(e["cat"] == "kernel" for e in device)
    asked = sum(any(word in e["name"].lower() for word in _HOST_CALLS) for e in host)
    if not device:
        return None
    copies = len(device) - kernels
    return Work(kernels / calls, copies / calls, asked / calls, busy_us(device) / calls)


def busy_us(device: Sequence[dict[str, Any]]) -> float:
    """Microseconds in which any of these runs.

    Not the sum of theirs: a kernel that is started early waits while the one before it still runs.
    """
    total, until = 0.0, float("-inf")
    for start, length in sorted((float(e["ts"]), float(e["dur"])) for e in device):
        total += max(0.0, start + length - max(start, until))
        until = max(until, start + length)
    return total


def by_kernel(events: Sequence[dict[str, Any]], calls: int) -> dict[str, tuple[float, float]]:
    """Name -> how often it ran in a call, and microseconds of all of these; the longest first."""
    found: dict[str, tuple[float, float]] = {}
    for event in events:
        if event.get("cat") in _DEVICE_WORK:
            count, us = found.get(event["name"], (0.0, 0.0))
            found[event["name"]] = (count + 1 / calls, us + float(event["dur"]) / calls)
    return dict(sorted(found.items(), key=lambda one: -one[1][1]))


def facts(where: Where) -> dict[str, Any]:
    """Device, driver's CUDA and versions, for tables and files."""
    found: dict[str, Any] = {
        "device": platform.processor() or "cpu",
        "dtype": where.dtype,
        "python": platform.python_version(),
    }
    if where.is_cuda:
        found |= {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    for package in ("torch", "triton", "transformers", "diffusers", "pydantic"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found
