# SPDX-License-Identifier: Apache-2.0
"""The sizes and strides of a library kernel: known numbers become part of the code, others are passed.

specialize_sizes({"N": 768, "M": s0, "X_ROW": 768 * s1}, facts)
    -> constants (("N", 768),), passed ("M", "X_ROW"), aligned ("X_ROW",), values (s0, 768*s1)
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from blade.backends.disc.ir.kernel import Dim
from blade.backends.disc.ir.size_facts import SizeRelations

ALIGNED = 16
"""The multiple that Triton calls aligned: in elements for a size, in bytes for a pointer."""


@dataclass(frozen=True)
class SpecializedSizes:
    """``passed``: the launch's parameters, with ``values``, in order; ``aligned``: multiples of ALIGNED."""

    constants: tuple[tuple[str, object], ...]
    passed: tuple[str, ...]
    aligned: tuple[str, ...]
    values: tuple[Dim, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """All names in the order in which a kernel's text declares them: passed ones first."""
        return (*self.passed, *(name for name, _ in self.constants))

    @property
    def signature(self) -> tuple[tuple[str, str], ...]:
        return tuple((name, "i64") for name in self.passed)


def specialize_sizes(
    numbers: Mapping[str, Dim], facts: SizeRelations, shared: Collection[str] = ()
) -> SpecializedSizes:
    """Split ``numbers`` into constants of the code and parameters of the launch.

    ``shared``: names that are passed even if known, so that launches share the code.
    """
    known = tuple((k, n) for k, n in numbers.items() if isinstance(n, int) and k not in shared)
    passed = {k: n for k, n in numbers.items() if not isinstance(n, int) or k in shared}
    aligned = tuple(k for k, n in passed.items() if facts.divides(ALIGNED, n))
    return SpecializedSizes(known, tuple(passed), aligned, tuple(passed.values()))
