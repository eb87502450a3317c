# SPDX-License-Identifier: Apache-2.0
"""Quantized numbers against the ops that define them and against plain loops."""

import pytest
import torch
from torch.ao.quantization.fx import _decomposed  # noqa: F401 - registers the ops

from blade.backends.quant.analysis.affine import (
    affine_of,
    group_of,
    quantize_weight,
    token_round_trip,
)

ops = torch.ops.quantized_decomposed


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("low", "high"), [(-1.0, 3.0), (0.5, 2.0), (-4.0, -1.0), (-1e-9, 1e-9)])
def test_an_activation_goes_through_the_same_ints_as_in_torch(
    symmetric: bool, low: float, high: float
) -> None:
    affine = affine_of(low, high, symmetric)
    x = torch.linspace(1.5 * low, 1.5 * high, 1001)
    form = (affine.scale, affine.zero_point, affine.low, affine.high, affine.dtype)
    q = ops.quantize_per_tensor(x, *form)
    assert torch.equal(affine.quantize(x), q)
    torch.testing.assert_close(affine.round_trip(x), ops.dequantize_per_tensor(q, *form))
    assert affine.round_trip(torch.zeros(1)) == 0  # zero is represented exactly
    inside = x[(x >= min(low, 0)) & (x <= max(high, 0))]
    assert (affine.round_trip(inside) - inside).abs().max() <= 0.501 * affine.scale


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("shift", [0.0, 2.0, -5.0])
def test_tokens_go_through_the_same_ints_as_in_torch(symmetric: bool, shift: float) -> None:
    x = normal(3, 5, 17) + shift
    x[0, 0] = 0
    choose = ops.choose_qparams_per_token if symmetric else ops.choose_qparams_per_token_asymmetric
    scale, zero = choose(x, torch.int8)
    q = ops.quantize_per_token(x, scale, zero, -128, 127, torch.int8)
    want = ops.dequantize_per_token(q, scale, zero, -128, 127, torch.int8, torch.float32)
    got = token_round_trip(x, symmetric)
    # a value in the middle between two ints may go either way in float32 and float64
    step = scale.to(torch.float32).expand_as(x)
    close = (got - want).abs() <= 1e-5 * (1 + want.abs())
    assert bool((close | ((got - want).abs() <= 1.001 * step)).all())
    assert close.double().mean() > 0.99


def test_a_weight_has_a_scale_per_output() -> None:
    weight = normal(6, 4, 3, 3) * torch.logspace(-3, 3, 6).view(6, 1, 1, 1)
    weight[2] = 0
    got = quantize_weight(weight)
    assert got.values.dtype == torch.int8
    assert got.values.shape == weight.shape
    for row, q, scale in zip(weight, got.values, got.scales, strict=True):
        peak = max(float(row.abs().max()), 127e-12)
        assert float(scale) == pytest.approx(peak / 127)
        want = [min(127, max(-127, round(v / float(scale)))) for v in row.flatten().tolist()]
        assert (q.flatten() - torch.tensor(want)).abs().max() <= 1
        assert (q * scale - row).abs().max() <= 0.501 * scale
    torch.testing.assert_close(
        got.dequantize(),
        ops.dequantize_per_channel(got.values, got.scales, None, 0, -127, 127, torch.int8),
    )


def test_four_bits_have_a_scale_per_group() -> None:
    weight = normal(5, 64)
    weight[:, :16] *= 100
    got = quantize_weight(weight, bits=4, group=16)
    assert got.scales.shape == (5, 4)
    assert (int(got.values.min()), int(got.values.max())) == (-7, 7)
    want = ops.dequantize_per_channel_group(
        *(got.values, got.scales, None, -7, 7, torch.int8, 16, torch.float32)
    )
    torch.testing.assert_close(got.dequantize(), want)
    for row in range(5):
        for group in range(4):
            part = slice(16 * group, 16 * group + 16)
            assert float(got.scales[row, group]) == pytest.approx(
                float(weight[row, part].abs().max()) / 7
            )
    whole = quantize_weight(weight, bits=4)
    error = [(w.dequantize() - weight)[:, 16:].square().sum() for w in (got, whole)]
    assert error[0] < 0.01 * error[1]


@pytest.mark.parametrize(
    ("inputs", "group"),
    [(384, 128), (1536, 128), (96, 96), (200, 100), (150, 75), (127, 127), (7, 0), (262, 0)],
)
def test_groups_divide_the_inputs(inputs: int, group: int) -> None:
    assert group_of(inputs, 128) == group
