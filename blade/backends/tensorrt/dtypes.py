# SPDX-License-Identifier: Apache-2.0
"""Element types that cross an engine's boundary, torch's and TensorRT's."""

from typing import Any

import torch

# TensorRT's name of each. float64 is missing: the parser would silently round it to float32.
NAMES: dict[torch.dtype, str] = {
    torch.float32: "FLOAT",
    torch.float16: "HALF",
    torch.bfloat16: "BF16",
    torch.int64: "INT64",
    torch.int32: "INT32",
    torch.int8: "INT8",
    torch.uint8: "UINT8",
    torch.bool: "BOOL",
}
# Dtypes that ops may compute in; 8 bits exist only between QuantizeLinear and DequantizeLinear.
COMPUTES = frozenset(NAMES) - {torch.int8, torch.uint8}
TORCH: dict[str, torch.dtype] = {name: dtype for dtype, name in NAMES.items()}


def name_of(dtype: Any) -> str:
    """TensorRT's ``DataType`` as text: "FLOAT"."""
    return str(getattr(dtype, "name", dtype)).rpartition(".")[2]
