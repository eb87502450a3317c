# SPDX-License-Identifier: Apache-2.0
"""A cluster of a compiled graph: try the engine, else run the original FX subgraph.

The engines of a cluster compete at its first call. Each is verified: its answers are compared with the
original's on the inputs of that call and, for up to a second, on inputs derived from them. Engines that pass
are timed in turns with the original and each other. The fastest serves from then on, and the others are
dropped. If every engine is clearly slower than the original, the original serves. The trials write to copies
of the inputs, which have the caller's contents before each call; a trial that raises leaves the original.
``Config.optimization_pipeline`` and BLADE_BACKENDS select the backends, ``Config.time_budget`` limits the
time.

In training no inputs are derived: activations that a forward graph saved are consistent only as they are.
"""

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, cast

import torch

from blade.backends import registry
from blade.config import Config
from blade.core.attempt import attempt
from blade.core.cluster import Cluster
from blade.core.reason import Code, Reason, Stage
from blade.dynamo.constant_watch import ConstantWatch
from blade.graph.fx.extract import carrier
from blade.report import ORIGINAL, Timing
from blade.runtime.engine import Engine
from blade.selection.plan.candidate import Candidate
from blade.selection.plan.select import fastest, lost
from blade.timing.interleaved import EARLY_EXIT_S, measure_all, why_clearly_slower
from blade.timing.stopwatch import Stopwatch
from blade.timing.time_budget import UNLIMITED, TimeBudget
from blade.verification.derived_inputs import crashes, end
from blade.verification.reduced_precision import budget_of
from blade.verification.rng_replay import RngReplay
from blade.verification.verify import verify

log = logging.getLogger(__name__)
# The user waits for the answer of the first call.
DERIVED_CASES_S = 1.0  # for verifying an engine on derived inputs
COMPETE_S = 1.0  # before early exit from timing several engines, which have to be told apart
Tensors = Sequence[torch.Tensor]
Copies = Sequence[tuple[torch.Tensor, torch.Tensor]]  # a copy, and the caller's tensor


@dataclass(frozen=True)
class Competition:
    """The result of the first call: the engine that serves (``None``: the original serves), and the others.

    ``tried`` are the engines that passed verification. ``reasons`` say why the other engines do not serve;
    ``crashes`` report crashes of the original at derived inputs.
    """

    chosen: Candidate | None
    tried: tuple[Candidate, ...] = ()
    reasons: tuple[Reason, ...] = ()
    crashes: tuple[Reason, ...] = ()


class Cut(Protocol):
    """A cluster and its original; ``FxExtracted``, or what was loaded of one.

    ``cluster`` is ``None`` if its engine was selected before it was saved. ``live``: as in ``Cluster``.
    """

    @property
    def name(self) -> str: ...
    @property
    def fallback(self) -> torch.fx.GraphModule: ...
    @property
    def num_tensors(self) -> int: ...
    @property
    def orders(self) -> Mapping[int, tuple[int, ...]]: ...
    @property
    def live(self) -> bool: ...
    @property
    def cluster(self) -> Cluster | None: ...


