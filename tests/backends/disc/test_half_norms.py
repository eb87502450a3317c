# SPDX-License-Identifier: Apache-2.0
"""Norms and means of halves: statistics are float32, as CUDA has them, and no sum overflows."""

import pytest
import torch
from disc_programs import legalized
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import blade
from blade.backends.disc.frontend.lower import lower
from blade.backends.disc.reference.interpret_graph import interpret

aten = torch.ops.aten


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("affine", [True, False])
def test_nothing_is_rounded_before_the_result(dtype: torch.dtype, affine: bool) -> None:
    shapes = [(5, 24), (24,), (24,)] if affine else [(5, 24)]

    def function(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = weights or (None, None)
        found: tuple[torch.Tensor, ...] = aten.native_layer_norm(x, [24], *given, 1e-5)
        return found

    with FakeTensorMode():
        fakes = [torch.empty(shape, dtype=dtype, device="cuda") for shape in shapes]
        gm = make_fx(function)(*fakes)
    graph = lower(gm, ShapeEnv())
    assert not any(v.op == "call" for v in graph.values)
    torch.manual_seed(0)
    inputs = [torch.randn(shape).to(dtype) for shape in shapes]
    got = interpret(graph, inputs)
    want = function(*(t.float() for t in inputs))
    assert [t.dtype for t in got] == [dtype, torch.float32, torch.float32]
    torch.testing.assert_close(got[0], want[0].to(dtype))
    torch.testing.assert_close(list(got[1:]), list(want[1:]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("axes", [1, 2])
def test_squares_of_hundreds_and_of_hundredths(dtype: torch.dtype, axes: int) -> None:
    """The one are beyond float16, and beside the others counts which epsilon is taken where none is given."""
    shape = (6, 24)[-axes:]

    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        large, small = x * 400, x * 0.01
        return (
            torch.nn.functional.layer_norm(large, shape, w, w),
            torch.nn.functional.rms_norm(large, shape, w),
            torch.nn.functional.rms_norm(small, shape),
        )

    class Norms(torch.nn.Module):
        def forward(self, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return function(x, w)

    torch.manual_seed(0)
    inputs = torch.randn(5, 6, 24).to(dtype), torch.randn(shape).to(dtype)
    config = blade.Config(timing=False, optimization_pipeline="disc", strict=True)
    optimized = blade.optimize(Norms().eval(), inputs, config)
    got = optimized(*inputs)
    assert all(one["engine_runs"] for one in blade.stats(optimized).values())
    want = function(*(t.double() for t in inputs))
    tolerance = 3 * torch.finfo(dtype).eps  # the inputs of the norms are rounded, too
    for a, b in zip(got, want, strict=True):
        largest = float(b.abs().max())
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance * largest)


@pytest.mark.parametrize("dim", [None, (2, 3), (0, 2, 3)])
def test_a_sum_overflows_where_the_mean_does_not(dim: tuple[int, ...] | None) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.mean(dim), nn.functional.mse_loss(x, x - 100), x.sum(dim)

    x = torch.full((3, 5, 7, 7), 3000.0, dtype=torch.float16)
    x[:, :, ::2] = -3200.0  # sums of pixels overflow, of all with others they do not
    x[1:] *= 0.25
    with FakeTensorMode():
        gm = make_fx(function)(torch.empty(x.shape, dtype=x.dtype, device="cuda"))
    graph = legalized(lower(gm, ShapeEnv()))
    for got, want in zip(interpret(graph, [x]), function(x.float()), strict=True):
        torch.testing.assert_close(got, want.half(), rtol=2e-3, atol=0)
