# SPDX-License-Identifier: Apache-2.0
"""What capture hands on: the frozen graph, and what is needed to judge anything made from it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from blade.reason import Reason


@dataclass(frozen=True)
class Captured:
    """A private, frozen copy of the user's model.

    ``module.graph`` is what the later stages view and cut; its inputs are ``self`` and one value per
    entry of a sample. ``original`` computes the reference (same positional arguments, the user's own
    code on a deep copy, tensors out in ``module``'s order). ``samples`` are the user's, as
    positional tuples in the graph's input order; ``probes`` are samples derived from them with other
    sizes (distinct, none 0 or 1) that ``original`` was seen to accept.
    """

    module: torch.jit.ScriptModule
    original: Callable[..., Any]
    samples: tuple[tuple[Any, ...], ...]
    probes: tuple[tuple[Any, ...], ...]
    reasons: tuple[Reason, ...]
    how: str  # "trace" or "script"
