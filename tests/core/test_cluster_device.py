# SPDX-License-Identifier: Apache-2.0
"""The device that a cluster is compiled for."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from blade.core.cluster import Cluster, device_of


def test_numbers_on_the_cpu_do_not_decide() -> None:
    """A number that was traced into a tensor, such as a size, may come first."""

    def function(x: torch.Tensor) -> torch.Tensor:
        size = torch.ops.aten.scalar_tensor.default(x.shape[0])
        return x * (size + 1)

    with FakeTensorMode():
        gm = make_fx(function)(torch.empty(3, device="cuda"))
    of = Cluster("cluster_0", gm, ShapeEnv(), inputs=(), ops=(), samples=[], probes=[])
    assert device_of(of) == torch.device("cuda", 0)
