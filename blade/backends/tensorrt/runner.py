# SPDX-License-Identifier: Apache-2.0
"""Load an engine and execute it on torch's current stream, from any number of threads at once.

    run = load(name, payload, constants, program)       # a runner for ``register_runner``
    outputs = run([x, y])                               # enqueued, without waiting

A context belongs to one thread, stream and profile. Only the engine is shared, and TensorRT allows concurrent
calls of the methods used here, so work is enqueued without a lock. torch allocates outputs and workspace: its
allocator frees in stream order.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from blade.backends.shared.onnx.self_contained import check_model
from blade.backends.shared.output_buffers import restore
from blade.backends.shared.weight_versions import WeightVersions
from blade.backends.tensorrt import library as tensorrt
from blade.backends.tensorrt.deserialize import DeserializedEngine, open_engine
from blade.backends.tensorrt.dtypes import TORCH
from blade.backends.tensorrt.kernel_cache import KernelCache
from blade.backends.tensorrt.payload import TensorRTPayload, from_bytes
from blade.backends.tensorrt.profiles import Shape, nearest
from blade.errors import BackendError
from blade.runtime.engine import Runner

DEVICE = "cuda"
REMEMBERED = 1024  # number of shapes whose profile is cached


def load(name: str, payload: torch.Tensor, constants: list[torch.Tensor], program: str) -> Runner:
    """The runner of a saved engine.

    Raises ``BackendError`` if the engine cannot run here: no TensorRT, another version than built the engine,
    no CUDA device, or one that this TensorRT does not support.
    """
    found = from_bytes(payload.numpy().tobytes(), len(constants))
    if found.head.weights:  # otherwise the graph is not read
        check_model(found.graph, found.head.weights, "TensorRT")
    library = tensorrt.find_library()
    if library.stamp != found.head.library:
        raise BackendError(
            f"The engine was built by {found.head.library}, and {library.stamp} is installed: install "
            "that version, or optimize again."
        )
    return Execution(library, found, constants)


class Execution:
    """One engine on every device it is called on; the first call on a device loads it there."""

    def __init__(
        self,
        library: tensorrt.TensorRTLibrary,
        payload: TensorRTPayload,
        constants: Sequence[torch.Tensor],
    ) -> None:
        self.library, self.payload, self.constants = library, payload, list(constants)
        self._watch = WeightVersions(self.constants)
        self._engines: dict[int, DeserializedEngine] = {}
        self._loading = threading.Lock()
        self._own = threading.local()
        self._profiles: dict[tuple[Shape, ...], int] = {}
        self._engine(current_device())  # load early: an error shows before the first call

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if self._watch.since():
            raise RuntimeError("weights were written after the engine had taken them")
        device = self._device(inputs)
        with on_device(device):
            stream = current_stream(device)
            shapes = tuple(tuple(t.shape) for t in inputs)
            context = self._context(device, stream, self._profile(shapes))
            return context.execute([t.contiguous() for t in inputs], shapes)

    def _device(self, inputs: Sequence[torch.Tensor]) -> int:
        devices = {t.device for t in inputs} or {torch.device(DEVICE, current_device())}
        if len(devices) != 1 or (device := devices.pop()).type != DEVICE:
            raise ValueError(f"TensorRT wants all inputs on one {DEVICE} device")
        return device.index or 0

    def _engine(self, device: int) -> DeserializedEngine:
        """The engine on ``device``. Takes a lock only to load it there."""
        found = self._engines.get(device)
        if found is None:
            with self._loading:
                if device not in self._engines:
                    opened = open_engine(self.library, self.payload, self.constants)
                    self._engines[device] = opened
                found = self._engines[device]
        return found

    def _profile(self, shapes: tuple[Shape, ...]) -> int:
        found = self._profiles.get(shapes)
        if found is None:
            found = nearest(self.payload.head.profiles, shapes)
            if len(self._profiles) < REMEMBERED:
                self._profiles[shapes] = found
        return found

    def _context(self, device: int, stream: int, profile: int) -> "TensorRTContext":
        own: dict[tuple[int, int], StreamContext] = self._own.__dict__.setdefault("lanes", {})
        lane = own.get((device, stream))
        if lane is None:
            engine = self._engine(device)
            lane = own[device, stream] = StreamContext(engine, workspace(engine, device), {})
        if profile not in lane.contexts:
            lane.contexts[profile] = TensorRTContext(lane.engine, stream, profile, lane.workspace)
        return lane.contexts[profile]


@dataclass(frozen=True)
class StreamContext:
    """One thread's contexts on one stream. Their work runs in order, so all profiles share one workspace."""

    engine: DeserializedEngine
    workspace: torch.Tensor
    contexts: dict[int, "TensorRTContext"]


