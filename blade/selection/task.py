# SPDX-License-Identifier: Apache-2.0
"""Input of the search for engines: the captured graph, and the backends that support each node."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from blade.config import Config
from blade.core.backend import Backend
from blade.core.captured import Captured
from blade.core.reason import Code, Reason
from blade.graph.torchscript.boundary_samples import BoundarySamples
from blade.graph.torchscript.view import GraphView
from blade.partition.support import Support
from blade.selection.cache.decisions import SelectionResult
from blade.selection.cache.fingerprint import WeightDigests
from blade.timing.stage_clock import StageClock
from blade.timing.time_budget import TimeBudget


@dataclass(frozen=True)
class Task:
    """One optimization: the captured graph, the backends and their support, and the time budget.

    ``reasons`` are those known before the search. ``key`` is the key of the decision in the cache, ``None``
    if it is not stored; ``decided`` is the cached decision, if there is one. ``fixed``: the clusters are
    those of the joint partition, with one engine each, and ``samples`` are the tensors already recorded at
    their boundaries. ``left_out``: backends that work here and are predicted to lose.
    """

    captured: Captured
    graph: GraphView
    plan: Support
    backends: Sequence[Backend]
    config: Config
    budget: TimeBudget
    clock: StageClock
    reasons: tuple[Reason, ...] = ()
    contents: WeightDigests = field(default_factory=WeightDigests)
    samples: BoundarySamples | None = None
    fixed: bool = False
    key: str | None = None
    decided: SelectionResult | None = None
    left_out: tuple[Backend, ...] = ()

    @property
    def draws(self) -> bool:
        """Whether the model draws from torch's random generators."""
        return any(reason.code is Code.RANDOM for reason in self.plan.reasons)


Search = Callable[[Task], SelectionResult]
