# SPDX-License-Identifier: Apache-2.0
"""Small clusters, and what verify says of a faulty or right engine for them."""

from collections.abc import Sequence
from typing import Any

import torch
from fake_backends import PythonEngine
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from blade.core.cluster import Cluster, ValueInfo
from blade.core.reason import Reason
from blade.report import Verdict
from blade.verification.verify import verify


def cluster(
    module: torch.nn.Module, samples: Sequence[torch.Tensor], probes: Sequence[torch.Tensor] = ()
) -> Cluster:
    gm = module if isinstance(module, torch.fx.GraphModule) else torch.fx.symbolic_trace(module)
    info = ValueInfo("tensor", samples[0].dtype, samples[0].device, samples[0].dim())
    return Cluster(
        name="cluster_0",
        gm=gm,
        shape_env=ShapeEnv(),
        inputs=(info,),
        ops=(),
        samples=[(t,) for t in samples],
        probes=[(t,) for t in probes],
    )


def run(of: Cluster, **engine: Any) -> Verdict | Reason:
    original = of.gm
    return verify(of, PythonEngine(of.gm, **engine), original, "fake")  # type: ignore[arg-type]


def remembering(seen: list[torch.Tensor]) -> Any:
    """As an engine's ``run``: adds the inputs of every call to ``seen``."""

    def run(outputs: list[torch.Tensor], inputs: list[torch.Tensor], call: int) -> Any:
        seen.extend(inputs)
        return outputs

    return run
