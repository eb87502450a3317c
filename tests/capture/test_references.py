# SPDX-License-Identifier: Apache-2.0
"""Which inputs the model is run at: none twice, and none of many times the sample's work beside cheaper ones."""

from collections import Counter

import pytest
import torch
from torch import nn

from blade.capture.references import ReferenceRuns, run_references
from blade.config import Config


class Rowwise(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.softmax(-1) @ torch.ones(8, 4)


class AtLeast(Rowwise):
    """Accepts long rows only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] < 60:
            raise ValueError("too short")
        return super().forward(x)


def runs(model: nn.Module, *shape: int, config: Config | None = None) -> ReferenceRuns:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return run_references(model.eval(), x, config or Config(), bake=True)


def shapes(seen: ReferenceRuns) -> list[tuple[int, ...]]:
    return [tuple(one.sample[0].shape) for one in seen.references]


@pytest.mark.parametrize("config", [Config(), Config(dynamic_shapes={0: {0: (1, 4), 1: (2, 64)}})])
def test_no_input_is_a_reference_twice(config: Config) -> None:
    seen = runs(Rowwise(), 1, 48, 8, config=config)
    counts = Counter(repr((one.what, one.sample[0].tolist())) for one in seen.references)
    assert set(counts.values()) == {1}
    [at_sample] = [one for one in seen.references if torch.equal(one.sample[0], seen.samples[0][0])]
    assert at_sample.what == "sample 0"


def test_axes_of_a_reference_are_those_of_other_sizes() -> None:
    seen = runs(Rowwise(), 1, 48, 8)
    for one in seen.references:
        pairs = zip(one.sample[0].shape, (1, 48, 8), strict=True)
        assert one.axes == {(0, axis) for axis, (size, own) in enumerate(pairs) if size != own}


def test_all_sizes_together_cost_little() -> None:
    seen = runs(Rowwise(), 1, 48, 8)
    assert [tuple(probe[0].shape) for probe in seen.probes] == [(3, 48, 8), (1, 51, 8), (3, 16, 8)]
    assert {(3, 48, 8), (1, 51, 8), (3, 16, 8), (1, 1, 8)} <= set(shapes(seen))


def test_a_model_that_takes_no_small_ones_runs_at_large_ones() -> None:
    seen = runs(AtLeast(), 1, 96, 8)
    assert tuple(seen.probes[-1][0].shape) == (3, 99, 8)


def test_declared_ranges_are_kept() -> None:
    config = Config(dynamic_shapes={0: {0: (1, 4), 1: (40, 64)}})
    for probe in runs(Rowwise(), 1, 48, 8, config=config).probes:
        assert probe[0].shape[0] <= 4 and 40 <= probe[0].shape[1] <= 64


def test_where_the_work_hardly_grows_each_has_the_size_that_it_ran_at_alone() -> None:
    seen = runs(Rowwise(), 24, 48, 8)
    assert tuple(seen.probes[-1][0].shape) == (27, 51, 8)
