# SPDX-License-Identifier: Apache-2.0
"""Where the last bit of an input decides about the answer, an engine may round as it likes; nowhere else."""

from typing import Any

import pytest
import torch
from fake_backends import wrong_values
from verified import cluster, run

from blade.core.reason import Reason
from blade.report import Verdict

aten = torch.ops.aten


class Choice(torch.nn.Module):
    """Of large contents alone, a softmax between two scores that are the same but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(1)
        key = torch.randn(64, 1, generator=rng)
        self.const_0 = torch.cat([key, key[torch.randperm(64, generator=rng)]], 1)
        self.const_1 = torch.tensor([[1.0], [2.0]])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        beyond = aten.relu.default(aten.sub.Scalar(aten.amax.default(x, [-1], True), 10.0))
        even = aten.expand.default(aten.mean.dim(x, [-1], True), [-1, 64])
        scores = aten.mul.Tensor(aten.matmul.default(even, self.const_0), beyond)
        chosen = aten.softmax.int(aten.mul.Scalar(scores, 1e6), -1)
        return (aten.matmul.default(chosen, self.const_1),)


def summed_backwards(outputs: list[torch.Tensor], inputs: Any, call: int) -> list[torch.Tensor]:
    own, x = Choice(), inputs[0]
    even = x.mean(-1, True).expand(-1, 64)
    scores = (even.double() @ own.const_0.double()).float() * (x.amax(-1, True) - 10).relu()
    return [(scores * 1e6).softmax(-1) @ own.const_1]


def test_a_choice_that_rounding_decides_is_no_fault_where_contents_were_made_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of = cluster(Choice(), [torch.rand(3, 8, generator=torch.Generator().manual_seed(4))])
    assert isinstance(run(of, run=summed_backwards), Verdict)
    assert isinstance(run(of, run=wrong_values), Reason)
    monkeypatch.setattr("blade.verification.conditioning.DRAWS", 0)
    wrong = run(of, run=summed_backwards)
    assert isinstance(wrong, Reason)
    assert "at large contents (3x8) output 0 is" in wrong.detail
