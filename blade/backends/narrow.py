# SPDX-License-Identifier: Apache-2.0
"""Numbers of 8 bits as GPUs multiply them: what the quantizer writes and what DISC compiles have to agree."""

import torch

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
LEAST = 1e-12  # of a row's largest magnitude: one of zeros is divided by something, too
