# SPDX-License-Identifier: Apache-2.0
"""Every sample of the op table, those of training among them, compiled by DISC for this GPU and run at many shapes.

No capture, no clusters, no verification: the engine itself answers, or the test fails.
"""

import pytest
import torch
from ask_eager import skip_what_eager_refuses
from gpu_left import LEFT
from op_engine import check
from op_samples import Sample
from op_table import EVERY

from blade.backends.disc.target.gpu import target_of
from blade.errors import Refused

pytestmark = [pytest.mark.gpu, pytest.mark.needs("runtime")]


@pytest.mark.parametrize("sample", [s for s in EVERY if s.name not in LEFT], ids=lambda s: s.name)
def test_answers_on_cuda_are_eagers(sample: Sample) -> None:
    skip_what_eager_refuses(sample)
    _, wrong = check(sample, target_of(torch.device("cuda")), "cuda")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", LEFT)
def test_what_is_refused_on_cuda_is_said(name: str) -> None:
    [sample] = [s for s in EVERY if s.name == name]
    with pytest.raises(Refused, match=LEFT[name]):
        check(sample, target_of(torch.device("cuda")), "cuda")
