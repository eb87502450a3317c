# SPDX-License-Identifier: Apache-2.0
"""Reads an ONNX model: from a file or a ModelProto, checked, of a known opset, its own functions inlined.

model = read_model("model.onnx")
model.proto.graph, model.opsets, model.read(tensor)      # external data is mapped, not read
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.inliner
import onnx.version_converter
from google.protobuf.message import DecodeError
from onnx.external_data_helper import ExternalDataInfo, uses_external_data

from blade.errors import InputError

OLDEST, CONVERTED_FROM = 13, 1
"""The opset that the table begins with, and the oldest that onnx converts to it."""


@dataclass(frozen=True)
class OnnxSource:
    """``folder`` holds the files of the external data."""

    proto: onnx.ModelProto
    opsets: dict[str, int]
    folder: Path | None
    name: str

    def read(self, tensor: onnx.TensorProto) -> np.ndarray[Any, Any]:
        """The array of an initializer; its memory is the file's where the data is external."""
        if not uses_external_data(tensor):
            return onnx.numpy_helper.to_array(tensor)
        info = ExternalDataInfo(tensor)
        if self.folder is None:
            raise InputError(
                f"model: the initializer {tensor.name!r} is in the file {info.location!r}, and a ModelProto does not "
                "say where that is; give the path of the model, or load it with onnx.load, which reads the data."
            )
        path = self.folder / info.location
        _check_inside(path, self.folder, tensor.name)
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
        shape = tuple(tensor.dims)
        if not path.is_file():
            raise InputError(
                f"model: the initializer {tensor.name!r} is in the file {path}, which does not exist; it belongs "
                "beside the model."
            )
        if dtype.itemsize * int(np.prod(shape)) == 0 or tensor.data_type in _PACKED:
            loaded = onnx.TensorProto()
            loaded.CopyFrom(tensor)
            onnx.external_data_helper.load_external_data_for_tensor(loaded, str(self.folder))
            return onnx.numpy_helper.to_array(loaded)
        if os.path.getsize(path) < (info.offset or 0) + dtype.itemsize * int(np.prod(shape)):
            raise InputError(
                f"model: the file {path} is too short for {tensor.name!r}; copy it again."
            )
        return np.memmap(path, dtype, mode="c", offset=info.offset or 0, shape=shape)


_PACKED = (
    onnx.TensorProto.INT4,
    onnx.TensorProto.UINT4,
    onnx.TensorProto.FLOAT4E2M1,
    onnx.TensorProto.STRING,
)


def read_model(source: Any) -> OnnxSource:
    """``source`` is a path or a ``ModelProto``; raises ``InputError`` for what is no model that can be imported."""
    if isinstance(source, onnx.ModelProto):
        proto, folder = source, None
        name = proto.graph.name or "the ModelProto"
    else:
        path = Path(source)
        proto, folder, name = _load(path), path.resolve().parent, path.name
    if not proto.HasField("graph") or not proto.graph.output:
        raise InputError(f"model: {name} has no graph with outputs; is it an ONNX model?")
    proto = _with_known_opset(proto, name)
    if proto.functions:
        proto = onnx.inliner.inline_local_functions(proto)
    if any(one.domain == "ai.onnx.preview.training" for one in proto.opset_import):
        raise InputError(f"model: {name} is a training graph; only inference is optimized.")
    opsets = {_domain(one.domain): one.version for one in proto.opset_import}
    return OnnxSource(proto, opsets, folder, name)


def _load(path: Path) -> onnx.ModelProto:
    if path.is_dir():
        raise InputError(f"model: {path} is a folder; name the .onnx file in it.")
    if not path.exists():
        raise InputError(f"model: there is no file {path}.")
    try:
        proto = onnx.load(str(path), load_external_data=False)
    except (DecodeError, ValueError, OSError) as error:
        raise InputError(f"model: {path} is no ONNX model ({error}).") from error
    return proto


def _with_known_opset(proto: onnx.ModelProto, name: str) -> onnx.ModelProto:
    """``proto`` if its opset is in the table; older models are converted by onnx."""
    newest = onnx.defs.onnx_opset_version()
    found = [one.version for one in proto.opset_import if _domain(one.domain) == ""]
    if not found:
        if proto.opset_import:
            return proto
        raise InputError(f"model: {name} names no opset; is it an ONNX model?")
    if found[0] > newest:
        raise InputError(
            f"model: {name} has opset {found[0]}, and the installed onnx {onnx.__version__} knows {CONVERTED_FROM} to "
            f"{newest}; install a newer onnx, or export the model with an older opset."
        )
    if found[0] >= OLDEST:
        return proto
    if found[0] < CONVERTED_FROM:
        raise InputError(
            f"model: {name} has opset {found[0]}; models of opset {CONVERTED_FROM} to {newest} can be read. Export "
            "it again."
        )
    if found[0] < 9 and any(node.op_type == "Scan" for node in proto.graph.node):
        raise InputError(
            f"model: {name} has a Scan of opset 8, which has a batch axis; export it with opset {OLDEST} or later."
        )
    try:
        return onnx.version_converter.convert_version(proto, OLDEST)
    except (RuntimeError, onnx.version_converter.ConvertError) as error:
        raise InputError(
            f"model: {name} has opset {found[0]}, and onnx cannot convert it to {OLDEST} ({error}); export it with "
            f"opset {OLDEST} or later."
        ) from error


def _domain(name: str) -> str:
    return "" if name == "ai.onnx" else name


def _check_inside(path: Path, folder: Path, tensor: str) -> None:
    """A file may not name data outside of its folder."""
    if not path.resolve().is_relative_to(folder.resolve()):
        raise InputError(
            f"model: the initializer {tensor!r} is said to be in {path}, outside of the folder of the model; external "
            "data has to be beside it."
        )
