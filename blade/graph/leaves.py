# SPDX-License-Identifier: Apache-2.0
"""Values that hold several: arguments, results, samples."""

from typing import Any

import torch
from torch.utils import _pytree as pytree


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors anywhere in ``value`` (lists, tuples, dicts, and what else torch can look into), in order."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