@dataclass(frozen=True)
class _OutputSpec:
    """An output of the engine."""

    name: str
    dtype: torch.dtype
    order: tuple[int, ...] | None


class TensorRTContext:
    """``IExecutionContext`` of one thread, stream and profile."""

    def __init__(
        self, engine: DeserializedEngine, stream: int, profile: int, workspace: torch.Tensor
    ) -> None:
        self.engine, self.stream, self.workspace = engine, stream, workspace
        self.inputs = [one.name for one in engine.head.inputs]
        self.outputs = [_OutputSpec(t.name, TORCH[t.dtype], t.order) for t in engine.head.outputs]
        self.shapes: tuple[Shape, ...] | None = None
        self.sizes: list[Shape] = []
        self.kernels: KernelCache | None
        self.context, self.kernels = engine.new_context()
        engine.place_workspace(self.context, workspace)
        if not self.context.set_optimization_profile_async(profile, stream):
            raise RuntimeError(f"TensorRT does not switch to optimization profile {profile}")

    def execute(
        self, inputs: Sequence[torch.Tensor], shapes: tuple[Shape, ...]
    ) -> list[torch.Tensor]:
        """Enqueue. ``inputs`` are contiguous and on the engine's device."""
        with self.engine.library.errors() as errors:
            if shapes != self.shapes:
                self._set_shapes(shapes, errors)
            device = self.workspace.device
            outputs = [
                torch.empty(size, dtype=one.dtype, device=device)
                for one, size in zip(self.outputs, self.sizes, strict=True)
            ]
            self._bind([*self.inputs, *(one.name for one in self.outputs)], [*inputs, *outputs])
            if not self.context.execute_async_v3(self.stream):
                raise RuntimeError(self.engine.library.said("cannot execute", errors))
        if self.kernels is not None:
            self.kernels.keep()
            self.kernels = None
        return [restore(t, one.order) for t, one in zip(outputs, self.outputs, strict=True)]

    def _set_shapes(self, shapes: tuple[Shape, ...], errors: list[str]) -> None:
        self.shapes, said = None, self.engine.library.said  # unset until all shapes are set
        for name, shape in zip(self.inputs, shapes, strict=True):
            if not self.context.set_input_shape(name, shape):
                raise RuntimeError(said(f"does not take {name} of shape {shape}", errors))
        if missing := self.context.infer_shapes():
            raise RuntimeError(said(f"needs {', '.join(missing)} to tell shapes", errors))
        self.sizes = [tuple(self.context.get_tensor_shape(one.name)) for one in self.outputs]
        if any(n < 0 for size in self.sizes for n in size):
            raise RuntimeError(f"TensorRT gives outputs of unknown sizes {self.sizes}")
        self.shapes = shapes

    def _bind(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
        for name, tensor in zip(names, tensors, strict=True):
            # An empty tensor has no address, and none may be null.
            address = tensor.data_ptr() or self.workspace.data_ptr()
            if not self.context.set_tensor_address(name, address):
                raise RuntimeError(f"TensorRT does not take an address for {name}")


def current_device() -> int:
    """The device that engines are loaded to. Raises ``BackendError`` if torch has none."""
    if (why := tensorrt.why_no_device()) is not None:
        raise BackendError(f"TensorRT engines run on CUDA devices, and {why}.")
    return int(torch.cuda.current_device())


def workspace(engine: DeserializedEngine, device: int) -> torch.Tensor:
    """Device memory for intermediate results, enough for every profile."""
    size = max(engine.workspace_bytes, 1)
    return torch.empty(size, dtype=torch.uint8, device=torch.device(DEVICE, device))


def current_stream(device: int) -> int:
    """The handle of torch's current stream there."""
    return int(torch.cuda.current_stream(device).cuda_stream)


def on_device(device: int) -> Any:
    """Make ``device`` the current one within a block."""
    return torch.cuda.device(device)
