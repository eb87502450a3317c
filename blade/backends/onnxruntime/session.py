# SPDX-License-Identifier: Apache-2.0
"""Run an ONNX model in ONNX Runtime on torch's memory: inputs, outputs and weights are not copied.

Several threads may use a session at once; each has its own binding. On the CPU weights are initializers,
which can be folded and packed. On a GPU they are inputs that stay bound, because the library would copy
initializers there.
"""

import threading
from collections.abc import Mapping
from typing import Any

import torch

from blade.backends.onnxruntime.device import (
    OrtDevice,
    has_cuda,
    options,
    ort_device_of,
    providers,
    run_options,
)
from blade.backends.onnxruntime.library import LIBRARY
from blade.backends.shared.library_payload import LibraryHeader, unpack
from blade.backends.shared.library_sessions import LibrarySessions
from blade.backends.shared.onnx.self_contained import check_model
from blade.backends.shared.output_buffers import OutputBuffers
from blade.errors import BackendError
from blade.runtime.engine import Runner

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


def load(name: str, payload: torch.Tensor, constants: list[torch.Tensor], program: str) -> Runner:
    """The runner of an engine; ``BackendError`` if the library is missing or has another version."""
    if (why := LIBRARY.why_not_loadable()) is not None:
        raise BackendError(why)
    head, model = unpack(payload, LIBRARY.stamp(), "ONNX Runtime", len(constants))
    check_model(model, head.weights if head.device == "cpu" else (), "ONNX Runtime")
    if head.device == "cuda" and not has_cuda():
        raise BackendError(
            "the engine computes on a GPU, and the installed onnxruntime has no CUDAExecutionProvider: "
            "pip install onnxruntime-gpu"
        )
    return _OrtModel(head, model, constants, OutputBuffers(program, head.orders))


class _ThreadSession(threading.local):
    """A session, and this thread's binding of its inputs and outputs, in which ``kept`` stay bound."""

    def __init__(self, session: Any, kept: Mapping[str, torch.Tensor]) -> None:
        self.session = session
        self.binding = session.io_binding()
        for name, tensor in kept.items():
            self.binding.bind_input(name, *_where(tensor))


class _OrtModel:
    """One session per ``OrtDevice`` it was called on."""

    def __init__(
        self,
        head: LibraryHeader,
        model: bytes,
        constants: list[torch.Tensor],
        results: OutputBuffers,
    ) -> None:
        self.head = head
        self.model = model
        self.results = results
        self.constants = constants
        if head.device == "cpu":
            self.sessions = LibrarySessions(constants, self._start)
            self.sessions.at(ort_device_of([]))
        else:  # bound weights are read in place, except those that had to be copied
            copied = [c for c in constants if not c.is_contiguous()]
            self.sessions = LibrarySessions(copied, self._start)

    def __call__(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        place = ort_device_of(inputs) if inputs else ort_device_of(self.constants)
        started = self.sessions.at(place)
        binding = started.binding
        dense = [t.contiguous() for t in inputs]
        buffers, answers = self.results.allocate(dense, place.device)
        for name, tensor in zip(self.head.inputs, dense, strict=True):
            binding.bind_input(name, *_where(tensor))
        for name, tensor in zip(self.head.outputs, buffers, strict=True):
            binding.bind_output(name, *_where(tensor))
        started.session.run_with_iobinding(binding, run_options(place))
        return answers

    def _start(self, place: OrtDevice) -> _ThreadSession:
        ort: Any = LIBRARY.load()
        settings = options(place)
        dense = [c.detach().contiguous() for c in self.constants]
        weights = dict(zip(self.head.weights, dense, strict=True))
        values = []
        if place.gpu is None and weights:
            values = [ort.OrtValue.ortvalue_from_numpy(c.numpy()) for c in dense]
            settings.add_external_initializers(list(weights), values)
        session = ort.InferenceSession(self.model, settings, providers=providers(place))
        session.blade_weights = dense, values  # the session reads their memory
        return _ThreadSession(session, weights if place.gpu is not None else {})


def _where(tensor: torch.Tensor) -> tuple[str, int, int, list[int], int]:
    """Device, its index, element type, sizes and address, as arguments of a binding."""
    device = tensor.device
    address = tensor.data_ptr() or _NOWHERE.data_ptr()
    return device.type, device.index or 0, ELEMENT_TYPES[tensor.dtype], list(tensor.shape), address


_NOWHERE = torch.empty(1)
"""Memory for the address of empty tensors: without an address they count as missing."""
