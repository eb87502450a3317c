# SPDX-License-Identifier: Apache-2.0
"""Limits of 8-bit products on GPUs, shared by the quantizer and DISC, which must agree."""

import torch

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
LEAST = 1e-12  # lower bound of a row's largest magnitude: avoids a division by 0
