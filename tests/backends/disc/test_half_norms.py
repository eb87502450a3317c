# SPDX-License-Identifier: Apache-2.0
"""Layer norms of halves as CUDA has them: mean and deviation are float32."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from blade.backends.disc.interpret_ir import interpret
from blade.backends.disc.lower import lower

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
