# SPDX-License-Identifier: Apache-2.0
"""Which ops AOTAutograd takes apart before blade sees them: those that DISC has no rule for as they are."""

from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import get_decompositions

aten = torch.ops.aten


def decompositions() -> dict[Any, Callable[..., Any]]:
    return get_decompositions([aten.native_layer_norm_backward])
