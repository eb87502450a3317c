# SPDX-License-Identifier: Apache-2.0
"""Run a model in OpenVINO on torch's memory: inputs, outputs and weights are not copied.

Every calling thread has its own infer request of one compiled model. Computation is set to fp32: by default
the plugin uses bfloat16 if the CPU has it, which fails verification. The plugin returns values for an index
out of range, where torch raises, and computes int64 in int32; calls in which that matters are refused, and
the original serves them.
"""

import threading
from functools import lru_cache
from typing import Any

import torch

from blade.backends.openvino.int64_bounds import is_within
from blade.backends.shared.library_payload import LibraryHeader, unpack
from blade.backends.shared.library_sessions import LibrarySessions, OptionalLibrary
from blade.backends.shared.onnx.self_contained import check_model
from blade.backends.shared.output_buffers import OutputBuffers
from blade.errors import BackendError
from blade.runtime.engine import Runner

# Importing the telemetry module would start a process that sends usage data over the network.
LIBRARY = OptionalLibrary("openvino", "Core", ("openvino",), without=("openvino_telemetry",))


def load(name: str, payload: torch.Tensor, constants: list[torch.Tensor], program: str) -> Runner:
    """The runner of an engine; ``BackendError`` if the library is missing or has another version."""
    if (why := LIBRARY.why_not_loadable()) is not None:
        raise BackendError(why)
    head, model = unpack(payload, LIBRARY.stamp(), "OpenVINO", len(constants))
    check_model(model, (), "OpenVINO")  # ONNX: other formats that OpenVINO reads may name files
    return _OpenVinoModel(head, model, constants, OutputBuffers(program, head.orders))


class _ThreadCompiledModel(threading.local):
    """A compiled model, and the infer request of this thread."""

    def __init__(self, model: Any) -> None:
        self.inputs = {name for one in model.inputs for name in one.get_names()}
        self.request = model.create_infer_request()


class _OpenVinoModel:
    """One compiled model per number of threads of its calls."""

    def __init__(
        self,
        head: LibraryHeader,
        model: bytes,
        constants: list[torch.Tensor],
        results: OutputBuffers,
    ) -> None:
        self.head = head
        self.model = model
        self.constants = constants
        self.results = results
        self.sessions = LibrarySessions(constants, self._compile)
        self.sessions.at(torch.get_num_threads())

    def __call__(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        import openvino

        compiled = self.sessions.at(torch.get_num_threads())
        request = compiled.request
        dense = [t.contiguous() for t in inputs]
        buffers, answers = self.results.allocate(dense)
        for name, tensor in zip(self.head.inputs, dense, strict=True):
            if tensor.dtype is torch.int64 and not is_within(tensor):
                raise BackendError(
                    f"{name} has integers that OpenVINO, with 32 bits, might get wrong."
                )
            if name in compiled.inputs:  # unused inputs are removed
                request.set_tensor(name, openvino.Tensor(tensor.numpy(), shared_memory=True))
        for k, tensor in enumerate(buffers):
            request.set_output_tensor(k, openvino.Tensor(tensor.numpy(), shared_memory=True))
        request.infer(share_outputs=True)  # outputs are not copied
        if self.head.is_flagged and not request.get_output_tensor(len(buffers)).data.item():
            raise BackendError("an index is out of range.")  # the original names the index
        return answers

    def _compile(self, threads: int) -> _ThreadCompiledModel:
        core = _core()
        model = core.read_model(self.model)
        _give_weights(model, dict(zip(self.head.weights, self.constants, strict=True)))
        settings = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "f32",
            "INFERENCE_NUM_THREADS": threads,
            "ENABLE_CPU_PINNING": False,  # torch's threads want the same cores
        }
        return _ThreadCompiledModel(core.compile_model(model, "CPU", settings))


def _give_weights(model: Any, weights: dict[str, torch.Tensor]) -> None:
    """Replace the parameters that stand for weights by constants over torch's memory."""
    from openvino import Tensor
    from openvino.op import Constant

    for parameter in model.get_parameters():
        tensor = weights.get(parameter.get_friendly_name())
        if tensor is not None:
            array = tensor.detach().contiguous().numpy()
            constant = Constant(Tensor(array, shared_memory=True))
            parameter.output(0).replace(constant.output(0))
            model.remove_parameter(parameter)
    model.validate_nodes_and_infer_types()


@lru_cache(maxsize=1)
def _core() -> Any:
    from openvino import Core

    return Core()
