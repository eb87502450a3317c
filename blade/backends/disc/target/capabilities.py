# SPDX-License-Identifier: Apache-2.0
"""Dtypes for which a target implements each IR op; lowering may use no others."""

from dataclasses import dataclass

import torch

Dtypes = tuple[torch.dtype, ...]


@dataclass(frozen=True)
class TargetCapabilities:
    """Dtypes of ``attention``, of ``conv``, of a convolution's gradients (a ``conv`` and a product), and of transposed
    convolutions (a ``conv`` per phase). ``image_gradients``: dtypes in which a convolution's gradient of its input is a
    ``conv`` and that of its weight a `call`, both on channels-last data.

    With other dtypes the op stays an ATen `call`; ``group_moments`` is written out in pointwise ops.
    """

    attention: Dtypes
    convolution: Dtypes
    gradients: Dtypes = ()
    transposed: Dtypes = ()
    widest_head: int | None = None  # head size of an attention; None: no limit
    moments: Dtypes = ()  # dtypes of ``group_moments``
    bilinear: Dtypes = ()  # dtypes of images that are resampled in kernels
    image_gradients: Dtypes = ()
    bags: Dtypes = ()  # dtypes of tables whose bags are reduced in kernels
    recurrences: Dtypes = ()  # dtypes of recurrent layers that are loops of kernels


_NARROW = (torch.float32, torch.bfloat16)
_FLOAT = (torch.float32,)
CPU = TargetCapabilities(_NARROW, _NARROW, _FLOAT, _NARROW, bags=_FLOAT, recurrences=_FLOAT)
"""Kernels are generated for float32; attention and convolutions for bfloat16 too, widened where a CPU has no such
products. Convolutions of bfloat16 in small groups are ATen's, on channels-last data."""
