# SPDX-License-Identifier: Apache-2.0
"""Every sample of the op table on CUDA: optimized, saved, loaded, at four sizes, against float64 on the CPU.

What DISC is to take it has to take: an op that quietly runs as before would pass every comparison.
"""

from collections.abc import Callable

import pytest
from ask_eager import DEVICE, skip_what_eager_refuses
from gpu_left import LEFT, UNLIKE
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
    skip_what_eager_refuses(sample)
    # where torch takes another way, which a trace does not know, nothing is promised
    sizes = [s for s in sizes_of(sample) if min(s.values(), default=2) > sample.refuses]
    run = through(sample, "optimize", sizes[:4], DEVICE)
    codes = sorted({str(r.code) for r in run.reasons()})
    record_property("disc_on_cuda", "taken" if run.served() else ", ".join(codes))
    why = {**LEFT, **UNLIKE}.get(sample.name)
    assert bool(run.served()) != bool(why), run.reasons()
    assert not why or any(why in r.detail for r in run.reasons()), run.reasons()
