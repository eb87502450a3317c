# SPDX-License-Identifier: Apache-2.0
"""Other libraries that can run the user's model, set up as their documentation advises.

    calls = prepare("openvino", model, [(args, kwargs), ...])      # a Reason if it cannot
    calls[0]()                                                     # its answer to the first sample

All peers compute in fp32 with the same number of threads. An exception of a library becomes a ``Reason``. The
peers of ``benchmarks/`` are set up there: their processes must not import blade, whose memory would count as
theirs.
"""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch

from blade.core.attempt import attempt
from blade.core.reason import Code, Reason, Stage
from blade.errors import Refused

T = TypeVar("T")
Call = Callable[[], Any]
Bound = tuple[tuple[Any, ...], Mapping[str, Any]]
Rows = Sequence[tuple[torch.Tensor, ...]]


def prepare(name: str, model: torch.nn.Module, samples: Sequence[Bound]) -> list[Call] | Reason:
    """One call per sample, or the reason why ``name`` has none."""

    def made() -> list[Call]:
        make, packages = PEERS[name]
        if missing := [p for p in packages if importlib.util.find_spec(p) is None]:
            raise Refused(
                Code.BACKEND_UNAVAILABLE,
                f"it is not installed: pip install {' '.join(missing)}",
            )
        return make(model, samples)

    return try_one(name, made)


def try_one(name: str, fn: Callable[[], T]) -> T | Reason:
    return attempt(Stage.CONVERT, name, name, fn)


def _openvino(model: torch.nn.Module, samples: Sequence[Bound]) -> list[Call]:
    from blade.backends.openvino.session import LIBRARY  # needs the runtime; the doctor does not

    openvino: Any = LIBRARY.load()
    _, rows = _positional(model, samples)
    example = max(rows, key=lambda row: sum(t.numel() for t in row))
    converted = openvino.convert_model(model, example_input=example)
    options = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "INFERENCE_PRECISION_HINT": "f32",
    }
    request = openvino.Core().compile_model(converted, "CPU", options).create_infer_request()

    def call(row: tuple[torch.Tensor, ...]) -> Call:
        feed = [t.contiguous().numpy() for t in row]
        return lambda: request.infer(feed, share_inputs=True)

    return [call(row) for row in rows]


def _onnxruntime(model: torch.nn.Module, samples: Sequence[Bound]) -> list[Call]:
    from blade.backends.onnxruntime.library import LIBRARY

    onnxruntime: Any = LIBRARY.load()
    names, rows = _positional(model, samples)
    example = max(rows, key=lambda row: sum(t.numel() for t in row))
    dynamic = {
        name: dict.fromkeys(range(tensor.dim()), torch.export.Dim.AUTO)
        for name, tensor in zip(names, example, strict=True)
    }
    if isinstance(model, torch.jit.ScriptModule):
        exported = _onnx_of_torchscript(model, names, example)
    else:
        program: Any = torch.onnx.export(
            model,
            (),
            kwargs=dict(zip(names, example, strict=True)),
            dynamo=True,
            dynamic_shapes=dynamic,
            input_names=list(names),
            verbose=False,
        )
        exported = program.model_proto.SerializeToString()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(exported, options, providers=["CPUExecutionProvider"])
    taken = [one.name for one in session.get_inputs()]  # unused inputs are removed

    def call(row: tuple[torch.Tensor, ...]) -> Call:
        every = dict(zip(names, row, strict=True))
        feed = {name: every[name].contiguous().numpy() for name in taken}
        return lambda: session.run(None, feed)

    return [call(row) for row in rows]


def _onnx_of_torchscript(
    model: torch.jit.ScriptModule, names: Sequence[str], example: tuple[torch.Tensor, ...]
) -> bytes:
    """ONNX by the exporter that reads TorchScript, with any sizes."""
    any_size = {
        name: {axis: f"{name}_{axis}" for axis in range(tensor.dim())}
        for name, tensor in zip(names, example, strict=True)
    }
    with TemporaryDirectory() as folder:
        file = Path(folder, "model.onnx")
        torch.onnx.export(
            model, example, file, dynamo=False, input_names=list(names), dynamic_axes=any_size
        )
        return file.read_bytes()


def _inductor(model: torch.nn.Module, samples: Sequence[Bound]) -> list[Call]:
    """``torch.compile`` with dynamic shapes; of TorchScript, which it calls as it is, after torch's conversion."""
    if isinstance(model, torch.jit.ScriptModule):
        return _inductor_of_torchscript(model, samples)
    compiled = torch.compile(model, dynamic=True)

    def call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        return lambda: compiled(*args, **kwargs)

    return [call(*bound) for bound in samples]


def _inductor_of_torchscript(model: torch.jit.ScriptModule, samples: Sequence[Bound]) -> list[Call]:
    """One program per sample: the converter keeps its sizes."""
    from torch._export.converter import TS2EPConverter  # takes long

    _, rows = _positional(model, samples)

    def call(row: tuple[torch.Tensor, ...]) -> Call:
        program = TS2EPConverter(model, row, {}).convert()
        compiled = torch.compile(program.module())
        return lambda: compiled(*row)

    return [call(row) for row in rows]


def _positional(model: torch.nn.Module, samples: Sequence[Bound]) -> tuple[tuple[str, ...], Rows]:
    """The samples in the order of ``forward``'s parameters; other libraries take tensors only."""
    from blade.capture.inputs import normalize
    from blade.capture.model import signature_of

    given = [kwargs if kwargs else args for args, kwargs in samples]
    call, rows = normalize(signature_of(model), given, bake=True)
    if any(not isinstance(entry, torch.Tensor) for row in rows for entry in row):
        raise Refused(Code.CONVERSION_FAILED, "an argument holds more than a tensor")
    return call.names, rows


# (how to prepare it, the packages it needs)
PEERS: dict[
    str, tuple[Callable[[torch.nn.Module, Sequence[Bound]], list[Call]], tuple[str, ...]]
] = {
    "openvino": (_openvino, ("openvino",)),
    "onnxruntime": (_onnxruntime, ("onnxruntime", "onnx", "onnxscript")),
    "inductor": (_inductor, ("torch",)),
}
