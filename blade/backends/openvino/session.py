# SPDX-License-Identifier: Apache-2.0
"""Runs a model in OpenVINO on torch's memory: inputs, results and weights are not copied.

Every calling thread has its own infer request of one compiled model. Results are exact fp32: the plugin
would use bfloat16 where the CPU has it, which no verification passes. The plugin answers where torch raises,
for an index out of range, and computes int64 in int32; calls in which that matters are refused, so that
the original serves them.
"""

import threading
from functools import lru_cache
from typing import Any

import torch

from blade.backends.openvino.integers import is_within
from blade.errors import BackendError
from blade.exchange.library import Library, Sessions
from blade.exchange.onnx_engine import MODEL
from blade.exchange.payload import Head, unpack
from blade.exchange.results import Results
from blade.runtime.engine import Runner

# Importing it tells its makers over the network, from a process of its own: not what blade was asked for.
LIBRARY = Library("openvino", "Core", ("openvino",), without=("openvino_telemetry",))


def load(name: str, payload: torch.Tensor, constants: list[torch.Tensor], program: str) -> Runner:
    """The function behind an engine; ``BackendError`` where the library is missing or another one."""
    if (why := LIBRARY.why_not_loadable()) is not None:
        raise BackendError(why)
    head, files = unpack(payload, LIBRARY.stamp(), "OpenVINO")
    return _Model(head, files[MODEL], constants, Results(program, head.orders))


class _Compiled(threading.local):
    """A compiled model, and the infer request of this thread."""

    def __init__(self, model: Any) -> None:
        self.inputs = {name for one in model.inputs for name in one.get_names()}
        self.request = model.create_infer_request()


class _Model:
    """One compiled model per number of threads it was called with."""

    def __init__(
        self, head: Head, model: bytes, constants: list[torch.Tensor], results: Results
    ) -> None:
        self.head = head
        self.model = model
        self.constants = constants
        self.results = results
        self.sessions = Sessions(constants, self._compile)
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
            if name in compiled.inputs:  # one that nothing reads is gone
                request.set_tensor(name, openvino.Tensor(tensor.numpy(), shared_memory=True))
        for k, tensor in enumerate(buffers):
            request.set_output_tensor(k, openvino.Tensor(tensor.numpy(), shared_memory=True))
        request.infer(share_outputs=True)  # not copied to be returned
        if self.head.is_flagged and not request.get_output_tensor(len(buffers)).data.item():
            raise BackendError("an index is out of range.")  # the original says which
        return answers

    def _compile(self, threads: int) -> _Compiled:
        core = _core()
        model = core.read_model(self.model)
        _give_weights(model, dict(zip(self.head.weights, self.constants, strict=True)))
        settings = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "f32",
            "INFERENCE_NUM_THREADS": threads,
            "ENABLE_CPU_PINNING": False,  # torch's threads want the same cores
        }
        return _Compiled(core.compile_model(model, "CPU", settings))


def _give_weights(model: Any, weights: dict[str, torch.Tensor]) -> None:
    """The parameters that stand for weights become constants over torch's memory."""
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
