# SPDX-License-Identifier: Apache-2.0
"""A GPU function to compile, and the choice of functions by shape.

unit = named_unit("loop", text, signature, constants)      # text defines ``kernel``; it becomes loop_5f3a..
choices = (LaunchChoice(s0 <= 1024, small, (s1, 1, 1)), LaunchChoice(s0 > 1024, large, (s1, 1, 1)))
"""

from dataclasses import dataclass

import sympy

from blade.backends.disc.ir.kernel import Dim
from blade.core.disk_cache import digest

_PLACEHOLDER = "def kernel("


@dataclass(frozen=True)
class TritonUnit:
    """One function to compile: ``text`` is a module with imports, helpers and one ``@triton.jit`` ``name``.

    ``signature``: parameter -> Triton's type ("*fp32", "*i1", "i64"), in the order of launching: pointers
    first, then sizes. ``constants``: the constexpr parameters. ``aligned``: pointers at multiples of 16 bytes
    and sizes that are multiples of 16. ``early``: it may start while the previous launch still runs
    (programmatic dependent launch), because it waits (``gdc_wait``) before it reads or writes memory.
    ``registers``: limit per thread, so that more programs run at once; 0: no limit.
    """

    name: str
    text: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, object], ...] = ()
    aligned: tuple[str, ...] = ()
    warps: int = 4
    stages: int = 3
    early: bool = False
    registers: int = 0

    @property
    def pointers(self) -> int:
        """The number of pointer parameters."""
        return sum(kind.startswith("*") for _, kind in self.signature)


@dataclass(frozen=True)
class LaunchChoice:
    """``unit`` over ``grid`` if ``when`` holds; ``None``: always.

    The choices of one kernel are exclusive and complete: exactly one holds at every shape.
    """

    when: sympy.Basic | None
    unit: TritonUnit
    grid: tuple[Dim, Dim, Dim]


def condition(when: sympy.Basic | bool) -> sympy.Basic | None:
    """``when`` in the form of ``LaunchChoice.when``."""
    return None if when in (True, sympy.true) else sympy.sympify(when)


def named_unit(
    kind: str,
    text: str,
    signature: tuple[tuple[str, str], ...],
    constants: tuple[tuple[str, object], ...] = (),
    aligned: tuple[str, ...] = (),
    warps: int = 4,
    stages: int = 3,
    early: bool = False,
    registers: int = 0,
) -> TritonUnit:
    """A unit named by its content, so that models share equal kernels. ``text`` defines ``kernel``."""
    assert text.count(_PLACEHOLDER) == 1, text
    parts = [
        text,
        repr(signature),
        repr(constants),
        repr(aligned),
        f"{warps} {stages}" + " early" * early + (f" {registers}" if registers else ""),
    ]
    name = f"{kind}_{digest(parts)[:12]}"
    text = text.replace(_PLACEHOLDER, f"def {name}(")
    return TritonUnit(name, text, signature, constants, aligned, warps, stages, early, registers)
