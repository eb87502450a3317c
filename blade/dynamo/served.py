# SPDX-License-Identifier: Apache-2.0
"""A cluster of a compiled graph: try the engine, else run the original FX subgraph.

The first call verifies: the engine's answers on the very inputs of that call, and on inputs derived from
them as far as a second goes, are held against the original's, and both are timed. What is wrong or slower is not
used. In training nothing is derived: what a forward graph saved for its backward one fits together only as it is.
"""

import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from blade.backends import registry
from blade.backends.base import Cluster
from blade.config import Config
from blade.fallback.generators import Generators
from blade.fallback.lossy import budget_of
from blade.fallback.measure import measure, why_clearly_slower
from blade.fallback.verify import verify
from blade.graph.fx_extract import FxExtracted, carrier
from blade.reason import Code, Reason, Stage
from blade.report import ORIGINAL, Timing, Verdict
from blade.runtime.engine import Engine

log = logging.getLogger(__name__)
# The user waits for the answer of the first call. Seconds of trying an engine on other inputs than that call's, and
# seconds after which a clear win is timed no further.
DERIVED_S = 1.0
HURRY_S = 0.1
Tensors = Sequence[torch.Tensor]


class Served(torch.nn.Module):
    """Takes the inputs of ``cut`` and returns its outputs, in a list or tuple."""

    def __init__(
        self,
        cut: FxExtracted,
        engine: torch.ScriptObject,
        backend: str,
        config: Config,
        derived: bool,
    ) -> None:
        super().__init__()
        self.name, self.backend = cut.name, backend
        self.fallback = cut.fallback
        self.verdict: Verdict | None = None
        self.timings: tuple[Timing, ...] = ()
        self.reason: Reason | None = None
        self._engine: Any = engine
        self._tensors = cut.num_tensors
        self._orders = [
            (k, order, [order.index(axis) for axis in range(len(order))])
            for k, order in cut.orders.items()
        ]
        self._config = config
        self._derived = derived
        self._unproven: Cluster | None = cut.cluster
        self._first = threading.Lock()
        self._serves = True

    @property
    def serving(self) -> str:
        """Who answers: the backend, or the original."""
        return self.backend if self._serves else ORIGINAL

    def engine(self) -> Engine:
        return cast(Engine, self._engine)

    def forward(self, *args: Any) -> Tensors:
        if self._unproven is not None:
            self._prove(args)
        if self._serves:
            found: Tensors | None = self._engine.try_execute(self._given(args))
            if found is not None:
                return found
        answer: Tensors = self.fallback(*args)
        return answer

    def _given(self, args: Sequence[Any]) -> list[torch.Tensor]:
        count = self._tensors
        given = list(args[:count])
        for k, order, _ in self._orders:
            given[k] = given[k].permute(order)
        if count < len(args):
            given += (carrier(n) if n >= 0 else torch.empty(()) for n in args[count:])
        return given

    def _original(self, *tensors: torch.Tensor) -> Tensors:
        """On what the engine takes."""
        numbers = (t.numel() for t in tensors[self._tensors :])
        given = list(tensors[: self._tensors])
        for k, _, back in self._orders:
            given[k] = given[k].permute(back)
        answer: Tensors = self.fallback(*given, *numbers)
        return answer

    def _prove(self, args: Sequence[Any]) -> None:
        with self._first:
            cluster = self._unproven
            if cluster is None:
                return
            with torch.no_grad(), Generators(cluster.gm):
                given = tuple(t.detach() for t in self._given(args))
                given = tuple(  # what the trials write to is not the caller's
                    t.clone() if i in cluster.updates else t for i, t in enumerate(given)
                )
                self.reason = self._why_not(replace(cluster, samples=(given,)), given)
            self._serves = self.reason is None
            self._unproven = None
            if any(t.is_cuda for t in given):
                torch.cuda.empty_cache()  # trying took several times what a call takes
        if self.reason is not None:
            log.info("%s: the original serves: %s", self.name, self.reason.detail)

    def _why_not(self, cluster: Cluster, given: tuple[torch.Tensor, ...]) -> Reason | None:
        strict = self._config.strict
        verdict = verify(
            cluster,
            self._engine,
            self._original,
            self.backend,
            strict,
            budget_of(registry.load(self.backend), self._config),
            derived=self._derived,
            seconds=DERIVED_S,
        )
        self.engine().renew()
        if isinstance(verdict, Reason):
            return verdict
        self.verdict = verdict
        if not self._config.timing:
            return None
        rounds = self._config.timing_repeats
        self.timings = (measure(self._run, self._original, given, rounds, hurry_s=HURRY_S),)
        if (sentence := why_clearly_slower(self.timings)) is not None:
            return Reason(Stage.SELECT, Code.SLOWER, self.backend, self.name, sentence)
        return None

    def _run(self, *tensors: torch.Tensor) -> Tensors:
        found: Tensors | None = self._engine.try_execute(list(tensors))
        return self._original(*tensors) if found is None else found
