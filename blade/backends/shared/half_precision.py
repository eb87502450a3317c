# SPDX-License-Identifier: Apache-2.0
"""The 16-bit dtype that a cluster may compute in, by the config and by the range of its values.

dtype = half_of(cluster, config)        # torch.float16, torch.bfloat16 or None
"""

from typing import Any

import torch
from torch.fx import GraphModule

from blade.config import Config
from blade.core.cluster import Cluster
from blade.core.pytree import tensors_in
from blade.graph.fx.interpreter import Interpreter

# Products, by op names without overload: autocast's list for CUDA (torch, aten/src/ATen/autocast_mode.h).
HALF_OPS = frozenset(
    "mm addmm bmm baddbmm matmul linear addbmm addmv mv chain_matmul linalg_multi_dot einsum conv1d conv2d conv3d "
    "convolution _convolution conv_transpose1d conv_transpose2d conv_transpose3d prelu "
    "scaled_dot_product_attention".split()
)
HEADROOM = 4.0  # largest float16 / largest magnitude allowed in samples


def half_of(cluster: Cluster, config: Config) -> torch.dtype | None:
    """The dtype that float32 products may be computed in; ``None``: float32 only."""
    if config.enable_fp16:
        return choose(cluster)
    return torch.bfloat16 if config.enable_bf16 else None


def choose(cluster: Cluster) -> torch.dtype:
    """float16, or bfloat16 if values at the first sample come close to float16's largest number."""
    if not cluster.samples:
        return torch.float16
    seen = _LargestMagnitude(cluster.gm)
    with torch.no_grad():
        seen.run(*cluster.samples[0])
    fits = seen.largest * HEADROOM <= torch.finfo(torch.float16).max
    return torch.float16 if fits else torch.bfloat16


class _LargestMagnitude(Interpreter):
    """Remembers the largest finite magnitude that enters or leaves an op in ``HALF_OPS``."""

    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm)
        self.largest = 0.0

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        result = super().call_function(target, args, kwargs)
        if name_of(target) in HALF_OPS:
            floating = (t for t in tensors_in((args, kwargs, result)) if t.is_floating_point())
            for tensor in floating:
                finite = tensor[tensor.isfinite()].abs()
                self.largest = max(self.largest, float(finite.max()) if finite.numel() else 0.0)
        return result


def name_of(target: Any) -> str:
    """The name of an ATen op without its overload; "" for anything else."""
    return str(target).split(".")[1] if isinstance(target, torch._ops.OpOverload) else ""
