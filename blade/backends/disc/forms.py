# SPDX-License-Identifier: Apache-2.0
"""What lowering may use because a target serves it: dtypes for which an op of the IR has code."""

from dataclasses import dataclass

import torch

Dtypes = tuple[torch.dtype, ...]


@dataclass(frozen=True)
class Forms:
    """Dtypes of ``attention`` and of ``conv``, and of a convolution's gradients as a ``conv`` and a product.

    With others the op stays ATen's, a `call`; ``group_moments`` is written out.
    """

    attention: Dtypes
    convolution: Dtypes
    gradients: Dtypes = ()
    widest_head: int | None = None  # of an attention; None: any
    moments: Dtypes = ()  # of ``group_moments``


CPU = Forms((torch.float32,), (torch.float32,), (torch.float32,))
"""Generated kernels are float32's; halves have no product on most CPUs."""
