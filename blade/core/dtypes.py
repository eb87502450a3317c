# SPDX-License-Identifier: Apache-2.0
"""Groups of dtypes that many stages treat alike."""

import torch

HALVES = (torch.float16, torch.bfloat16)
"""Floats of 16 bits, whose sums are float32."""

COMPUTED = frozenset(
    (
        *(torch.float64, torch.float32, *HALVES, torch.complex64, torch.complex128),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
)
"""What torch computes with. Others (float8, unsigned ints of 16 bits and more) are stored and converted: most kernels
refuse them.
"""
