# SPDX-License-Identifier: Apache-2.0
"""An engine that was seen to be right, and what it takes to call it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from blade.report import Timing, Verdict

Weights = Sequence[float] | None
"""How much each sample counts; ``None``: all alike."""


@dataclass(frozen=True)
class Candidate:
    """A verified engine and the module that calls it, with the original inside as its fallback.

    Both are ``None`` once it has lost (``released``): engines hold memory, some a copy of the weights.
    """

    backend: str
    engine: torch.ScriptObject | None
    module: torch.jit.ScriptModule | None
    verdict: Verdict
    timings: tuple[Timing, ...] = ()
    key: str | None = None  # what it is stored under (``stored``)
    stored: bool = False  # it is, with the timings that speak for it

    @property
    def engines(self) -> tuple[torch.ScriptObject, ...]:
        return () if self.engine is None else (self.engine,)

    def released(self) -> "Candidate":
        return replace(self, engine=None, module=None)
