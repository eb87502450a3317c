# SPDX-License-Identifier: Apache-2.0
"""Every sample of the op table on CUDA: optimized, saved, loaded, at four sizes, against float64 on the CPU.

What DISC is to take it has to take: an op that quietly runs as before would pass every comparison.
"""

from collections.abc import Callable
from itertools import islice

import pytest
from gpu_left import LEFT
from gpu_models import DEVICE
from op_compare import sizes_of
from op_models import REFUSED, through
from op_samples import Sample
from op_table import SAMPLES

pytestmark = [pytest.mark.gpu, pytest.mark.needs("runtime")]

TRACED = [s for s in SAMPLES if s.name not in REFUSED]


@pytest.mark.parametrize("sample", TRACED, ids=lambda s: s.name)
def test_one_op_model_on_cuda(
    sample: Sample, record_property: Callable[[str, object], None]
) -> None:
    run = through(sample, "optimize", list(islice(sizes_of(sample), 4)), DEVICE)
    codes = sorted({str(r.code) for r in run.reasons()})
    record_property("disc_on_cuda", "taken" if run.served() else ", ".join(codes))
    assert bool(run.served()) != (sample.name in LEFT), run.reasons()
