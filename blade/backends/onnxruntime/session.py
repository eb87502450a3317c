# SPDX-License-Identifier: Apache-2.0
"""Runs an ONNX model in ONNX Runtime on torch's memory: inputs, results and weights are not copied.

Sessions may be used by several threads at once; each thread has a binding of its own. On the CPU weights
are initializers, which can be folded and packed. On a GPU they are inputs that stay bound: the library
would copy initializers there.
"""

import threading
from collections.abc import Mapping
from typing import Any

import torch

from blade.backends.onnxruntime.place import (
    Place,
    has_cuda,
    options,
    place_of,
    providers,
    run_options,
)
from blade.errors import BackendError
from blade.exchange.library import Library, Sessions
from blade.exchange.onnx_engine import MODEL
from blade.exchange.payload import Head, unpack
from blade.exchange.results import Results
from blade.runtime.engine import Runner

LIBRARY = Library("onnxruntime", "InferenceSession", ("onnxruntime", "onnxruntime-gpu"))

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
    """The function behind an engine; ``BackendError`` where the library is missing or another one."""
    if (why := LIBRARY.why_not_loadable()) is not None:
        raise BackendError(why)
    head, files = unpack(payload, LIBRARY.stamp(), "ONNX Runtime")
    if head.device == "cuda" and not has_cuda():
        raise BackendError(
            "the engine computes on a GPU, and the installed onnxruntime has no CUDAExecutionProvider: "
            "pip install onnxruntime-gpu"
        )
    return _Model(head, files[MODEL], constants, Results(program, head.orders))


class _Started(threading.local):
    """A session, and this thread's binding of its inputs and results, in which ``kept`` stay bound."""

    def __init__(self, session: Any, kept: Mapping[str, torch.Tensor]) -> None:
        self.session = session
        self.binding = session.io_binding()
        for name, tensor in kept.items():
            self.binding.bind_input(name, *_where(tensor))


class _Model:
    """One session per place it was called at."""

    def __init__(
        self, head: Head, model: bytes, constants: list[torch.Tensor], results: Results
    ) -> None:
        self.head = head
        self.model = model
        self.results = results
        self.constants = constants
        if head.device == "cpu":
            self.sessions = Sessions(constants, self._start)
            self.sessions.at(place_of([]))
        else:  # bound weights are read where they are, but for those that had to be copied
            copied = [c for c in constants if not c.is_contiguous()]
            self.sessions = Sessions(copied, self._start)

    def __call__(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        place = place_of(inputs) if inputs else place_of(self.constants)
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

    def _start(self, place: Place) -> _Started:
        import onnxruntime as ort

        settings = options(place)
        dense = [c.detach().contiguous() for c in self.constants]
        weights = dict(zip(self.head.weights, dense, strict=True))
        values = []
        if place.gpu is None and weights:
            values = [ort.OrtValue.ortvalue_from_numpy(c.numpy()) for c in dense]
            settings.add_external_initializers(list(weights), values)
        session = ort.InferenceSession(self.model, settings, providers=providers(place))
        session.blade_weights = dense, values  # whose memory it reads
        return _Started(session, weights if place.gpu is not None else {})


def _where(tensor: torch.Tensor) -> tuple[str, int, int, list[int], int]:
    """Device, its index, element type, sizes and address, as bindings want them."""
    device = tensor.device
    address = tensor.data_ptr() or _NOWHERE.data_ptr()
    return device.type, device.index or 0, ELEMENT_TYPES[tensor.dtype], list(tensor.shape), address


_NOWHERE = torch.empty(1)
"""Where empty tensors are said to lie: at no address, they count as missing."""
