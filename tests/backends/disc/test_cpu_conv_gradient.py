# SPDX-License-Identifier: Apache-2.0
"""Convolutions in training: weights that are computed, and both gradients, against torch in float64."""

from dataclasses import dataclass

import pytest
import torch
from op_trace import trace

from blade.backends.disc.compiler import compile_ir
from blade.backends.disc.frontend.lower import lower
from blade.backends.disc.target.cpu import CpuTarget, host
from blade.runtime.engine import Engine, make_engine

pytestmark = [pytest.mark.needs("runtime"), pytest.mark.needs("torch_mlir")]
aten = torch.ops.aten


@dataclass(frozen=True)
class Conv:
    """``weight`` [O, C / groups, *kernel]; ``served``: the kernels its program has, beside ATen's calls."""

    weight: tuple[int, ...]
    padding: tuple[int, ...]
    served: tuple[str, ...]
    stride: int = 1
    dilation: int = 1
    groups: int = 1

    @property
    def how(self) -> tuple[object, ...]:
        axes = len(self.padding)
        steps = [self.stride] * axes, list(self.padding), [self.dilation] * axes
        return (*steps, False, [0] * axes, self.groups)

    def all(
        self, g: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """The result and all gradients."""
        y = aten.convolution(x, w, bias, *self.how)
        found = aten.convolution_backward(g, x, w, [len(bias)], *self.how, [True] * 3)
        return (y, *found)


GENERATED, MINIMAL = ("conv_f32_panels", "conv_f32"), ("winograd_f32_panels", "winograd_f32")
CASES = {
    "minimal": Conv((48, 32, 3, 3), (1, 1), (*MINIMAL, "matmul_f32")),
    "no padding": Conv((16, 48, 3, 3), (0, 0), (*GENERATED, "matmul_f32")),
    "odd channels, one-sided": Conv((7, 5, 3, 2), (2, 1), (*GENERATED, "matmul_f32")),
    "few channels": Conv((64, 4, 5, 5), (2, 2), (*GENERATED, "matmul_f32")),
    "pointwise": Conv((33, 20, 1, 1), (0, 0), (*GENERATED, "matmul_f32")),
    "padded pointwise": Conv((3, 6, 1, 1), (1, 0), ("matmul_f32",)),
    "strided": Conv((16, 8, 3, 3), (1, 1), GENERATED, stride=2),
    "dilated": Conv((8, 8, 3, 3), (2, 2), GENERATED, dilation=2),
    "groups": Conv((8, 2, 3, 3), (1, 1), GENERATED, groups=4),
    "one axis": Conv((8, 6, 3), (1,), GENERATED),
    "volumes": Conv((4, 3, 2, 3, 3), (1, 1, 0), GENERATED),
}


def inputs(conv: Conv, batch: int, size: int) -> list[torch.Tensor]:
    axes = range(len(conv.padding))
    x = torch.randn(batch, conv.weight[1] * conv.groups, *(size + k for k in axes))
    w, bias = torch.randn(conv.weight), torch.randn(conv.weight[0])
    y = aten.convolution(x, w, bias, *conv.how)
    return [torch.randn_like(y, memory_format=torch.contiguous_format), x, w, bias]


def engine_of(conv: Conv, lanes: int) -> Engine:
    spatial = [True] * len(conv.padding)
    fixed = [False] * len(conv.weight)
    dynamic = [[True, False, *spatial], [True, False, *spatial], fixed, [False]]
    gm, shape_env = trace(conv.all, inputs(conv, 2, 7), dynamic)
    made = compile_ir(lower(gm, shape_env), CpuTarget(host().isa, lanes))
    return make_engine("t", "disc", made.program, made.object, list(made.constants), {})


@pytest.mark.parametrize(
    ("name", "lanes"),
    [(name, host().lanes) for name in CASES]
    + [(name, n) for name in ("minimal", "odd channels, one-sided") for n in (4, 8, 16)],
)
def test_against_float64(name: str, lanes: int) -> None:
    torch.manual_seed(lanes)
    conv = CASES[name]
    engine = engine_of(conv, lanes)
    for kernel in conv.served:
        assert f"kernel {kernel}" in engine.program(), kernel
    for batch, size in ((2, 7), (1, 5), (3, 12), (1, 26)):
        given = inputs(conv, batch, size)
        found = engine.try_execute(given)
        assert found is not None, engine.last_error()
        near, exact = conv.all(*given), conv.all(*(t.double() for t in given))
        for x, y, z in zip(found, near, exact, strict=True):
            assert x.shape == z.shape and x.stride() == y.stride()
            allowed = 4 * (y - z).abs().max() + 2.0**-20 * z.abs().max()
            assert (x - z).abs().max() <= allowed, (batch, size)


def test_weights_may_change_between_calls() -> None:
    conv = CASES["minimal"]
    engine, given = engine_of(conv, host().lanes), inputs(conv, 1, 6)
    for _ in range(2):
        found = engine.try_execute(given)
        assert found is not None, engine.last_error()
        torch.testing.assert_close(found[0], conv.all(*given)[0], rtol=1e-4, atol=1e-3)
        given[2].mul_(-3)
