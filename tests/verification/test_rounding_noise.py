# SPDX-License-Identifier: Apache-2.0
"""Norms of numbers that are all but equal: nothing but rounding comes out, and an engine may round as it likes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_backends import wrong_values
from torch import nn
from verified import cluster, run

import blade
from blade.core.cluster import Cluster
from blade.core.reason import Code, Reason
from blade.report import Verdict
from blade.verification.generators import Generators
from blade.verification.rounding_noise import RoundingNoise, perturb_by_ulp
from blade.verification.tolerance import errors

aten = torch.ops.aten
EPS = 1e-5


class NormOfConvolution(nn.Module):
    """At small contents and zeros, of planes of nothing but a bias."""

    def __init__(self) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(1)
        self.const_0 = torch.randn(4, 3, 3, 3, generator=rng)
        self.const_1 = torch.randn(4, generator=rng)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        y = aten.convolution.default(
            x, self.const_0, self.const_1, [1, 1], [0, 0], [1, 1], False, [0, 0], 1
        )
        return (aten.instance_norm.default(y, None, None, None, None, True, 0.1, EPS, False),)


def mean_in_order(outputs: list[torch.Tensor], inputs: Any, call: int) -> list[torch.Tensor]:
    """Its mean summed one number after the other, which is off by more than one rounding."""
    own = NormOfConvolution()
    y = nn.functional.conv2d(inputs[0], own.const_0, own.const_1)
    total = torch.zeros(y.shape[:2])
    for number in y.flatten(2).unbind(-1):
        total += number
    mean = (total / y[0, 0].numel())[..., None, None]
    return [(y - mean) * torch.rsqrt((y - mean).square().mean((2, 3), keepdim=True) + EPS)]


def a_mean_off(outputs: list[torch.Tensor], inputs: Any, call: int) -> list[torch.Tensor]:
    return [out + 1e-2 for out in outputs]


def conv_norm() -> Cluster:
    return cluster(
        NormOfConvolution(), [torch.randn(2, 3, 20, 20, generator=torch.Generator().manual_seed(3))]
    )


def test_a_mean_may_be_summed_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    of = conv_norm()
    assert isinstance(run(of, run=mean_in_order), Verdict)
    for fault in (wrong_values, a_mean_off):
        assert isinstance(run(of, run=fault), Reason)
    monkeypatch.setattr("blade.verification.conditioning.DRAWS", 0)
    wrong = run(of, run=mean_in_order)
    assert isinstance(wrong, Reason) and wrong.code is Code.WRONG_VALUES
    assert "contents (2x3x20x20) output 0 is" in wrong.detail


def test_what_cancels_out_is_rounding_alone() -> None:
    noise, truth = torch.tensor([3e-6, -1e-6]), torch.tensor([1e-15, 0.0], dtype=torch.float64)
    assert errors(torch.zeros(2), noise, truth).error == 0
    assert errors(torch.tensor([-2e-6, 1e-6]), noise, truth).error == 0
    assert errors(torch.tensor([1e-5, 0.0]), noise, truth).error > 1
    far = torch.tensor([1.0, 2.0], dtype=torch.float64)  # that is another function, not nothing
    assert errors(torch.zeros(2), noise, far).error == 1


@pytest.mark.parametrize(
    ("call", "sizes"),
    [
        (lambda x: aten.group_norm.default(x, 2, None, None, EPS), (2, 4, 9)),
        (lambda x: aten.native_group_norm.default(x, None, None, 2, 4, 9, 2, EPS)[0], (2, 4, 9)),
        (lambda x: aten.layer_norm.default(x, [4, 9]), (2, 4, 9)),
        (lambda x: aten.native_layer_norm.default(x, [9], None, None, EPS)[0], (4, 9)),
        (lambda x: aten.matmul.default(x, x), (9, 9)),
    ],
)
def test_sums_move_by_roundings(
    call: Callable[[torch.Tensor], torch.Tensor], sizes: tuple[int, ...]
) -> None:
    class One(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
            return (call(x),)

    x = torch.randn(sizes, generator=torch.Generator().manual_seed(0))
    gm = torch.fx.symbolic_trace(One())
    [want], [moved] = gm(x), RoundingNoise(gm, 0)(x)
    assert 0 < (moved - want).abs().max() < 100 * torch.finfo(torch.float32).eps * want.abs().max()
    assert torch.equal(RoundingNoise(gm, 0)(x)[0], moved)


def test_a_mean_moves_by_as_many_as_it_may_be_off() -> None:
    class Mean(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
            return (aten.mean.dim(x, [-1]),)

    x = torch.full((3, 10000), 0.3)
    gm = torch.fx.symbolic_trace(Mean())
    moved = (RoundingNoise(gm, 0)(x)[0] / 0.3 - 1).abs() / torch.finfo(torch.float32).eps
    assert ((moved > 90) & (moved < 110)).all()


def test_what_is_no_sum_does_not_move() -> None:
    class Places(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
            return (aten.floor.default(aten.mul.Scalar(x, 2.0)),)

    x = torch.arange(8.0)
    assert torch.equal(RoundingNoise(torch.fx.symbolic_trace(Places()), 0)(x)[0], 2 * x)
    assert perturb_by_ulp([torch.tensor(3), None], Generators(0)) == [torch.tensor(3), None]


@pytest.mark.parametrize("padding", [0, 1])
def test_models_that_end_with_instance_norm_are_served(padding: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=padding),
        nn.InstanceNorm2d(8, affine=True),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=padding),
        nn.InstanceNorm2d(8),
    ).eval()
    config = blade.Config(timing=False, optimization_pipeline="disc", cache=False)
    optimized = blade.optimize(model, torch.randn(2, 3, 16, 16), config)
    [only] = blade.report(optimized).clusters
    assert only.backend == "disc"
    x = torch.randn(1, 3, 20, 12)
    torch.testing.assert_close(optimized(x), model(x), rtol=1e-4, atol=1e-5)
