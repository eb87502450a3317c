# SPDX-License-Identifier: Apache-2.0
"""The importer as a backend of the package onnx, for its tests.

OnnxBackend.prepare(model).run([array, ...])        # the outputs, as arrays, lists of them, or None
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import torch
from onnx.backend.base import Backend as OnnxBackendBase
from onnx.backend.base import BackendRep

from blade.importers.onnx.emit.dtypes import DTYPES, to_array, to_tensor
from blade.importers.onnx.import_model import ImportedModel, import_model


class PreparedModel(BackendRep):
    """An imported model that takes and returns arrays."""

    def __init__(self, imported: ImportedModel) -> None:
        self.imported = imported

    def run(self, inputs: Sequence[Any], **kwargs: Any) -> tuple[Any, ...]:
        given = [_to_torch(one) for one in inputs]
        with torch.no_grad():
            results = self.imported.module(*given)
        single = len(self.imported.outputs) == 1
        return tuple(_from_torch(one) for one in ((results,) if single else results))


class OnnxBackend(OnnxBackendBase):
    """``prepare`` imports a model."""

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> PreparedModel:
        return PreparedModel(import_model(model))

    @classmethod
    def supports_device(cls, device: str) -> bool:
        return device == "CPU"


def _to_torch(value: Any) -> Any:
    if value is None or isinstance(value, torch.Tensor):
        return value
    if isinstance(value, (list, tuple)):
        return [_to_torch(one) for one in value]
    array = np.asarray(value)
    return to_tensor(array, DTYPES[onnx.helper.np_dtype_to_tensor_dtype(array.dtype)])


def _from_torch(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return to_array(value)
    return [_from_torch(one) for one in value] if isinstance(value, (list, tuple)) else value
