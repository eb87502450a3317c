# SPDX-License-Identifier: Apache-2.0
"""Mean and deviation of groups of channels: the op ``group_moments``, which a target may have code for.

    group_moments(lo, x, groups, eps) -> mean, rstd       x [N, C, *pixels], results [N, C], in float32

Written out, the sum over pixels and channels of a group is two or three reductions wherever pixels and channels
of a group are not one run of memory, and the deviation needs them again. Where ``Forms.moments`` has the
dtype they are one value, [2, N, C], the same for all channels of a group, so that whoever normalizes reads them
like a weight.
"""

import torch

from blade.backends.disc.ir import Value
from blade.backends.disc.ops.table import Lowering

FEWEST_BYTES = 8  # of a group in a pixel: what lies alone in memory is better summed side by side


def group_moments(lo: Lowering, x: Value, groups: int, eps: float) -> tuple[Value, Value] | None:
    """``None`` where the target has no code for it; ``x`` is not converted to float32 before."""
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
    """What ``group_moments`` means."""
    batch, channels = x.shape[:2]
    rows = x.to(torch.promote_types(x.dtype, torch.float32)).reshape(batch, v.attrs["groups"], -1)
    variance, mean = torch.var_mean(rows, dim=-1, correction=0)
    both = torch.stack([mean, torch.rsqrt(variance + v.attrs["eps"])])
    return both.repeat_interleave(channels // v.attrs["groups"], dim=2).to(v.dtype)
