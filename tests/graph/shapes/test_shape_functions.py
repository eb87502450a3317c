# SPDX-License-Identifier: Apache-2.0
"""Shape functions of blade's own: they give torch's sizes without what torch runs for them."""

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
