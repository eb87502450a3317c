# SPDX-License-Identifier: Apache-2.0
"""Pooling in training for GPUs, in Triton's interpreter: where maxima lie, and which pixels get their gradients."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from test_gpu_programs import compiled
from torch import nn

pytestmark = pytest.mark.needs("triton_interpreter")

aten = torch.ops.aten
IMAGES = (True, False, True, True)
SIZES = ((2, 24, 9, 8), (1, 24, 4, 4), (3, 24, 7, 12))
HALVES = (torch.float16, torch.bfloat16)
POOLS = {  # kernel, stride, padding, beyond the border
    "2x2": ((2, 2), (2, 2), (0, 0), False),
    "3x2": ((3, 2), (3, 2), (0, 0), False),
    "1x4": ((1, 4), (), (0, 0), False),
    "3x3, every other pixel": ((3, 3), (2, 2), (1, 1), False),
    "3x3, beyond the border": ((3, 3), (2, 2), (0, 0), True),
    "2x2, every pixel": ((2, 2), (1, 1), (0, 1), False),
    "2x2, between gaps": ((2, 2), (3, 3), (0, 0), False),
}


class Pool(nn.Module):
    def __init__(self, kernel: object, stride: object, padding: object, ceil_mode: bool) -> None:
        super().__init__()
        self.how = (kernel, stride, padding, (1, 1), ceil_mode)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        kernel, stride, padding, dilation, ceil_mode = self.how
        found: tuple[torch.Tensor, ...] = aten.max_pool2d_with_indices(
            x, kernel, stride, padding, dilation, ceil_mode
        )
        return found


class Gradient(Pool):
    def forward(self, x: torch.Tensor, grad: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        kernel, stride, padding, dilation, ceil_mode = self.how
        made: torch.Tensor = aten.max_pool2d_with_indices_backward(
            grad, x, kernel, stride, padding, dilation, ceil_mode, at
        )
        return made


def image(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """With many equal pixels, NaN and infinities."""
    x = torch.randint(-3, 3, size).to(dtype).contiguous(memory_format=torch.channels_last)
    x[:, ::3, 1, 2] = math.nan
    x[:, 1::3, :3, :3] = -math.inf
    x[:, 2::5, 3, 3] = math.inf
    return x


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("how", POOLS.values(), ids=POOLS)
def test_maxima_and_where_they_lie(
    how: tuple[object, object, object, bool], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    pool = Pool(*how)
    program = compiled(pool, [image(SIZES[0], dtype)], [IMAGES])
    kernel, stride, padding, _ = how
    is_apart = stride in ((), kernel) and padding == (0, 0)
    for size in SIZES:
        x = image(size, dtype)
        got, want = program(x), pool(x)
        torch.testing.assert_close(got[0], want[0], rtol=0, atol=0, equal_nan=True)
        assert torch.equal(got[1], want[1])
        assert ("aten::max_pool2d_with_indices" not in program.ran(x)) == is_apart


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("how", POOLS.values(), ids=POOLS)
def test_each_pixel_gets_the_gradients_of_its_windows(
    how: tuple[object, object, object, bool], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    pool, gradient = Pool(*how), Gradient(*how)

    def given(size: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        x = image(size, dtype).nan_to_num()
        values, at = pool(x)
        return x, torch.randn_like(values), at

    program = compiled(gradient, given(SIZES[0]), [IMAGES] * 3)
    for size in SIZES:
        inputs = given(size)
        [got] = program(*inputs)
        want = gradient(*(t.float() if t.is_floating_point() else t for t in inputs))
        torch.testing.assert_close(got, want.to(dtype), rtol=0, atol=0)
        assert "aten::max_pool2d_with_indices_backward" not in program.ran(*inputs)


AVERAGES = {  # kernel, stride, padding, whether pixels beyond the border count, another divisor
    "2x2": ((2, 2), (2, 2), (0, 0), True, None),
    "3x3, every pixel": ((3, 3), (1, 1), (1, 1), False, None),
    "3x3, with the border": ((3, 3), (2, 2), (1, 1), True, None),
    "3x2, another divisor": ((3, 2), (2, 1), (1, 0), False, 5),
    "2x2, between gaps": ((2, 2), (3, 3), (0, 1), False, None),
}


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("how", AVERAGES.values(), ids=AVERAGES)
def test_each_pixel_gets_its_share_of_windows(how: tuple[Any, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    kernel, stride, padding, counts_border, divisor = how

    def average(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.avg_pool2d(x, kernel, stride, padding, False, counts_border, divisor)

    class Shares(nn.Module):
        def forward(self, x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = aten.avg_pool2d_backward(
                grad, x, kernel, stride, padding, False, counts_border, divisor
            )
            return made

    def given(size: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(size).to(dtype).contiguous(memory_format=torch.channels_last)
        return x, torch.randn_like(average(x))

    program = compiled(Shares(), given(SIZES[0]), [IMAGES] * 2)
    for size in SIZES:
        x, grad = given(size)
        [got] = program(x, grad)
        want = Shares()(x.float().contiguous(), grad.float().contiguous())
        torch.testing.assert_close(got, want.to(dtype))
        assert "aten::avg_pool2d_backward" not in program.ran(x, grad)


def test_one_number_for_both_sides() -> None:
    x = image(SIZES[0], torch.float16)
    program = compiled(nn.MaxPool2d(3, 2, 1, return_indices=True), [x], [IMAGES])
    for got, want in zip(program(x), nn.MaxPool2d(3, 2, 1, return_indices=True)(x), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_images_in_float32_and_windows_with_gaps_are_torchs() -> None:
    x = torch.randn(2, 8, 9, 8)
    program = compiled(Pool(*POOLS["2x2"]), [x], [IMAGES])
    assert "aten::max_pool2d_with_indices" in program.ran(x)
    spread = nn.MaxPool2d(2, 2, dilation=2, return_indices=True)
    program = compiled(spread, [x.half()], [IMAGES])
    assert "aten::max_pool2d_with_indices" in program.ran(x.half())


@pytest.mark.parametrize("dtype", (*HALVES, torch.float32))
def test_the_gradient_of_repeated_pixels_is_their_sum(dtype: torch.dtype) -> None:
    torch.manual_seed(0)

    class Repeated(nn.Module):
        def forward(self, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            sizes = [grad.shape[2], grad.shape[3]], list(x.shape)
            made: torch.Tensor = aten.upsample_nearest2d_backward(grad, *sizes, 2.0, 2.0)
            return made

    make = partial(torch.randn, dtype=dtype)
    given = (make(2, 6, 8, 10), make(2, 6, 4, 5))
    program = compiled(Repeated(), given, [(False,) * 4] * 2)
    [got] = program(*given)
    torch.testing.assert_close(got, Repeated()(*given), rtol=0, atol=float(torch.finfo(dtype).eps))
    assert "aten::upsample_nearest2d_backward" not in program.ran(*given)
