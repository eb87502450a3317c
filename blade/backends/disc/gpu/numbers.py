# SPDX-License-Identifier: Apache-2.0
"""The sizes and strides of a library kernel: what is known becomes part of the code, the rest is passed.

split({"N": 768, "M": s0, "X_ROW": 768 * s1}, facts)
    -> constants (("N", 768),), passed ("M", "X_ROW"), aligned ("X_ROW",), values (s0, 768*s1)
"""

from collections.abc import Mapping
from dataclasses import dataclass

from blade.backends.disc.facts import Facts
from blade.backends.disc.kernel import Dim

ALIGNED = 16
"""What Triton asks of a size to call it aligned, in elements; of a pointer, in bytes."""


@dataclass(frozen=True)
class Numbers:
    """``passed`` are parameters of the launch, with ``values``, in order; of these ``aligned`` are multiples."""

    constants: tuple[tuple[str, object], ...]
    passed: tuple[str, ...]
    aligned: tuple[str, ...]
    values: tuple[Dim, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """All of them, as a kernel's text declares them: what is passed comes first."""
        return (*self.passed, *(name for name, _ in self.constants))

    @property
    def signature(self) -> tuple[tuple[str, str], ...]:
        return tuple((name, "i64") for name in self.passed)


def split(numbers: Mapping[str, Dim], facts: Facts) -> Numbers:
    """Sort ``numbers`` into what the code knows and what a launch passes."""
    known = tuple((k, n) for k, n in numbers.items() if isinstance(n, int))
    passed = {k: n for k, n in numbers.items() if not isinstance(n, int)}
    aligned = tuple(k for k, n in passed.items() if facts.divides(ALIGNED, n))
    return Numbers(known, tuple(passed), aligned, tuple(passed.values()))
