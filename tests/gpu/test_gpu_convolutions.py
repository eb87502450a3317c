# SPDX-License-Identifier: Apache-2.0
"""Our convolutions on the device, through the driver, against torch in float64; and the choice by measurement."""

import math

import pytest
import torch
from test_gpu_library import TOLERANCE, B, L, loaded, run

from blade.backends.disc.gpu.gemm.autotune import choose_plans
from blade.backends.disc.gpu.gemm.epilogue import plain_epilogue
from blade.backends.disc.gpu.gemm.plan import PIXEL_CLASSES
from blade.backends.disc.gpu.gemm.product import (
    GemmProduct,
    GemmTile,
    launch,
    product_of,
)
from blade.backends.disc.ir.graph import IrBuilder, Value
from blade.backends.disc.ir.size_facts import SizeRelations
from blade.backends.disc.program.instructions import Counters
from blade.backends.disc.target.gpu import target_of

pytestmark = [pytest.mark.gpu, pytest.mark.needs("triton")]

HEIGHT, CHANNELS, OUT = 9, 64, 72
TILES = (
    GemmTile(16, 32, 32),
    GemmTile(32, 64, 64),
    GemmTile(64, 64, 64, stages=3),
    GemmTile(128, 64, 32, warps=8),
)


def convolution(kernel: int, dtype: torch.dtype) -> tuple[Value, Value, GemmProduct]:
    """Images of ``HEIGHT`` x s1, its constant, and the product."""
    b, pad = IrBuilder(), kernel // 2
    x = b.make("input", (), (B, HEIGHT, L, CHANNELS), dtype, index=0)
    stored = b.make("const", (), (OUT, kernel, kernel, CHANNELS), dtype, index=0)
    y = b.make(
        "conv",
        (x, b.permute(stored, (0, 3, 1, 2))),
        (B, HEIGHT, L, OUT),
        dtype,
        stride=(1, 1),
        padding=(pad, pad),
        dilation=(1, 1),
        groups=1,
        activation=None,
        transposed=False,
    )
    product = product_of(y, plain_epilogue(y))
    assert product is not None
    return x, stored, product


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kernel", "split"), [(3, 1), (3, 3), (1, 1)])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_convolutions(tile: GemmTile, kernel: int, split: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, stored, product = convolution(kernel, dtype)
    shared = GemmTile(tile.m, tile.n, tile.k, split, tile.warps, tile.stages)
    early = target_of().starts_early
    made = launch(product, shared, None, Counters(4096), SizeRelations(), early)
    functions = loaded([made])
    assert product.conv is not None
    for batch, width in ((1, 1), (2, 7), (3, 50)):
        image = torch.randn(batch, HEIGHT, width, CHANNELS, device="cuda").mul(0.2).to(dtype)
        weight = torch.randn(OUT, kernel, kernel, CHANNELS, device="cuda").mul(0.2).to(dtype)
        got = torch.full((batch, HEIGHT, width, OUT), math.nan, dtype=dtype, device="cuda")
        buffers = {x.id: image, stored.id: weight, product.conv.id: got}
        run([made], functions, buffers, {"s0": batch, "s1": width})
        wide = (t.double().permute(0, 3, 1, 2) for t in (image, weight))
        want = torch.nn.functional.conv2d(*wide, padding=kernel // 2).permute(0, 2, 3, 1)
        torch.testing.assert_close(got.double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_what_is_measured_is_a_plan_for_every_number_of_pixels() -> None:
    _, _, product = convolution(3, torch.float16)
    plan = choose_plans([product], target_of(), SizeRelations(), None)[product.key]
    assert plan.ranges[-1] == (None, None)  # cuDNN's, where pixels are many
    assert {most for most, _ in plan.ranges} <= set(PIXEL_CLASSES)
