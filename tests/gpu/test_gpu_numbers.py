# SPDX-License-Identifier: Apache-2.0
"""Numbers that Python has, beside tensors on CUDA: engines take them, and nobody waits for the device."""

import warnings
from collections.abc import Callable

import pytest
import torch
from entrances import CONFIG
from torch import nn

import blade
from blade.core.reason import Code

pytestmark = [pytest.mark.gpu, pytest.mark.needs("runtime")]


class Normed(nn.Module):
    """Scales by a number that is computed from elements."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * (0.1 / max(float(x.float().pow(2).mean().sqrt()), 1e-5))
        return torch.relu(self.linear(x)) + 1


class Step(nn.Module):
    """A tensor of the CPU without dimensions, as samplers have for their noise levels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x) * sigma + 1) - torch.sigmoid(x / (sigma + 1))
        return x


def synchronizations(call: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(one.message) for one in seen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_number_read_from_a_tensor_times_a_tensor(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Normed().eval().cuda().to(dtype)
    optimized = blade.optimize(model, torch.randn(8, 16, device="cuda", dtype=dtype), CONFIG)
    report = blade.report(optimized)
    assert not [r for r in report.reasons if r.code is Code.UNSUPPORTED_DEVICE], report.reasons
    ops = [op for one in report.clusters if one.backend == "disc" for op in one.ops]
    assert "aten::mul" in ops and "aten::linear" in ops, report.clusters
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    with torch.no_grad():
        for rows in (8, 1, 5):
            for scale in (1e-6, 0.1, 1.0, 100.0):
                x = (torch.randn(rows, 16, device="cuda") * scale).to(dtype)
                torch.testing.assert_close(optimized(x), model(x), rtol=tolerance, atol=tolerance)
        x = torch.randn(8, 16, device="cuda", dtype=dtype)
        for _ in range(3):
            optimized(x)
        wait = synchronizations(lambda: model(x))
        assert synchronizations(lambda: optimized(x)) == wait == 1
    assert all(one["fallbacks"] == 0 for one in blade.stats(optimized).values())


def test_a_number_of_the_caller_in_graphs() -> None:
    """Each replay reads this call's number."""
    model = Step().eval().cuda()
    sample = torch.randn(3, 8, device="cuda"), torch.tensor(0.7)
    optimized = blade.optimize(model, sample, CONFIG)
    assert [one.backend for one in blade.report(optimized).clusters] == ["disc"]
    x = torch.randn(5, 8, device="cuda")
    with torch.no_grad():
        for k in range(12):
            sigma = torch.tensor(0.3 * k)
            torch.testing.assert_close(optimized(x, sigma), model(x, sigma), rtol=1e-4, atol=1e-5)
        assert synchronizations(lambda: optimized(x, sigma)) == 0
    [counts] = blade.stats(optimized).values()
    assert counts["engine_runs"] == 13 and counts["graph_replays"] > 0, counts


def test_a_number_on_the_device_runs_the_original() -> None:
    model = Step().eval().cuda()
    optimized = blade.optimize(model, (torch.randn(3, 8).cuda(), torch.tensor(0.7)), CONFIG)
    x, sigma = torch.randn(5, 8).cuda(), torch.tensor(0.4).cuda()
    with torch.no_grad():
        torch.testing.assert_close(optimized(x, sigma), model(x, sigma))
    [counts] = blade.stats(optimized).values()
    assert counts[Code.GUARD_DEVICE.value] == 1
