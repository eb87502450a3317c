# SPDX-License-Identifier: Apache-2.0
"""Samples of the op table as programs for a GPU, interpreted at many shapes, against eager torch.

Every fourth of them; all take a quarter of an hour: BLADE_OP_SAMPLES=all pytest ...
"""

import os

import pytest
from op_compare import different, eager, exact, sizes_of
from op_samples import Sample, inputs
from op_table import EVERY
from op_trace import trace
from run_program import GuardFailed, compile_to_program

from blade.backends.disc.frontend.lower import lower
from blade.backends.disc.gpu.passes.pipeline import FORMS

pytestmark = pytest.mark.needs("triton_interpreter")


# An op that torch has on CPU alone.
SAMPLES = [sample for sample in EVERY if not sample.name.startswith("flash attention")]
if os.environ.get("BLADE_OP_SAMPLES") != "all":
    SAMPLES = SAMPLES[::4]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.name)
def test_a_program_for_gpu_answers_like_eager(sample: Sample) -> None:
    sizes = list(sizes_of(sample))[:4]  # the usual ones, odd ones, all 1, and one of 0
    dynamic = [s.dynamic() for s in sample.specs]
    gm, shape_env = trace(sample.function, inputs(sample, sizes[0]), dynamic)
    program = compile_to_program(lower(gm, shape_env, forms=FORMS))
    wrong = []
    for size in sizes:
        tensors = inputs(sample, size)
        want = eager(sample, tensors)
        try:
            got = program(*tensors)
        except (GuardFailed, RuntimeError, IndexError):  # torch's, of a call; or the original runs
            if want is not None and min(size.values(), default=2) > sample.refuses:
                raise
            continue
        if want is None:
            wrong.append(f"{size}: answers where eager raises")
        elif text := different(got, want, exact(sample, tensors)):
            wrong.append(f"{size}: {text}")
    assert not wrong, "\n".join(wrong)
