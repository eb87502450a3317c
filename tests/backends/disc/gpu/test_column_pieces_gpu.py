# SPDX-License-Identifier: Apache-2.0
"""Columns that are reduced in pieces: which, how exactly, and how often what they are made of is read."""

from collections.abc import Sequence

import pytest
import sympy
import torch
from test_gpu_programs import compiled
from torch import nn

from blade.backends.disc.ir.kernel import Dim
from blade.backends.disc.passes.column_pieces import rows_of_piece

aten = torch.ops.aten
S = sympy.Symbol("s", integer=True, positive=True)

PIECES: list[tuple[Sequence[Dim], Sequence[int], int | None]] = [
    ((S, 224, 224, 64), (0, 1, 2), 512),
    ((S, 14, 14, 512), (0, 1, 2), 196),
    ((S, 7, 7, 2048), (0, 1, 2), 49),
    ((128 * S, 1024), (0,), 128),
    ((1024 * S, 1152), (0,), 512),
    ((65536, 1024), (0,), 512),
    ((4096, 1024), (0,), 64),
    ((S, 1, 64, 96), (0, 2), 64),
    ((S, 1024), (0,), None),  # nobody knows what divides it
    ((32, 1024), (0,), None),  # one piece
    ((S, 64), (0, 1), None),  # a single number
    ((64 * S, 16384), (0,), None),  # columns enough
    ((S, 64, 56, 56), (0, 2, 3), None),  # channels between
    ((S, 64, 96), (1,), None),  # images before
]


@pytest.mark.parametrize(("shape", "axes", "rows"), PIECES, ids=str)
def test_what_is_divided(shape: Sequence[Dim], axes: Sequence[int], rows: int | None) -> None:
    assert rows_of_piece(tuple(shape), axes) == rows


class Sums(nn.Module):
    """Of what two tensors give, over all but the last axis."""

    def forward(self, g: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (g * x).sum((0, 1)), g.sum((0, 1))


@pytest.mark.needs("triton_interpreter")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_two_products_read_once(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    g, x = torch.randn(2, 3, 96, 48, dtype=dtype)
    program = compiled(Sums(), [g, x], [(True, False, False)] * 2)
    for batch in (1, 2, 5):
        g, x = torch.randn(2, batch, 96, 48, dtype=dtype)
        for got, want in zip(program(g, x), Sums()(g.double(), x.double()), strict=True):
            own = torch.finfo(dtype).eps * want.abs().max() + 1e-5
            assert (got - want).abs().max() <= own
    assert program.ran(g, x) == ["row"] * 3  # pieces of both, then each of them


class Squares(nn.Module):
    """Over images and pixels, with an axis of one element before them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * x)[None].sum((1, 3, 4))


@pytest.mark.needs("triton_interpreter")
def test_an_axis_of_one_element_is_no_column() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 9, 6)
    program = compiled(Squares(), [x], [(True, False, False, False)])
    for batch in (1, 3):
        x = torch.randn(batch, 5, 9, 6)
        torch.testing.assert_close(program(x)[0], Squares()(x))


class BatchNorm(nn.Module):
    """In training: the results, the statistics of the batch and the new running ones."""

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor, var: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        return aten._native_batch_norm_legit_functional(
            x, weight, weight, mean, var, True, 0.1, 1e-5
        )


@pytest.mark.needs("triton_interpreter")
@pytest.mark.parametrize("offset", [0, 300, -3e4])
def test_a_variance_is_exact_far_from_zero(offset: float) -> None:
    """With a difference of sums of squares, an offset of 3e4 would leave no digit.

    A mean in float32 is off by a rounding of the offset, whose square adds to the variance.
    """
    torch.manual_seed(0)
    x = torch.randn(2, 24, 16, 12).to(memory_format=torch.channels_last)
    each = list(torch.rand(3, 24) + 0.5)
    program = compiled(BatchNorm(), [x, *each], [(True, False, False, False), *[(False,)] * 3])
    for batch in (1, 4):
        x = torch.randn(batch, 24, 16, 12) * (torch.rand(24, 1, 1) + 0.1) + offset
        x = x.to(memory_format=torch.channels_last)
        relative = (offset * torch.finfo(torch.float32).eps / 0.1) ** 2
        ideal = BatchNorm()(x.double(), *(v.double() for v in each))
        own = BatchNorm()(x, *each)
        for got, mine, want in zip(program(x, *each), own, ideal, strict=True):
            error, allowed = (got - want).abs().max(), (mine - want).abs().max()
            assert error <= 2 * allowed + (2e-6 + relative) * want.abs().max()
    # mean and variance of pieces; those of all, with the running ones; the results
    assert program.ran(x, *each) == ["row", "row", "loop"]


class FromOtherMeans(nn.Module):
    """Squared differences, over all but the channels, from means of something else."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        own = (x - x.mean((0, 2), keepdim=True)).square().sum((0, 2))
        across = (x - x.mean((0, 2))).square().sum((0, 2))  # that of channel k at pixel k
        of_pixels = (x - x.mean(2, keepdim=True)).square().sum((0, 2))
        return own, across, of_pixels


@pytest.mark.needs("triton_interpreter")
def test_only_the_mean_of_its_own_column_is_read_with_it() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 16, 16) + 3 * torch.randn(16, 1)
    program = compiled(FromOtherMeans(), [x], [(True, False, False)])
    for batch in (1, 3):
        x = torch.randn(batch, 16, 16) + 3 * torch.randn(16, 1)
        for got, want in zip(program(x), FromOtherMeans()(x), strict=True):
            torch.testing.assert_close(got, want)


class OwnMean(nn.Module):
    """Squared differences of each channel from its mean."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - x.mean((0, 2), keepdim=True)).square().sum((0, 2))


@pytest.mark.needs("triton_interpreter")
def test_squares_of_no_pixels_sum_to_zero() -> None:
    torch.manual_seed(0)
    program = compiled(OwnMean(), [torch.randn(3, 5, 7)], [(True, False, True)])
    for batch, pixels in ((3, 0), (0, 7), (1, 1), (2, 6)):
        x = torch.randn(batch, 5, pixels)
        torch.testing.assert_close(program(x)[0], OwnMean()(x))
