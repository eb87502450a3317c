# SPDX-License-Identifier: Apache-2.0
"""Runs an ONNX model in ONNX Runtime on torch's memory: inputs, results and weights are not copied.

Sessions may be used by several threads at once; each call has its own binding. A session has as many
threads as torch has when it is first called, and they do not spin between calls, so that they leave the
cores to torch's own.
"""

import threading
from importlib.metadata import version
from typing import Any

import torch

from blade.errors import BackendError
from blade.exchange.payload import Head, unpack
from blade.exchange.results import Results
from blade.exchange.watch import Watch
from blade.runtime.engine import Runner

NAME = "onnxruntime"

ELEMENT_TYPES: dict[torch.dtype, int] = {
    torch.float32: 1,
    torch.uint8: 2,
    torch.int8: 3,
    torch.int16: 5,
    torch.int32: 6,
    torch.int64: 7,
    torch.bool: 9,
    torch.float16: 10,
    torch.float64: 11,
}
"""``onnx.TensorProto.DataType``; the numbers are part of the file format."""


def installed() -> str:
    """The version of the library; raises ``PackageNotFoundError``."""
    return version(NAME)


def why_not_loadable() -> str | None:
    """``None`` where the library can be imported, else a sentence with the fix."""
    try:
        import onnxruntime

        _ = onnxruntime.InferenceSession
        installed()
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed: pip install {NAME}"
    except (ImportError, OSError, AttributeError) as error:
        return f"{NAME} is installed and cannot be loaded ({error}): pip install --force-reinstall {NAME}"
    return None


def load(name: str, payload: torch.Tensor, constants: list[torch.Tensor], program: str) -> Runner:
    """The function behind an engine; ``BackendError`` where the library is missing or another one."""
    if (why := why_not_loadable()) is not None:
        raise BackendError(why)
    head, model = unpack(payload, NAME, installed())
    return _Model(head, model, constants, Results(program, head.orders))


class _Model:
    """One session per number of threads it was called with."""

    def __init__(
        self, head: Head, model: bytes, constants: list[torch.Tensor], results: Results
    ) -> None:
        self.head = head
        self.model = model
        self.constants = constants
        self.results = results
        self.lock = threading.Lock()
        self.sessions: dict[int, Any] = {}
        self.written = Watch(constants)
        self.session(torch.get_num_threads())

    def __call__(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        session = self.session(torch.get_num_threads())
        dense = [t.contiguous() for t in inputs]
        buffers, answers = self.results.allocate(dense)
        binding = session.io_binding()
        for name, tensor in zip(self.head.inputs, dense, strict=True):
            binding.bind_input(name, *_place(tensor))
        for name, tensor in zip(self.head.outputs, buffers, strict=True):
            binding.bind_output(name, *_place(tensor))
        session.run_with_iobinding(binding)
        return answers

    def session(self, threads: int) -> Any:
        """With ``threads`` threads, over the weights as they are now."""
        found = self.sessions.get(threads)
        if found is not None and not self.written.since():
            return found
        with self.lock:
            if self.written.since():  # what was folded or packed of them is stale
                self.sessions = {}
                self.written = Watch(self.constants)
            if threads not in self.sessions:
                self.sessions[threads] = self._start(threads)
            return self.sessions[threads]

    def _start(self, threads: int) -> Any:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
        options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 4  # what fails is raised
        options.enable_mem_pattern = False  # one is kept for every set of sizes ever seen
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        held = [c.detach().contiguous() for c in self.constants]
        values = [ort.OrtValue.ortvalue_from_numpy(c.numpy()) for c in held]
        if values:
            options.add_external_initializers(list(self.head.weights), values)
        session = ort.InferenceSession(self.model, options, providers=["CPUExecutionProvider"])
        session.blade_weights = values  # whose memory it reads
        return session


def _place(tensor: torch.Tensor) -> tuple[str, int, int, list[int], int]:
    """Device, element type, sizes and address, as bindings want them."""
    address = tensor.data_ptr() or _NOWHERE.data_ptr()
    return "cpu", 0, ELEMENT_TYPES[tensor.dtype], list(tensor.shape), address


_NOWHERE = torch.empty(
    1
)  # where empty tensors are said to lie: at no address, they count as missing
