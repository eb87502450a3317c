# SPDX-License-Identifier: Apache-2.0
"""What serves a library instruction on a GPU: launches of our own kernels, or ATen, each where it is best."""

from dataclasses import dataclass

import sympy
import torch

from blade.backends.disc.gpu.pointwise import POINTERS
from blade.backends.disc.gpu.unit import Choice
from blade.backends.disc.ir import Value
from blade.backends.disc.kernel import Dim
from blade.backends.disc.steps import Counters, Scratch


@dataclass(frozen=True)
class LibraryLaunch:
    """``choice`` on ``operands``, a pointer to the first element of each, with ``ints``."""

    choice: Choice
    operands: tuple[Value | Scratch | Counters, ...]
    ints: tuple[Dim, ...]


@dataclass(frozen=True)
class ByAten:
    """``value`` through the dispatcher where ``when`` holds; ``None``: always."""

    value: Value
    when: sympy.Basic | None


def pointer(operand: Value | Scratch | Counters) -> str:
    """Triton's type of a pointer to ``operand``."""
    return POINTERS[torch.int32 if isinstance(operand, Counters) else operand.dtype]
