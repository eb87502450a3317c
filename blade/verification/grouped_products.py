# SPDX-License-Identifier: Apache-2.0
"""Grouped products in float64, which torch has for narrower floats alone: mixtures of experts use them.

grouped_product(x, weights, ends)      # rows up to ends[0] by weights[0], from there to ends[1] by weights[1] ..
with GroupedProducts():                # makes aten._grouped_mm compute float64 so
    want = wide_model(*inputs)
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from blade.verification.wide_at_use import widened

GROUPED = torch.ops.aten._grouped_mm.default


def grouped_product(
    a: torch.Tensor,
    b: torch.Tensor,
    ends: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``torch.nn.functional.grouped_mm``, one group after the other; ``ends``: where each ends along the axis shared.

    Operands of two axes are cut into groups, along their rows, their columns, or the depth of both.
    """
    a, b = widened(a), widened(b)
    if ends is None:
        made = torch.bmm(a, b)
    else:
        parts = [slice(*pair) for pair in pairwise([0, *ends.tolist()])]
        if a.dim() == 2 and b.dim() == 2:
            made = torch.stack([a[:, part] @ b[part] for part in parts])
        elif a.dim() == 2:
            made = a.new_zeros(a.shape[0], b.shape[-1])
            for k, part in enumerate(parts):
                made[part] = a[part] @ b[k]
        else:
            made = a.new_zeros(a.shape[-2], b.shape[1])
            for k, part in enumerate(parts):
                made[:, part] = a[k] @ b[:, part]
    return made if bias is None else made + widened(bias)


class GroupedProducts(TorchDispatchMode):
    """Computes grouped products of float64."""

    supports_higher_order_operators = True  # they run unchanged

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is GROUPED and args[0].dtype == torch.float64:
            return grouped_product(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))
