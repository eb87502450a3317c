# SPDX-License-Identifier: Apache-2.0
"""Cutting into windows, padded by arithmetic on sizes, as shifted-window models do it."""

import pytest
import torch

import blade

pytestmark = pytest.mark.needs("runtime", "torch_mlir")


class Windows(torch.nn.Module):
    """(batch, length, width) to rows of 7, each position's together in memory."""

    def __init__(self, size: int | torch.Tensor) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        missing = (self.size - x.shape[1] % self.size) % self.size
        y = torch.nn.functional.pad(x * 2, (0, 0, 0, missing))
        y = y.view(x.shape[0], (x.shape[1] + missing) // self.size, self.size, x.shape[2])
        return y.transpose(1, 2).contiguous() + 1


@pytest.mark.parametrize("size", [7, torch.tensor(7)])
def test_is_one_cluster_at_every_length(size: int | torch.Tensor) -> None:
    model = Windows(size).eval()
    config = blade.Config(timing=False, min_cluster_size=1)
    optimized = blade.optimize(model, torch.randn(2, 15, 6), config)
    report = blade.report(optimized)
    assert [c.backend for c in report.clusters] == ["disc"]
    assert not report.outside, report
    lengths = (14, 1, 20, 29)
    for length in lengths:
        x = torch.randn(3, length, 6)
        got, want = optimized(x), model(x)
        torch.testing.assert_close(got, want)
        assert got.is_contiguous() and want.is_contiguous()
    [counters] = blade.stats(optimized).values()
    assert counters["engine_runs"] == len(lengths)


class CutOff(torch.nn.Module):
    """(batch, length, width), in windows of 4 and back, without what pads the last one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        missing = (4 - x.shape[1] % 4) % 4
        y = torch.nn.functional.pad(x * 2, (0, 0, 0, missing))
        rows = y.view(-1, 4, x.shape[2]).transpose(1, 2).contiguous().tanh()
        whole = rows.transpose(1, 2).reshape(x.shape[0], -1, x.shape[2])
        return whole[:, : x.shape[1]].contiguous().sin()


def test_a_sample_without_padding_serves_lengths_with_it() -> None:
    model = CutOff().eval()
    config = blade.Config(timing=False, min_cluster_size=1, optimization_pipeline="disc")
    optimized = blade.optimize(model, torch.randn(2, 16, 6), config)
    for length in (16, 7, 20, 9):
        x = torch.randn(3, length, 6)
        got, want = optimized(x), model(x)
        torch.testing.assert_close(got, want)
        assert got.stride() == want.stride()
    [counters] = blade.stats(optimized).values()
    assert counters["engine_runs"] == 4
