# SPDX-License-Identifier: Apache-2.0
"""The competition of a cluster's engines at the inputs of its first call.

Each is verified: its answers are compared with the original's on the inputs of that call and, for up to a second,
on inputs derived from them. Engines that pass are timed in turns with the original and each other. The trials
write to copies of the inputs, which have the caller's contents before each call.

In training no inputs are derived: activations that a forward graph saved are consistent only as they are.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch.fx import GraphModule

from blade.backends import registry
from blade.config import Config
from blade.core.attempt import attempt
from blade.core.cluster import Cluster
from blade.core.reason import Code, Reason, Stage
from blade.dynamo.cluster_module import FirstCall
from blade.dynamo.constant_watch import ConstantWatch
from blade.dynamo.engine_cache import keep_engine
from blade.process.memory import free_unused
from blade.report import Timing
from blade.runtime.engine import Engine
from blade.selection.plan.candidate import Candidate
from blade.selection.plan.select import against, fastest, lost
from blade.timing.decision import Outcome, decide_plan
from blade.timing.interleaved import EARLY_EXIT_S, measure_all
from blade.verification.derived_inputs import crashes, end
from blade.verification.original import InTurn
from blade.verification.reduced_precision import budget_of
from blade.verification.rng_replay import RngReplay
from blade.verification.verify import verify

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


def compete(trial: "EngineTrial", theirs: Tensors, original: GraphModule) -> Competition:
    """Let engines compete at the inputs ``theirs`` of the waiting call. If that raises, the original serves.

    Those that passed are kept in the engine cache; ``original`` has the constants by name.
    """
    name, strict = trial.cluster.name, trial.config.strict
    run = partial(trial.run, theirs)
    found = attempt(Stage.SELECT, None, name, run, strict, Code.ENGINE_RAISED)
    if isinstance(found, Reason):
        return Competition(None, (), (found,))
    if (stored := trial.how.stored) is not None:
        for one in found.tried:
            if one.timings or not trial.config.timing:
                keep_engine(trial.config, stored.keys.get(one.backend), original, one)
    return found


@dataclass(frozen=True)
class EngineTrial:
    """``rivals``: by backend, in order of preference. ``original`` takes the inputs that the engines take. ``each`` and
    ``alone`` are the same function: one gives the outputs by number as they are computed, one gives none.

    ``saved``: outputs for backward. ``watches``: of the constants of engines that do not notice writes themselves.
    """

    cluster: Cluster
    rivals: Mapping[str, torch.ScriptObject]
    watches: Mapping[str, ConstantWatch]
    original: Callable[..., Tensors]
    each: InTurn
    alone: Callable[..., object]
    how: FirstCall
    saved: tuple[int, ...] = ()

    @property
    def config(self) -> Config:
        return self.how.config

    def run(self, theirs: Tensors) -> Competition:
        """The trial at copies of those inputs ``theirs`` that are written."""
        cluster = self.cluster
        given = tuple(t.clone() if i in cluster.updates else t for i, t in enumerate(theirs))
        copies = [(given[i], theirs[i]) for i in cluster.updates]
        try:
            with RngReplay(cluster.gm):
                return self._compete(replace(cluster, samples=(given,)), given, copies)
        finally:
            end(cluster.gm)

    def _compete(self, cluster: Cluster, given: Tensors, copies: Copies) -> Competition:
        """``given`` is the sample of ``cluster``; ``copies`` are those of its inputs that are written."""
        verified: list[Candidate] = []
        reasons: list[Reason] = []
        for backend, engine in self.rivals.items():
            if verified and not self.how.budget.left():
                reasons.append(self._out_of_time(backend, "it was verified"))
            elif isinstance(found := self._verify(cluster, backend, engine), Reason):
                reasons.append(found)
            else:
                verified.append(found)
        found_crashes = crashes(cluster.gm)
        end(cluster.gm)  # a process that tries the original takes CPUs from what is timed
        if not self.config.timing:
            return Competition(
                next(iter(verified), None), tuple(verified), tuple(reasons), found_crashes
            )
        late = [] if self.how.budget.left() else verified[1:]
        reasons += [self._out_of_time(one.backend, "it was measured") for one in late]
        measured = self._time([one for one in verified if one not in late], given, copies)
        reasons += [one for one in measured if isinstance(one, Reason)]
        timed = [one for one in measured if isinstance(one, Candidate)]
        right = []
        for one in timed:
            if (decision := decide_plan(one.timings)).serves:
                right.append(one)
            else:
                reasons.append(against(one, self.cluster.name, decision))
        best = fastest(right)
        reasons += [lost(one, best, self.cluster.name) for one in right if best and one is not best]
        return Competition(best, (*timed, *late), tuple(reasons), found_crashes)

    def _verify(
        self, cluster: Cluster, backend: str, engine: torch.ScriptObject
    ) -> Candidate | Reason:
        known = None if self.how.stored is None else self.how.stored.engines.get(backend)
        verdict = verify(
            cluster,
            engine,
            self.original,
            backend,
            self.config.strict,
            budget_of(registry.load(backend), self.config),
            derived=self.how.derived and known is None,
            seconds=DERIVED_CASES_S,
            own_error=None if known is None else known.verdict.original_error_fp64,
            saved=self.saved,
            each=None if self.how.derived else self.each,
        )
        cast(Engine, engine).renew()
        free_unused(cluster.samples[0])
        if isinstance(verdict, Reason):
            return verdict
        if known is None:
            return Candidate(backend, engine, None, verdict)
        # a losing or unclear time may stem from a busy machine: measure again
        sure = (Outcome.FASTER, Outcome.EQUAL)
        is_sure = known.timings and decide_plan(known.timings).outcome in sure
        timings = known.timings if is_sure else ()
        return Candidate(backend, engine, None, known.verdict, timings, stored=True)

    def _time(
        self, candidates: Sequence[Candidate], given: Tensors, copies: Copies
    ) -> list[Candidate | Reason]:
        """Time in interleaved rounds: each runs the original and every candidate that may still be fastest.

        Where one raises, time each on its own.
        """
        if not candidates:
            return []
        shapes = tuple(tuple(t.shape) for t in given)
        if all(one.timings and one.timings[0].shapes == shapes for one in candidates):
            return list(candidates)  # from the cache
        who = candidates[0].backend if len(candidates) == 1 else None
        strict = self.config.strict and who is not None
        measured = partial(self._measure, candidates, given, copies)
        found = attempt(Stage.SELECT, who, self.cluster.name, measured, strict, Code.ENGINE_RAISED)
        _restore(copies)
        if not isinstance(found, Reason):
            return [
                replace(one, timings=(t,), stored=False)
                for one, t in zip(candidates, found, strict=True)
            ]
        if who is not None:
            return [found]
        return [result for one in candidates for result in self._time([one], given, copies)]

    def _measure(
        self, candidates: Sequence[Candidate], given: Tensors, copies: Copies
    ) -> list[Timing]:
        runs = [partial(self._run, one) for one in candidates]
        early_exit_s = EARLY_EXIT_S if len(runs) == 1 else COMPETE_S
        rounds, inputs = self.config.timing_repeats, [given] * (len(runs) + 1)
        restore = partial(_restore, copies) if copies else None
        return measure_all(
            runs, self.alone, inputs, rounds, early_exit_s=early_exit_s, restore=restore
        )

    def _out_of_time(self, backend: str, before: str) -> Reason:
        why = self.how.budget.why_ended(before)
        return Reason(Stage.SELECT, Code.TIME_BUDGET, backend, self.cluster.name, why)

    def _run(self, one: Candidate, *tensors: torch.Tensor) -> Tensors:
        engine: Any = one.engine
        if (watch := self.watches.get(one.backend)) is not None:
            watch.check()
        found: Tensors | None = engine.try_execute(list(tensors))
        return self.original(*tensors) if found is None else found


def _restore(copies: Copies) -> bool:
    """Give the copies the contents of the caller's tensors, which no trial writes to."""
    for copy, theirs in copies:
        copy.copy_(theirs)
    return bool(copies)
