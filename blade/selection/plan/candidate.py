# SPDX-License-Identifier: Apache-2.0
"""A candidate: a verified engine for one cluster, and the module that calls it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from blade.report import Timing, Verdict

Weights = Sequence[float] | None
"""Weight of each sample; ``None``: all equal."""


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
    key: str | None = None  # its key in the engine cache
    stored: bool = False  # it came from the cache, with its timings

    @property
    def engines(self) -> tuple[torch.ScriptObject, ...]:
        return () if self.engine is None else (self.engine,)

    def released(self) -> "Candidate":
        return replace(self, engine=None, module=None)
