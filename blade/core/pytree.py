# SPDX-License-Identifier: Apache-2.0
"""Nested values: arguments, results, samples."""

from typing import Any

import torch
from torch.utils import _pytree as pytree


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors at any depth of ``value`` (lists, tuples, dicts, other pytree nodes of torch), in order."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
