# SPDX-License-Identifier: Apache-2.0
"""Pooling for GPUs in Triton's interpreter: maxima are bit for bit what torch answers."""

import math

import pytest
import torch
from test_gpu_programs import compiled
from torch import nn

pytestmark = pytest.mark.needs("triton_interpreter")

IMAGES = (True, False, True, True)
POOLS = {
    "3x3, every other pixel": nn.MaxPool2d(3, 2, 1),
    "2x2": nn.MaxPool2d(2),
    "beyond the border": nn.MaxPool2d(3, 2, ceil_mode=True),
    "far apart": nn.MaxPool2d((2, 3), 1, (1, 1), dilation=(2, 1)),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("pool", POOLS.values(), ids=POOLS)
def test_every_window(pool: nn.Module, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    program = compiled(pool, [torch.randn(2, 70, 9, 8, dtype=dtype)], [IMAGES])
    for size in ((2, 70, 9, 8), (1, 70, 5, 5), (3, 70, 7, 12)):
        x = torch.randn(size, dtype=dtype)
        x[:, ::3, 1, 2] = math.nan
        x[:, 1::3, :4, :4] = -math.inf
        x[:, 2::5, 3, 3] = math.inf
        [got] = program(x)
        torch.testing.assert_close(got, pool(x), rtol=0, atol=0, equal_nan=True)
        assert "max_pool" in program.ran(x) and "aten::max_pool2d" not in program.ran(x)


@pytest.mark.parametrize("channels", [1, 6, 24, 64])
def test_pixels_that_begin_anywhere(channels: int) -> None:
    x = torch.randn(2, channels, 6, 7)
    pool = nn.MaxPool2d(3, 2, 1)
    [got] = compiled(pool, [x], [IMAGES])(x)
    assert torch.equal(got, pool(x))


def test_a_window_too_large_to_write_out_is_atens() -> None:
    x = torch.randn(1, 8, 9, 9)
    assert "aten::max_pool2d" in compiled(nn.MaxPool2d(7, 1), [x], [IMAGES]).ran(x)


MEANS = {
    "3x3, with the padding": nn.AvgPool2d(3, 1, 1),
    "3x3, without the padding": nn.AvgPool2d(3, 1, 1, count_include_pad=False),
    "2x2": nn.AvgPool2d(2),
    "beyond the border": nn.AvgPool2d(3, 2, (1, 0), ceil_mode=True),
    "beyond the border, without the padding": nn.AvgPool2d(
        (2, 3), 2, 1, ceil_mode=True, count_include_pad=False
    ),
    "divided by": nn.AvgPool2d(3, 2, 1, divisor_override=5),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("mean", MEANS.values(), ids=MEANS)
def test_means_of_every_window(mean: nn.Module, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    program = compiled(mean, [torch.randn(2, 20, 9, 8, dtype=dtype)], [IMAGES])
    for size in ((2, 20, 9, 8), (1, 20, 5, 5), (3, 20, 7, 12)):
        x = torch.randn(size, dtype=dtype)
        x[:, ::3, 1, 2] = math.nan
        x[:, 2::5, 3, 3] = math.inf
        [got] = program(x)
        torch.testing.assert_close(got, mean(x), equal_nan=True)
        assert "avg_pool" in program.ran(x) and "aten::avg_pool2d" not in program.ran(x)
