# SPDX-License-Identifier: Apache-2.0
"""An engine that was seen to be right, and what it takes to call it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from blade.report import Timing, Verdict

Weights = Sequence[float] | None
"""How much each sample counts; ``None``: all alike."""


@dataclass(frozen=True)
class Candidate:
    """A verified engine and the module that calls it, with the original inside as its fallback."""

    backend: str
    engine: torch.ScriptObject
    module: torch.jit.ScriptModule
    verdict: Verdict
    timings: tuple[Timing, ...] = ()
    key: str | None = None  # what it is stored under (``stored``)
    recalled: bool = False  # it was stored, with the timings that speak for it

    @property
    def engines(self) -> tuple[torch.ScriptObject, ...]:
        return (self.engine,)
