# SPDX-License-Identifier: Apache-2.0
"""ONNX's element types and torch's: the types that both have, and tensors of them."""

from typing import Any

import numpy as np
import onnx
import torch

from blade.importers.onnx.emit.errors import NotImported

DTYPES: dict[int, torch.dtype] = {
    onnx.TensorProto.FLOAT: torch.float32,
    onnx.TensorProto.UINT8: torch.uint8,
    onnx.TensorProto.INT8: torch.int8,
    onnx.TensorProto.UINT16: torch.uint16,
    onnx.TensorProto.INT16: torch.int16,
    onnx.TensorProto.INT32: torch.int32,
    onnx.TensorProto.INT64: torch.int64,
    onnx.TensorProto.BOOL: torch.bool,
    onnx.TensorProto.FLOAT16: torch.float16,
    onnx.TensorProto.DOUBLE: torch.float64,
    onnx.TensorProto.UINT32: torch.uint32,
    onnx.TensorProto.UINT64: torch.uint64,
    onnx.TensorProto.COMPLEX64: torch.complex64,
    onnx.TensorProto.COMPLEX128: torch.complex128,
    onnx.TensorProto.BFLOAT16: torch.bfloat16,
    onnx.TensorProto.FLOAT8E4M3FN: torch.float8_e4m3fn,
    onnx.TensorProto.FLOAT8E4M3FNUZ: torch.float8_e4m3fnuz,
    onnx.TensorProto.FLOAT8E5M2: torch.float8_e5m2,
    onnx.TensorProto.FLOAT8E5M2FNUZ: torch.float8_e5m2fnuz,
}
"""ONNX has further types that torch computes nothing in: strings, and integers and floats of 4 bits and fewer."""

ELEMENT_TYPES = {dtype: number for number, dtype in DTYPES.items()}

WIDE_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
"""Types for which torch has few kernels: most ops compute in int64."""

_BYTES = {1: torch.uint8, 2: torch.int16}


def torch_dtype(element_type: int) -> torch.dtype:
    """Raises ``NotImported`` for a type that torch lacks."""
    if element_type not in DTYPES:
        name = onnx.TensorProto.DataType.Name(element_type)
        raise NotImported(f"The element type {name} has no tensor in torch.")
    return DTYPES[element_type]


def to_tensor(array: np.ndarray[Any, Any], dtype: torch.dtype) -> torch.Tensor:
    """``array`` as a tensor of ``dtype``, in the same memory where that can be."""
    array = np.ascontiguousarray(array).reshape(array.shape)
    if not array.flags.writeable:
        array = array.copy()
    if dtype in (torch.bfloat16, *_FLOAT8):
        raw = array.view(np.int16 if array.dtype.itemsize == 2 else np.uint8)
        return torch.from_numpy(raw).view(dtype)
    return torch.from_numpy(array)


def to_array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A tensor as numpy's array, in ml_dtypes where numpy has no such type."""
    tensor = tensor.detach().cpu()
    if tensor.dtype not in (torch.bfloat16, *_FLOAT8):
        return tensor.numpy()
    raw = tensor.contiguous().view(_BYTES[tensor.element_size()]).numpy()
    return raw.view(onnx.helper.tensor_dtype_to_np_dtype(ELEMENT_TYPES[tensor.dtype]))


def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    found: np.dtype[Any] = onnx.helper.tensor_dtype_to_np_dtype(ELEMENT_TYPES[dtype])
    return found


_FLOAT8 = (
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FLOAT8 = _FLOAT8
