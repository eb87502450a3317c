# SPDX-License-Identifier: Apache-2.0
"""In which 16 bits a cluster may compute: what the config permits, and what its values fit into.

dtype = half_of(cluster, config)        # torch.float16, torch.bfloat16 or None
"""

from typing import Any

import torch
from torch.fx import GraphModule

from blade.backends.base import Cluster
from blade.config import Config
from blade.graph.interpreter import Interpreter
from blade.graph.leaves import tensors_in

# Products, by op names without overload: autocast's list for CUDA (torch, aten/src/ATen/autocast_mode.h).
NARROW = frozenset(
    "mm addmm bmm baddbmm matmul linear addbmm addmv mv chain_matmul linalg_multi_dot einsum conv1d conv2d conv3d "
    "convolution _convolution conv_transpose1d conv_transpose2d conv_transpose3d prelu "
    "scaled_dot_product_attention".split()
)
HEADROOM = 4.0  # how far below float16's largest number the magnitudes of samples have to stay


def half_of(cluster: Cluster, config: Config) -> torch.dtype | None:
    """What products of float32 may be computed in; ``None``: in float32 only."""
    if config.enable_fp16:
        return choose(cluster)
    return torch.bfloat16 if config.enable_bf16 else None


def choose(cluster: Cluster) -> torch.dtype:
    """float16, or bfloat16 where values at the first sample come near to what float16 can hold."""
    if not cluster.samples:
        return torch.float16
    seen = _Largest(cluster.gm)
    with torch.no_grad():
        seen.run(*cluster.samples[0])
    fits = seen.largest * HEADROOM <= torch.finfo(torch.float16).max
    return torch.float16 if fits else torch.bfloat16


class _Largest(Interpreter):
    """Remembers the largest finite magnitude that enters or leaves an op in ``NARROW``."""

    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm)
        self.largest = 0.0

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        result = super().call_function(target, args, kwargs)
        if name_of(target) in NARROW:
            floating = (t for t in tensors_in((args, kwargs, result)) if t.is_floating_point())
            for tensor in floating:
                finite = tensor[tensor.isfinite()].abs()
                self.largest = max(self.largest, float(finite.max()) if finite.numel() else 0.0)
        return result


def name_of(target: Any) -> str:
    """The name of an ATen op without its overload; "" for anything else."""
    return str(target).split(".")[1] if isinstance(target, torch._ops.OpOverload) else ""
