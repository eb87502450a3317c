# SPDX-License-Identifier: Apache-2.0
"""What stays TorchScript beside engines on CUDA answers in every call, also once TorchScript has optimized it."""

from copy import deepcopy

import pytest
import torch

import blade
from blade.core.reason import Code

pytestmark = [pytest.mark.gpu, pytest.mark.needs("runtime")]


class Model(torch.nn.Module):
    """A product for an engine, then pointwise ops."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).relu()
        return y.tanh() * y - y.sigmoid()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("outside", [True, False])
def test_what_stays_torchscript_answers_in_every_call(dtype: torch.dtype, outside: bool) -> None:
    model = Model().cuda().to(dtype).eval()
    x = torch.randn(5, 16, device="cuda", dtype=dtype)
    kinds = ["aten::tanh", "aten::mul", "aten::sub", "aten::sigmoid"] if outside else []
    config = blade.Config(
        optimization_pipeline="disc",
        min_cluster_size=1,
        timing=False,
        customize_op_black_list=kinds,
    )
    optimized = blade.optimize(model, (x,), config)
    engine = optimized.cluster_0.engine
    want, tolerance = deepcopy(model).double()(x.double()), 32 * torch.finfo(dtype).eps
    for enabled in (True, False):
        engine.set_enabled(enabled)
        for _ in range(5):
            torch.testing.assert_close(optimized(x).double(), want, rtol=tolerance, atol=tolerance)
    [counts] = blade.stats(optimized).values()
    assert counts["engine_runs"] == counts[Code.DISABLED.value] == 5
    if (
        dtype == torch.bfloat16
    ):  # for the whole process: other tests' engines may have had it before
        assert not torch._C._jit_can_fuse_on_gpu()
