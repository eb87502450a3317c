# SPDX-License-Identifier: Apache-2.0
"""The op ``group_moments``: mean and inverse deviation of groups of channels, if the target implements it.

    group_moments(lo, x, groups, eps) -> mean, rstd       x [N, C, *pixels], results [N, C], in float32

Written out, the sum over a group takes two or three reductions if its pixels and channels are not
contiguous in memory, and the deviation takes them again. If ``TargetCapabilities.moments`` has the dtype,
both are one value [2, N, C], equal for all channels of a group, which normalization reads like a weight.
"""

import torch

from blade.backends.disc.frontend.ops.table import Lowering
from blade.backends.disc.ir.graph import Value

FEWEST_BYTES = 8  # of a group per pixel: with fewer, reductions across pixels are faster


def group_moments(lo: Lowering, x: Value, groups: int, eps: float) -> tuple[Value, Value] | None:
    """(mean, rstd) of ``x`` in its own dtype; ``None`` if the target has no code for it."""
    batch, channels = x.shape[:2]
    if x.dtype not in lo.forms.moments or not isinstance(channels, int):
        return None
    if len(x.shape) < 3 or channels // groups * x.dtype.itemsize < FEWEST_BYTES:
        return None
    shape = (2, batch, channels)
    both = lo.b.make("group_moments", (x,), shape, torch.float32, groups=groups, eps=float(eps))
    mean, rstd = (lo.b.reshape(lo.b.slice(both, 0, k, 1, 1), shape[1:]) for k in range(2))
    return mean, rstd


def reference(v: Value, x: torch.Tensor) -> torch.Tensor:
    """The reference semantics of ``group_moments``."""
    batch, channels = x.shape[:2]
    rows = x.to(torch.promote_types(x.dtype, torch.float32)).reshape(batch, v.attrs["groups"], -1)
    variance, mean = torch.var_mean(rows, dim=-1, correction=0)
    both = torch.stack([mean, torch.rsqrt(variance + v.attrs["eps"])])
    return both.repeat_interleave(channels // v.attrs["groups"], dim=2).to(v.dtype)
