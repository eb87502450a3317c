# SPDX-License-Identifier: Apache-2.0
"""What torch itself does not take on a GPU, where nobody has to answer: products of integers, some mixed types."""

import pytest
import torch
from op_compare import sizes_of, why_not
from op_models import placed
from op_samples import Sample, inputs

DEVICE = "cuda"


def skip_what_eager_refuses(sample: Sample) -> None:
    """Asked at the sample's sizes, which the CPU takes: an index out of bounds would end the CUDA context."""
    tensors = inputs(sample, next(sizes_of(sample)))
    assert not why_not(sample, tensors), sample.name
    with torch.device(DEVICE):
        why = why_not(sample, placed(tensors, DEVICE))
    if why:
        pytest.skip(f"eager on {DEVICE} refuses: {why}")
