# SPDX-License-Identifier: Apache-2.0
"""A compiled function of the GPU, and which one runs at a shape.

unit = named("loop", text, signature, constants)      # text defines ``kernel``; it becomes loop_5f3a..
choices = (Choice(s0 <= 1024, small, (s1, 1, 1)), Choice(s0 > 1024, large, (s1, 1, 1)))
"""

from dataclasses import dataclass

import sympy

from blade.backends.disc.kernel import Dim
from blade.cache import digest

_PLACEHOLDER = "def kernel("


@dataclass(frozen=True)
class Unit:
    """One function to compile: ``text`` is a module with imports, helpers and one ``@triton.jit`` ``name``.

    ``signature``: parameter -> Triton's type ("*fp32", "*i1", "i64"), in the order of launching: pointers
    first, then the sizes. ``constants``: the constexpr parameters. ``aligned``: pointers at multiples of
    16 bytes and sizes that are multiples of 16. ``early``: it may be started while what was launched before it
    still runs (programmatic dependent launch), because it waits (``gdc_wait``) before it reads or writes memory.
    ``registers``: the most of a thread, so that more programs run at once; 0: as many as it wants.
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
        """How many of the parameters are pointers."""
        return sum(kind.startswith("*") for _, kind in self.signature)


@dataclass(frozen=True)
class Choice:
    """``unit`` over ``grid`` where ``when`` holds; ``None``: always.

    The choices of one kernel are exclusive and complete: one is taken at every shape.
    """

    when: sympy.Basic | None
    unit: Unit
    grid: tuple[Dim, Dim, Dim]


def condition(when: sympy.Basic | bool) -> sympy.Basic | None:
    """``when`` as a ``Choice`` has it."""
    return None if when in (True, sympy.true) else sympy.sympify(when)


def named(
    kind: str,
    text: str,
    signature: tuple[tuple[str, str], ...],
    constants: tuple[tuple[str, object], ...] = (),
    aligned: tuple[str, ...] = (),
    warps: int = 4,
    stages: int = 3,
    early: bool = False,
    registers: int = 0,
) -> Unit:
    """A unit named by its content: models share the code of equal kernels. ``text`` defines ``kernel``."""
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
    return Unit(name, text, signature, constants, aligned, warps, stages, early, registers)
