# SPDX-License-Identifier: Apache-2.0
"""Names of dtypes in a program text (``program/FORMAT.md``)."""

import torch

DTYPES: dict[torch.dtype, str] = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.float8_e4m3fn: "f8",
    torch.bool: "bool",
    torch.complex64: "c64",
    torch.complex128: "c128",
}
