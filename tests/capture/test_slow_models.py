# SPDX-License-Identifier: Apache-2.0
"""A model whose call takes seconds is asked at fewer inputs, most of them smaller than the sample."""

import pytest
import torch
from torch import nn

import blade
from blade.capture.references import ReferenceRuns, run_references
from blade.config import Config


class Halves(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.avg_pool2d(x, 2).flatten(1).cumsum(1)


def _asked(x: torch.Tensor) -> ReferenceRuns:
    return run_references(Halves().eval(), x, Config(), bake=True)


def _elements(seen: ReferenceRuns) -> list[int]:
    return [one.sample[0].numel() for one in seen.references]


def test_it_is_asked_at_fewer_and_smaller_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1, 3, 64, 48)
    quick = _asked(x)
    monkeypatch.setattr("blade.capture.references.SLOW_S", -1.0)
    slow = _asked(x)
    assert sum(_elements(slow)) < 0.75 * sum(_elements(quick))
    assert max(_elements(slow)) == 2 * x.numel()  # a batch of 2
    varied = {axis for one in slow.references for axis in one.axes}
    assert varied == {axis for one in quick.references for axis in one.axes}


def test_it_is_served_at_larger_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blade.capture.references.SLOW_S", -1.0)
    optimized = blade.optimize(Halves().eval(), torch.randn(1, 3, 64, 48))
    for sizes in ((1, 3, 64, 48), (5, 3, 128, 70)):
        x = torch.randn(sizes)
        torch.testing.assert_close(optimized(x), Halves()(x))
