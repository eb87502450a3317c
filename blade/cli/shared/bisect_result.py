# SPDX-License-Identifier: Apache-2.0
"""The result of bisecting one backend; importing it does not load the runtime."""

from dataclasses import dataclass

from blade.core.reason import Reason


@dataclass(frozen=True)
class BisectResult:
    """The result of bisecting one backend; ``cluster`` is ``None`` if nothing differs.

    ``op`` and ``source`` are those of the first op that differs, ``None`` if only the whole model differs.
    ``not_built`` are the clusters that this backend failed to convert: they have no values to compare.
    """

    backend: str
    clusters: int
    cluster: str | None
    op: str | None
    source: str | None
    reason: Reason | None
    not_built: tuple[Reason, ...]
