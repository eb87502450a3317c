# SPDX-License-Identifier: Apache-2.0
"""Depthwise convolutions for GPUs, with what follows them, interpreted."""

from typing import Any

import pytest
import torch
from run_program import GpuProgram
from test_convolutions_gpu import IMAGES, drawn, is_as_exact
from test_gpu_programs import compiled
from torch import nn

from blade.backends.disc.gpu.gemm import autotune as choose
from blade.backends.disc.gpu.gemm.benchmark import sizes_of_images
from blade.backends.disc.gpu.gemm.plan import GemmPlan, classes_of
from blade.backends.disc.gpu.gemm.product import GemmProduct, GemmTile
from blade.backends.disc.gpu.gemm.tile_table import candidate
from blade.backends.disc.target.gpu import GpuTarget

pytestmark = pytest.mark.needs("triton_interpreter")

SHAPES: dict[str, dict[str, Any]] = {
    "3x3": {"kernel_size": 3, "padding": 1},
    "3x3, every other pixel": {"kernel_size": 3, "padding": 1, "stride": 2},
    "3x3, far apart": {"kernel_size": 3, "padding": 2, "dilation": 2},
    "5x1": {"kernel_size": (5, 1), "padding": (0, 1), "stride": (1, 2)},
    "5x5": {"kernel_size": 5, "padding": 2},
    "1x1": {"kernel_size": 1},
}


@pytest.fixture(autouse=True)
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """All depthwise convolutions are ours."""

    def plan(product: GemmProduct, _: GpuTarget) -> GemmPlan:
        return GemmPlan(((None, GemmTile(8, 16, 1) if product.depthwise else None),))

    monkeypatch.setattr(choose, "unmeasured", plan)


def _is_one_launch(program: GpuProgram, x: torch.Tensor, around: int) -> None:
    ran = program.ran(x)
    assert ran.count("linear") == 1 and "aten::convolution" not in ran
    assert len(ran) == 1 + around


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_depthwise_convolution_and_its_batch_norm_are_one_kernel(
    shape: dict[str, Any], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(24, 24, groups=24, bias=False, **shape)
    model = drawn(nn.Sequential(conv, nn.BatchNorm2d(24), nn.ReLU())).to(dtype)
    program = compiled(model, [torch.randn(2, 24, 7, 8, dtype=dtype)], [IMAGES])
    _is_one_launch(
        program, torch.randn(2, 24, 7, 6, dtype=dtype), around=2
    )  # to channels last and first
    for size in ((2, 24, 7, 6), (1, 24, 5, 5), (3, 24, 6, 5)):
        is_as_exact(program, model, torch.randn(size, dtype=dtype))


@pytest.mark.parametrize("channels", [8, 20])
def test_one_of_lines(channels: int) -> None:
    torch.manual_seed(0)
    how = {"kernel_size": 3, "padding": 4, "dilation": 4, "groups": channels}
    model = nn.Sequential(nn.Conv1d(channels, channels, **how), nn.SiLU()).eval()
    program = compiled(model, [torch.randn(2, channels, 9)], [(True, False, True)])
    _is_one_launch(program, torch.randn(2, channels, 11), around=1)  # it writes lines again
    for batch, length in ((2, 11), (1, 1), (3, 40)):
        x = torch.randn(batch, channels, length)
        torch.testing.assert_close(program(x), [model(x)])


def test_one_that_nothing_follows() -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(8, 8, 3, groups=8, bias=False).eval()
    program = compiled(model, [torch.randn(2, 8, 7, 8)], [IMAGES])
    x = torch.randn(1, 8, 9, 5)
    _is_one_launch(program, x, around=2)
    torch.testing.assert_close(program(x), [model(x)])


@pytest.mark.parametrize("groups, out, taps", [(4, 8, 3), (8, 16, 3), (1, 8, 3), (8, 8, 7)])
def test_others_are_atens(groups: int, out: int, taps: int) -> None:
    """Several channels per group, several results per channel, or many taps."""
    torch.manual_seed(0)
    model = nn.Conv2d(8, out, taps, groups=groups, bias=False).eval()
    program = compiled(model, [torch.randn(2, 8, 9, 8)], [IMAGES])
    x = torch.randn(1, 8, 9, 7)
    assert "aten::convolution" in program.ran(x) and "linear" not in program.ran(x)
    torch.testing.assert_close(program(x), [model(x)])


def test_few_pixels_are_cut_into_more_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[GemmProduct] = []
    plan = GemmPlan(((None, None),))
    monkeypatch.setattr(choose, "unmeasured", lambda product, _: found.append(product) or plan)
    model = nn.Conv2d(96, 96, 3, groups=96, bias=False).eval()
    compiled(model, [torch.randn(2, 96, 7, 8)], [IMAGES])
    [product] = found
    small = sizes_of_images(product, 4096, 28)
    assert small is not None and sorted(small.values()) == [6, 28, 28]  # of 26 x 26 pixels each
    assert sizes_of_images(product, 1000, 28) is None  # one image is timed anyway
    tiles = [candidate(product, most, GpuTarget()) for most in classes_of(product)]
    rows = [tile.m for tile in tiles if tile is not None]
    assert len(rows) == len(tiles) and rows == sorted(rows) and rows[0] < rows[-1]
    assert all(tile is not None and tile.n == 32 for tile in tiles)


@pytest.mark.parametrize("aten_first", [True, False])
def test_one_that_nothing_follows_has_one_home(
    aten_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan has ATen for some sizes: what reads the result reads it in one place."""
    ours = GemmTile(8, 16, 1)
    ranges = ((64, None), (None, ours)) if aten_first else ((64, ours), (None, None))
    other = GemmPlan(((None, None),))
    monkeypatch.setattr(
        choose, "unmeasured", lambda product, _: GemmPlan(ranges) if product.depthwise else other
    )
    model = drawn(nn.Conv2d(8, 8, 3, groups=8, bias=False))
    program = compiled(model, [torch.randn(2, 8, 7, 8)], [IMAGES])
    for size in ((1, 8, 5, 5), (3, 8, 16, 15)):
        x = torch.randn(size)
        [found], ran = program.traced(x)
        torch.testing.assert_close(found, model(x))
        assert ("linear" in ran, "aten::convolution" in ran) == (aten_first, not aten_first)
