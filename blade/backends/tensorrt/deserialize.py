# SPDX-License-Identifier: Apache-2.0
"""Load a payload as an engine on the current device: deserialize, refit, check.

    engine = open_engine(library, payload, constants)       # BackendError if it cannot run

A plan contains no weights (``payload``): they are refitted from the fallback's tensors, which are read in
place. The properties of the loaded engine must then match those that were built.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from blade.backends.tensorrt.dtypes import name_of
from blade.backends.tensorrt.kernel_cache import KernelCache, open_kernels
from blade.backends.tensorrt.library import TensorRTLibrary
from blade.backends.tensorrt.network import give_weights
from blade.backends.tensorrt.payload import TensorRTHeader, TensorRTPayload
from blade.errors import BackendError


@dataclass(frozen=True)
class DeserializedEngine:
    """``ICudaEngine`` and its runtime, which must outlive it."""

    library: TensorRTLibrary
    head: TensorRTHeader
    engine: Any
    runtime: Any

    @property
    def workspace_bytes(self) -> int:
        """Bytes of device memory for one execution context, with any profile."""
        size = getattr(self.engine, "device_memory_size_v2", None)
        return int(self.engine.device_memory_size if size is None else size)

    def new_context(self) -> tuple[Any, KernelCache | None]:
        """A context without memory of its own, and the cache of the kernels compiled for it at run time."""
        managed = self.library.trt.ExecutionContextAllocationStrategy.USER_MANAGED
        kernels = open_kernels(self.library, self.engine, self.head.key)
        if kernels is None:
            context = self.engine.create_execution_context(managed)
        else:
            kernels.config.set_execution_context_allocation_strategy(managed)
            context = self.engine.create_execution_context(kernels.config)
        if context is None:
            raise RuntimeError("TensorRT makes no execution context: is the device out of memory?")
        return context, kernels

    def place_workspace(self, context: Any, memory: torch.Tensor) -> None:
        """Give ``context`` its device memory."""
        if hasattr(context, "set_device_memory"):
            context.set_device_memory(memory.data_ptr(), memory.numel())
        else:
            context.device_memory = memory.data_ptr()


def open_engine(
    library: TensorRTLibrary, payload: TensorRTPayload, constants: Sequence[torch.Tensor]
) -> DeserializedEngine:
    """Load ``payload``; ``BackendError`` if this device cannot run the plan, or the plan fails the check."""
    with library.errors() as errors:
        runtime = library.trt.Runtime(library.logger)
        if hasattr(runtime, "engine_host_code_allowed"):
            runtime.engine_host_code_allowed = False  # load no libraries from a plan
        engine = None if runtime is None else runtime.deserialize_cuda_engine(payload.plan)
        if engine is None:
            raise BackendError(library.said("cannot load the engine here", errors))
        if payload.head.weights and not _refit(library, engine, payload, constants):
            raise BackendError(library.said("does not take the weights back", errors))
    opened = DeserializedEngine(library, payload.head, engine, runtime)
    check(opened)
    return opened


def check(opened: DeserializedEngine) -> None:
    """Raise ``BackendError`` unless names, order, directions, types and profiles are as they were built."""
    engine, trt = opened.engine, opened.library.trt
    names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
    want = [*opened.head.inputs, *opened.head.outputs]
    found = [
        (
            name,
            engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT,
            name_of(engine.get_tensor_dtype(name)),
        )
        for name in names
    ]
    expected = [(t.name, t in opened.head.inputs, t.dtype) for t in want]
    if sorted(found) != sorted(expected):
        raise BackendError(f"The engine has the inputs and outputs {found}, built were {expected}.")
    if engine.num_optimization_profiles != len(opened.head.profiles):
        raise BackendError(
            f"The engine has {engine.num_optimization_profiles} optimization profile(s), built were "
            f"{len(opened.head.profiles)}."
        )
    if on_host := [t.name for t in want if engine.is_shape_inference_io(t.name)]:
        raise BackendError(f"The engine wants the values of {', '.join(on_host)} on the host.")


def _refit(
    library: TensorRTLibrary,
    engine: Any,
    payload: TensorRTPayload,
    constants: Sequence[torch.Tensor],
) -> bool:
    refitter = library.trt.Refitter(engine, library.logger)
    parser = library.trt.OnnxParserRefitter(refitter, library.logger)
    weights = {name: constants[k] for name, k in payload.head.weights.items()}
    held = give_weights(parser, payload.graph, weights, "refit")
    done = held is not None and bool(refitter.refit_cuda_engine())
    del held  # read while refitting
    return done