class FxClusterModule(torch.nn.Module):
    """Takes the inputs of ``cut`` and returns its outputs, in a list or tuple.

    ``engines``: by backend, in order of preference. ``lent``: outputs that the engines keep in their own memory.
    ``budget``: time for the whole graph, on the clock ``spent``.
    """

    def __init__(
        self,
        cut: Cut,
        engines: Mapping[str, torch.ScriptObject],
        config: Config,
        derived: bool,
        budget: TimeBudget = UNLIMITED,
        spent: Stopwatch | None = None,
        lent: Sequence[int] = (),
    ) -> None:
        super().__init__()
        if lent:
            for engine in engines.values():
                cast(Engine, engine).lend(list(lent))
        self.cut, self.lent = cut, tuple(lent)
        self.name, self.backends = cut.name, tuple(engines)
        self.fallback = cut.fallback
        self.found: Competition | None = None
        self._rivals = dict(engines)
        self._backend = self.backends[0]
        self._engine: Any = engines[self._backend]
        self._tensors = cut.num_tensors
        self._orders = [
            (k, order, [order.index(axis) for axis in range(len(order))])
            for k, order in cut.orders.items()
        ]
        self._config, self._budget = config, budget
        self._spent = Stopwatch() if spent is None else spent
        self._derived = derived
        self._watches: dict[str, ConstantWatch] = _watches(cut, self.backends)
        self._watch = self._watches.get(self._backend)
        self._unproven: Cluster | None = cut.cluster
        self._first = threading.Lock()
        self._serves = True

    @property
    def serving(self) -> str:
        """The backend that answers, or the original."""
        return self._backend if self._serves else ORIGINAL

    def standing(self) -> tuple[dict[str, torch.ScriptObject], Cluster | None]:
        """The engine that serves, by its backend; before the first call, all engines, and the cluster to verify."""
        with self._first:
            if self._unproven is not None:
                return dict(self._rivals), self._unproven
            return ({self._backend: self._engine} if self._serves else {}), None

    @property
    def settings(self) -> tuple[Config, bool]:
        """The configuration, and whether engines are verified on derived inputs."""
        return self._config, self._derived

    def engine(self) -> Engine:
        """The engine that serves; if the original does, or before the first call, the first backend's."""
        return cast(Engine, self._engine)

    def forward(self, *args: Any) -> Tensors:
        if self._unproven is not None:
            self._prove(args)
        if self._serves:
            if self._watch is not None:
                self._watch.check()
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
        """Run the original on the inputs that the engine takes."""
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
            trial, strict = partial(self._trial, cluster, args), self._config.strict
            raised = Code.ENGINE_RAISED
            with self._spent, torch.no_grad():
                found = attempt(Stage.SELECT, None, self.name, trial, strict, raised)
            if isinstance(found, Reason):
                found = Competition(None, (), (found,))
            self._serve(found)
            self._unproven = None
            if any(isinstance(t, torch.Tensor) and t.is_cuda for t in args):
                torch.cuda.empty_cache()  # trials used several times the memory of a call
        for reason in found.reasons:
            log.info("%s: not %s: %s", self.name, reason.backend, reason.detail)

    def _trial(self, cluster: Cluster, args: Sequence[Any]) -> Competition:
        """Let the engines compete at the inputs of the waiting call, of which those that are written are copied."""
        theirs = [t.detach() for t in self._given(args)]
        given = tuple(t.clone() if i in cluster.updates else t for i, t in enumerate(theirs))
        copies = [(given[i], theirs[i]) for i in cluster.updates]
        try:
            with RngReplay(cluster.gm):
                return self._compete(replace(cluster, samples=(given,)), given, copies)
        finally:
            end(cluster.gm)

    def _serve(self, found: Competition) -> None:
        """Keep the engine that won and drop the others: they hold memory, some a copy of the weights."""
        if found.chosen is not None:
            self._backend, self._engine = found.chosen.backend, found.chosen.engine
            self._watch = self._watches.get(self._backend)
        self._serves = found.chosen is not None
        self._rivals, self._watches = {}, {}
        chosen = None if found.chosen is None else found.chosen.released()
        self.found = replace(found, chosen=chosen, tried=tuple(c.released() for c in found.tried))

    def _compete(self, cluster: Cluster, given: Tensors, copies: Copies) -> Competition:
        """``given`` is the sample of ``cluster``; ``copies`` are those of its inputs that are written."""
        verified: list[Candidate] = []
        reasons: list[Reason] = []
        for backend, engine in self._rivals.items():
            if verified and not self._budget.left():
                reasons.append(self._out_of_time(backend, "it was verified"))
            elif isinstance(found := self._verify(cluster, backend, engine), Reason):
                reasons.append(found)
            else:
                verified.append(found)
        found_crashes = crashes(cluster.gm)
        if not self._config.timing:
            return Competition(
                next(iter(verified), None), tuple(verified), tuple(reasons), found_crashes
            )
        late = [] if self._budget.left() else verified[1:]
        reasons += [self._out_of_time(one.backend, "it was measured") for one in late]
        measured = self._time([one for one in verified if one not in late], given, copies)
        reasons += [one for one in measured if isinstance(one, Reason)]
        timed = [one for one in measured if isinstance(one, Candidate)]
        slower = {one.backend: why for one in timed if (why := self._why_slower(one)) is not None}
        reasons += slower.values()
        right = [one for one in timed if one.backend not in slower]
        best = fastest(right)
        reasons += [lost(one, best, self.name) for one in right if best and one is not best]
        return Competition(best, (*timed, *late), tuple(reasons), found_crashes)

    def _verify(
        self, cluster: Cluster, backend: str, engine: torch.ScriptObject
    ) -> Candidate | Reason:
        verdict = verify(
            cluster,
            engine,
            self._original,
            backend,
            self._config.strict,
            budget_of(registry.load(backend), self._config),
            derived=self._derived,
            seconds=DERIVED_CASES_S,
        )
        cast(Engine, engine).renew()
        if isinstance(verdict, Reason):
            return verdict
        return Candidate(backend, engine, None, verdict)

    def _time(
        self, candidates: Sequence[Candidate], given: Tensors, copies: Copies
    ) -> list[Candidate | Reason]:
        """Time in interleaved rounds: each runs the original and every candidate that may still be fastest.

        Where one raises, time each on its own.
        """
        if not candidates:
            return []
        who = candidates[0].backend if len(candidates) == 1 else None
        strict = self._config.strict and who is not None
        measured = partial(self._measure, candidates, given, copies)
        found = attempt(Stage.SELECT, who, self.name, measured, strict, Code.ENGINE_RAISED)
        _restore(copies)
        if not isinstance(found, Reason):
            return [replace(one, timings=(t,)) for one, t in zip(candidates, found, strict=True)]
        if who is not None:
            return [found]
        return [result for one in candidates for result in self._time([one], given, copies)]

    def _measure(
        self, candidates: Sequence[Candidate], given: Tensors, copies: Copies
    ) -> list[Timing]:
        runs = [partial(self._run, one) for one in candidates]
        early_exit_s = EARLY_EXIT_S if len(runs) == 1 else COMPETE_S
        rounds, inputs = self._config.timing_repeats, [given] * (len(runs) + 1)
        restore = partial(_restore, copies) if copies else None
        return measure_all(
            runs, self._original, inputs, rounds, early_exit_s=early_exit_s, restore=restore
        )

    def _why_slower(self, one: Candidate) -> Reason | None:
        sentence = why_clearly_slower(one.timings)
        if sentence is None:
            return None
        return Reason(Stage.SELECT, Code.SLOWER, one.backend, self.name, sentence)

    def _out_of_time(self, backend: str, before: str) -> Reason:
        why = self._budget.why_ended(before)
        return Reason(Stage.SELECT, Code.TIME_BUDGET, backend, self.name, why)

    def _run(self, one: Candidate, *tensors: torch.Tensor) -> Tensors:
        engine: Any = one.engine
        if (watch := self._watches.get(one.backend)) is not None:
            watch.check()
        found: Tensors | None = engine.try_execute(list(tensors))
        return self._original(*tensors) if found is None else found


def _restore(copies: Copies) -> bool:
    """Give the copies the contents of the caller's tensors, which no trial writes to."""
    for copy, theirs in copies:
        copy.copy_(theirs)
    return bool(copies)


def _watches(cut: Cut, backends: Sequence[str]) -> dict[str, ConstantWatch]:
    """One watch for all backends whose engines do not notice writes to their constants themselves."""
    if not cut.live:
        return {}
    watch = ConstantWatch(cut.fallback.buffers())
    return {name: watch for name in backends if not registry.load(name).watches_constants}
