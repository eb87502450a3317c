# SPDX-License-Identifier: Apache-2.0
"""Recording the calls of a module."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import blade
from blade.capture.samples import weighted
from blade.config import Config
from blade.errors import InputError


@torch.no_grad()
def test_calls_become_samples_with_counts() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    with blade.record(model) as samples:
        for n in (1, 3, 3, 5, 3):
            model(torch.full((n, 4), float(n)))
    assert [one[0].shape[0] for one in samples] == [1, 3, 5] and samples.counts == [1, 3, 1]
    assert samples.skipped == 0 and not model._forward_pre_hooks
    optimized = blade.optimize(model, samples, Config(optimization_pipeline="disc"))
    x = torch.rand(9, 4)
    torch.testing.assert_close(optimized(x), model(x))


@torch.no_grad()
def test_parts_of_a_pipeline_keywords_and_the_bound() -> None:
    lstm = nn.LSTM(4, 4).eval()
    pipe = SimpleNamespace(model=lstm, name="pipe")
    with blade.record(pipe, "model", limit_mb=200 / 2**20) as calls:
        x = torch.rand(2, 4)
        pipe.model(x, hx=(torch.zeros(1, 4), torch.zeros(1, 4)))
        x.zero_()
        pipe.model(torch.rand(100, 4))
    assert calls["model"].skipped == 1
    [sample] = calls["model"]
    assert sample.keys() == {"input", "hx"} and sample["input"].sum() > 0
    for model, parts, why in (
        (pipe, ("name",), "pipe|name"),
        (pipe, (), "model: a torch.nn.Module"),
    ):
        with pytest.raises(InputError, match=why), blade.record(model, *parts):
            pass
    with pytest.raises(InputError, match="limit_mb"):
        blade.record(lstm, limit_mb=0)


@torch.no_grad()
def test_a_cache_is_kept_as_it_was_before_the_call() -> None:
    transformers = pytest.importorskip("transformers")

    class Growing(nn.Module):
        def forward(self, x: torch.Tensor, past: Any) -> torch.Tensor:
            return past.update(x, x + 1, 0)[1]  # type: ignore[no-any-return]

    model, past = Growing().eval(), transformers.DynamicCache()
    with blade.record(model) as samples:
        for _ in range(2):
            model(torch.rand(1, 1, 2, 4), past)
    assert [one[1].get_seq_length() for one in samples] == [0, 2]
    assert past.get_seq_length() == 4


class Short(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] > 4 else x + 1


@torch.no_grad()
def test_counts_are_weights_unless_paths_add_samples() -> None:
    model = Short().eval()
    with blade.record(model) as samples:
        for n in (2, 3, 3):
            model(torch.rand(n, 2))
    optimized = blade.optimize(model, samples, Config(optimization_pipeline="disc"))
    for n in (1, 3, 6):
        x = torch.rand(n, 2)
        torch.testing.assert_close(optimized(x), model(x))
    assert len(blade.report(optimized).inputs) >= len(samples)
    weights = weighted(samples, 2, Config()).sample_weights
    assert weights == (1.0, 2.0) and weighted(samples, 3, Config()).sample_weights is None
