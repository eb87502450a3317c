# SPDX-License-Identifier: Apache-2.0
"""Values in float32 that two kernels need: each widens what is in memory in 16 bits, and nothing else is stored."""

from collections.abc import Callable

import pytest
import torch
from op_trace import trace
from run_program import compile_to_program
from torch import nn

from blade.backends.disc.frontend.lower import lower
from blade.backends.disc.fusion.fuse import fuse
from blade.backends.disc.gpu.passes.pipeline import FORMS, passes
from blade.backends.disc.gpu.passes.widen_where_read import widen_where_read
from blade.backends.disc.ir.graph import Graph
from blade.backends.disc.reference.interpret_graph import interpret

BF16 = torch.bfloat16
SIZE = (1, 32, 67, 17)  # no piece of whose pixels divides them


class Apply(nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.function(*inputs)


def norm(x: torch.Tensor) -> torch.Tensor:
    """By the statistics of every channel, of an image with channels last."""
    x = x.permute(0, 3, 1, 2).float()
    centred = x - x.mean((0, 2, 3), keepdim=True)
    spread = centred.square().mean((0, 2, 3), keepdim=True)
    return (centred * (spread + 1e-5).rsqrt()).bfloat16()


def norm_gradient(x: torch.Tensor, g: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """``g`` lies in the other order than ``x``, as the gradient of a convolution in groups does."""
    g, centred = g.float(), x.permute(0, 3, 1, 2).float() - mean[:, None, None]
    slope = (g * centred).mean((0, 2, 3), keepdim=True)
    return (g - g.mean((0, 2, 3), keepdim=True) - centred * slope).bfloat16()


def image(last: bool) -> torch.Tensor:
    n, c, h, w = SIZE
    return torch.randn((n, h, w, c) if last else SIZE).bfloat16()


CASES = {
    "norm": (norm, lambda: (image(True),)),
    "gradient": (norm_gradient, lambda: (image(True), image(False), torch.randn(SIZE[1]))),
}
cases = pytest.mark.parametrize("case", CASES)


def lowered(case: str) -> Graph:
    torch.manual_seed(0)
    function, inputs = CASES[case]
    given = inputs()
    gm, shape_env = trace(Apply(function), given, [(False,) * one.dim() for one in given])
    return lower(gm, shape_env, forms=FORMS)


def before_widening(graph: Graph) -> Graph:
    for name, run_pass in passes(None):
        if name == "widen_where_read":
            return graph
        graph = run_pass(graph)
    raise AssertionError


def wide_images(graph: Graph) -> int:
    """How many images kernels leave in memory in float32."""
    stored = fuse(graph).stored
    count = 1
    for size in SIZE:
        count *= size
    return sum(
        v.id in stored and v.dtype == torch.float32 and torch.Size(v.shape).numel() == count
        for v in graph.values
    )


@cases
def test_no_wide_image_is_stored(case: str) -> None:
    graph = before_widening(lowered(case))
    assert wide_images(graph) > 0
    assert wide_images(widen_where_read(graph)) == 0


@cases
def test_values_are_the_same_to_the_bit(case: str) -> None:
    graph = before_widening(lowered(case))
    given = CASES[case][1]()
    (got,), (want,) = (interpret(g, given) for g in (widen_where_read(graph), graph))
    assert torch.equal(got, want)


@pytest.mark.needs("triton_interpreter")
@cases
def test_kernels(case: str) -> None:
    function, inputs = CASES[case]
    program = compile_to_program(lowered(case))
    given = inputs()
    [got] = program(*given)
    torch.testing.assert_close(got, function(*given), rtol=0.02, atol=0.01)


def test_what_would_read_more_stays_stored() -> None:
    """A sum of two images in 16 bits has as many bytes as both."""

    def double(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        both = x.float() + y.float()
        return (both - both.mean((1, 2), keepdim=True)).bfloat16()

    given = (image(True), image(True))
    gm, shape_env = trace(Apply(double), given, [(False,) * 4] * 2)
    graph = before_widening(lower(gm, shape_env, forms=FORMS))
    assert widen_where_read(graph) is graph
