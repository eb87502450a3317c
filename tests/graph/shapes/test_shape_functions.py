# SPDX-License-Identifier: Apache-2.0
"""Shape functions of blade's own: they give torch's sizes without what torch runs for them."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from blade.core.torch_modes import dispatched_in_python
from blade.graph.shapes.shape_functions import result_of

aten = torch.ops.aten


def test_grid_sampler_makes_its_result_and_nothing_else() -> None:
    asked = []

    class Noting(FakeTensorMode):
        def dispatch(self, func, *rest, **kwargs):  # type: ignore[no-untyped-def]
            asked.append(func)
            return super().dispatch(func, *rest, **kwargs)

    for space in ([6, 7], [4, 6, 7]):
        x, grid = torch.randn(2, 3, *space), torch.rand(2, *[5] * len(space), len(space))
        want = aten.grid_sampler.default(x, grid, 0, 0, False)
        mode = Noting()
        operands = mode.from_tensor(x), mode.from_tensor(grid)
        asked.clear()
        with mode, dispatched_in_python():
            got = result_of(aten.grid_sampler.default, (*operands, 0, 0, False), {})
        assert (got.shape, got.stride()) == (want.shape, want.stride())
        assert len(asked) == 1


X, W, B = torch.randn(2, 3, 6, 8), torch.randn(5, 8), torch.randn(8)
LAST = X.to(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.relu.default, (X,)),
        (aten.relu.default, (X.transpose(1, 3),)),
        (aten.softplus.default, (X[:, :, ::2],)),
        (aten.linear.default, (X, W)),
        (aten.linear.default, (B, W, torch.randn(5))),
        (aten.linear.default, (LAST, W, torch.randn(5))),
        (aten.linear.default, (X, B)),
        (aten.layer_norm.default, (X, [8])),
        (aten.layer_norm.default, (LAST, [8], B, B)),
        (aten.layer_norm.default, (X, [6, 8], torch.randn(6, 8))),
        (aten.upsample_nearest2d.vec, (X, None, [2.0, 1.5])),
        (aten.upsample_nearest2d.vec, (LAST, [3, 9], None)),
        (aten.upsample_bilinear2d.vec, (LAST, None, True, [2.0, 2.0])),
        (aten.upsample_bicubic2d.vec, (X, [7, 5], False, None)),
    ],
)
def test_results_have_the_form_that_the_op_gives_them(op: Any, args: tuple[Any, ...]) -> None:
    want, mode = op(*args), FakeTensorMode()
    fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
    with mode, dispatched_in_python():
        got = result_of(op, fakes, {})
    assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.linear.default, (X, W.t())),
        (aten.layer_norm.default, (X, [6])),
        (aten.layer_norm.default, (X, [8], W[0, :5])),
        (aten.upsample_nearest2d.vec, (X, None, [2.0])),
    ],
)
def test_operands_that_do_not_fit_are_refused(op: Any, args: tuple[Any, ...]) -> None:
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
    with mode, dispatched_in_python(), pytest.raises((RuntimeError, ValueError)):
        result_of(op, fakes, {})
