# SPDX-License-Identifier: Apache-2.0
"""Engines that run one node of an imported ONNX model in ONNX Runtime, on the CPU.

    engine, kinds = node_engine("TfIdfVectorizer", model, inputs, kinds)     # BackendError: it cannot be run
    outputs = engine.try_execute([x])

Tensors of unsigned integers, which the runtime does not know, are passed as signed ones with the same bits.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from blade.backends.onnxruntime.library import LIBRARY
from blade.backends.shared.archive import EngineArchive, read
from blade.backends.shared.onnx.self_contained import check_model
from blade.errors import BackendError
from blade.program.dtypes import DTYPES
from blade.runtime.engine import Runner, make_engine

NAME = "onnx_node"
_MODEL = "model.onnx"
_WHO = "ONNX Runtime"

DOMAINS = ("", "ai.onnx", "com.microsoft")
_READS_FILES = b"EPContext"
"""The op of com.microsoft that names files."""

UNSIGNED = {"uint16": "int16", "uint32": "int32", "uint64": "int64"}
"""Types that are passed as others of the same size."""


def node_engine(
    name: str, model: bytes, inputs: Sequence[tuple[torch.dtype, int]], kinds: Sequence[str]
) -> tuple[torch.ScriptObject, list[tuple[str, int]]]:
    """The engine, and the library's name of the type of each output, with its rank, 0 if that is not known.

    ``inputs``: dtype, as it is passed, and rank of each. ``kinds``: numpy's name of each input's own type. Raises
    ``BackendError`` if the library is missing or cannot run ``model``.
    """
    if (why := LIBRARY.why_not_loadable()) is not None:
        raise BackendError(why)
    _check(model)
    found = [(one.type, len(one.shape or ())) for one in _session(model).get_outputs()]
    lines = ["blade.disc 1", "isa", f"inputs {len(inputs)}"]
    lines += [f"input {k} {DTYPES[dtype]} cpu {rank}" for k, (dtype, rank) in enumerate(inputs)]
    lines += [f"{section} 0" for section in ("registers", "guards", "slots", "instructions")]
    program = "\n".join([*lines, "outputs 0", "end"]) + "\n"
    payload = EngineArchive({}, {"kinds": list(kinds)}, {_MODEL: model}).to_bytes()
    return make_engine(name, NAME, program, payload, (), {"max_failures": 1 << 30}), found


def load(name: str, payload: torch.Tensor, constants: list[torch.Tensor], program: str) -> Runner:
    """The runner of an engine; ``BackendError`` if the library is missing."""
    if (why := LIBRARY.why_not_loadable()) is not None:
        raise BackendError(why)
    archive = read(payload.numpy().tobytes(), {}, _WHO, {_MODEL})
    model = archive.files.get(_MODEL, b"")
    kinds = archive.facts.get("kinds")
    if not isinstance(kinds, list) or not all(isinstance(one, str) for one in kinds):
        raise BackendError(f"the node {name} is damaged (its types are no texts).")
    _check(model)
    return _NodeRunner(_session(model), [np.dtype(one) for one in kinds])


def _check(model: bytes) -> None:
    check_model(model, (), _WHO, DOMAINS)
    if _READS_FILES in model:
        raise BackendError(f"the model for {_WHO} is not used: it may read files.")


class _NodeRunner:
    """A session, which several threads may use at once."""

    def __init__(self, session: Any, kinds: Sequence[np.dtype[Any]]) -> None:
        self._session = session
        self._kinds = kinds
        self._names = [one.name for one in session.get_inputs()]

    def __call__(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        arrays = [
            one.detach().contiguous().numpy().view(kind) for one, kind in zip(inputs, self._kinds)
        ]
        results = self._session.run(None, dict(zip(self._names, arrays)))
        return [_tensor(one) for one in results]


def _tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    signed = UNSIGNED.get(array.dtype.name)
    array = np.ascontiguousarray(array).reshape(array.shape)
    return torch.from_numpy(array if signed is None else array.view(signed))


def _session(model: bytes) -> Any:
    ort: Any = LIBRARY.load()
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = torch.get_num_threads()
    try:
        return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except (RuntimeError, ValueError, ort.capi.onnxruntime_pybind11_state.Fail) as error:
        raise BackendError(f"{_WHO} cannot run it: {error}") from error
    except ort.capi.onnxruntime_pybind11_state.NotImplemented as error:
        raise BackendError(f"{_WHO} has no kernel for it.") from error
    except ort.capi.onnxruntime_pybind11_state.InvalidGraph as error:
        raise BackendError(f"{_WHO} does not know it: {error}") from error
