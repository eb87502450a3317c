# SPDX-License-Identifier: Apache-2.0
"""Transposed convolutions of 16 bits for GPUs, in Triton's interpreter: on channels-last images, or as products."""

from typing import Any

import pytest
import torch
from op_trace import trace
from run_program import compile_to_program
from test_convolutions_gpu import is_as_exact
from test_gpu_programs import compiled
from torch import nn

from blade.backends.disc.frontend.lower import lower
from blade.backends.disc.gpu.passes.pipeline import FORMS

pytestmark = pytest.mark.needs("triton_interpreter")

HALVES = (torch.float16, torch.bfloat16)
IMAGES = (True, False, True, True)
SIZES = ((2, 12, 5, 4), (1, 12, 1, 1), (3, 12, 7, 2))
DECODERS = {
    "2x2": nn.ConvTranspose2d(12, 8, 2, 2),
    "2x2 without a bias": nn.ConvTranspose2d(12, 8, 2, 2, bias=False),
    "3x1": nn.ConvTranspose2d(12, 5, (3, 1), (3, 1)),
}
OTHERS = {
    "generator": nn.ConvTranspose2d(12, 8, 4, 2, 1),
    "odd kernel": nn.ConvTranspose2d(12, 8, 3, 2, 1, output_padding=1),
    "beyond the last tap": nn.ConvTranspose2d(12, 8, 2, 3, output_padding=(1, 2), dilation=1),
}


def launches(conv: nn.Module, dtype: torch.dtype) -> list[list[str]]:
    """What runs at each of ``SIZES``, where the answers are as exact as torch's."""
    torch.manual_seed(0)
    conv = conv.to(dtype)
    program = compiled(conv, [torch.randn(SIZES[0], dtype=dtype)], [IMAGES])
    found = []
    for size in SIZES:
        x = torch.randn(size, dtype=dtype)
        is_as_exact(program, conv, x)
        found.append(program.ran(x))
    return found


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("conv", DECODERS.values(), ids=DECODERS)
def test_windows_that_do_not_overlap_are_a_product(conv: nn.Module, dtype: torch.dtype) -> None:
    for ran in launches(conv, dtype):
        assert not any("convolution" in name for name in ran)
        # x with channels last, and the result as torch's lies
        assert sum("loop" in name for name in ran) == 2


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("conv", OTHERS.values(), ids=OTHERS)
def test_others_are_torchs_on_channels_last(conv: nn.Module, dtype: torch.dtype) -> None:
    for ran in launches(conv, dtype):
        assert "aten::convolution" in ran


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("padding", [0, 1])
def test_the_gradient_of_the_input_is_a_convolution(padding: int, dtype: torch.dtype) -> None:
    """Of weights that every call computes, as autocast does."""

    def gradients(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> Any:
        how = ([2, 2], [padding] * 2, [1, 1], True, [0, 0], 1, [True, True, True])
        return torch.ops.aten.convolution_backward(g, x, w.to(dtype), [4], *how)

    def inputs(batch: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        side = 10 - 2 * padding
        g, x = (torch.randn(batch, 4, side, side), torch.randn(batch, 3, 5, 5))
        last = (t.to(dtype, memory_format=torch.channels_last) for t in (g, x))
        return [*last, torch.randn(3, 4, 2, 2)]

    axes = [(True, False, False, False), (True, False, False, False), (False,) * 4]
    gm, shape_env = trace(gradients, inputs(2), axes)
    program = compile_to_program(lower(gm, shape_env, forms=FORMS))
    calls = [line for line in program.text.splitlines() if "convolution_backward" in line]
    assert len(calls) == (padding != 0)  # of windows that do not overlap it is a product
    assert all(" lb:0,1,0 " in call for call in calls)
    for batch in (2, 1, 5):
        given = inputs(batch)
        want = torch.ops.aten.convolution_backward(
            *(t.float() for t in given[:2]),
            given[2].to(dtype).float(),
            [4],
            *([2, 2], [padding] * 2, [1, 1], True, [0, 0], 1, [True, True, True]),
        )
        for got, one in zip(program(*given), want, strict=True):
            assert got.dtype == dtype
            torch.testing.assert_close(got.float(), one, rtol=0.02, atol=0.05)
