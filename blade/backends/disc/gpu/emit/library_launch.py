# SPDX-License-Identifier: Apache-2.0
"""The implementations of a library instruction on a GPU: launches of our kernels, or ATen, by condition."""

from dataclasses import dataclass

import sympy
import torch

from blade.backends.disc.gpu.compile.triton_unit import LaunchChoice
from blade.backends.disc.gpu.emit.pointwise import POINTERS
from blade.backends.disc.ir.graph import Value
from blade.backends.disc.ir.kernel import Dim
from blade.backends.disc.ir.size_facts import SizeRelations
from blade.backends.disc.ir.views import view_of
from blade.backends.disc.program.instructions import Counters, ScratchBuffer


@dataclass(frozen=True)
class LibraryLaunch:
    """``choice`` on pointers to the first elements of ``operands``, and on ``ints``."""

    choice: LaunchChoice
    operands: tuple[Value | ScratchBuffer | Counters, ...]
    ints: tuple[Dim, ...]


@dataclass(frozen=True)
class AtenCall:
    """``value`` through the dispatcher if ``when`` holds; ``None``: always."""

    value: Value
    when: sympy.Basic | None


def pointer(operand: Value | ScratchBuffer | Counters) -> str:
    """Triton's pointer type for ``operand``."""
    return POINTERS[torch.int32 if isinstance(operand, Counters) else operand.dtype]


def starts_aligned(x: Value, facts: SizeRelations) -> bool:
    """Is the first element of ``x`` aligned to 16 bytes, as in every buffer?"""
    view = view_of(x)
    assert view is not None, x
    return facts.divides(max(1, 16 // x.dtype.itemsize), view.offset)
