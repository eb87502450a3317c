# SPDX-License-Identifier: Apache-2.0
"""Groups of dtypes that many stages treat alike."""

import torch

HALVES = (torch.float16, torch.bfloat16)
"""Floats of 16 bits, whose sums are float32."""
