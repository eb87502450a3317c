# SPDX-License-Identifier: Apache-2.0
"""Engine plans: a partition of the graph with a choice of engine for each of its clusters.

    compositions = candidate_plans(partitions, decisions, backends, config)     # the most promising first

Each partition gives one plan of its clusters' winners, and one plan per backend alone.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from blade.config import Config
from blade.core.reason import Reason
from blade.fallback.cluster_module import cluster_module
from blade.report import Timing
from blade.selection.plan.built import ClusterCandidates, Partition
from blade.selection.plan.candidate import Candidate
from blade.selection.plan.select import Decision, fastest
from blade.selection.plan.size_dispatch import SizeDispatch
from blade.verification.reduced_precision import has_reduced_precision

WHOLE = "the whole module"
PRUNED_BEYOND = 1.5  # factor to the most promising plan's time beyond which a plan is not measured


@dataclass(frozen=True)
class ClusterChoice:
    """A cluster and its engine, by size if there is a ``table``; ``None`` is the original."""

    built: ClusterCandidates
    chosen: Candidate | None
    table: SizeDispatch | None = None

    @property
    def served(self) -> Candidate | SizeDispatch | None:
        return self.table or self.chosen

    def module(self) -> torch.jit.ScriptModule:
        assert self.built.extracted is not None
        if self.table is not None:
            return cluster_module(self.built.extracted, self.table.dispatch())
        assert self.chosen is not None and self.chosen.module is not None
        return self.chosen.module


@dataclass(frozen=True)
class EnginePlan:
    """A partition with a choice for each of its clusters."""

    name: str
    choices: tuple[ClusterChoice, ...]
    reasons: tuple[Reason, ...] = ()

    @property
    def engines(self) -> dict[str, str]:
        """Cluster -> backend, or several ("disc+onnxruntime"), for clusters with an engine."""
        return {c.built.name: c.served.backend for c in self.choices if c.served is not None}

    def gain_ms(self) -> float:
        """Sum over all samples of what the engines save, by their own timings, in ms."""
        return sum(t.original_ms - t.engine_ms for t in self._timings())

    def original_ms(self) -> float:
        """Sum over all samples of the original's time where engines serve, in ms."""
        return sum(t.original_ms for t in self._timings())

    def _timings(self) -> list[Timing]:
        return [t for c in self.choices if c.served is not None for t in c.served.timings]

    def without_engines(self) -> "EnginePlan":
        return EnginePlan(
            self.name, tuple(ClusterChoice(c.built, None) for c in self.choices), self.reasons
        )


def candidate_plans(
    partitions: Sequence[Partition],
    decisions: Mapping[str, Decision],
    backends: Sequence[str],
    config: Config,
) -> list[EnginePlan]:
    """Return distinct plans with at least one engine, ordered by what their clusters' timings promise.

    ``decisions`` are by cluster, ``backends`` in the order of the registry. If there is no plan with engines,
    the result is one without.
    """
    best = [
        EnginePlan(
            p.name, tuple(ClusterChoice(b, decisions[b.name].chosen) for b in p.built), p.reasons
        )
        for p in partitions
    ]
    by_size = [_with_size_dispatch(one, decisions) for one in best]
    alone = [
        max((_of_one_backend(p, decisions, name) for p in partitions), key=EnginePlan.gain_ms)
        for name in backends
    ]
    lossy = [name for name in backends if has_reduced_precision(name, config)]
    exact = [_without_lossy_engines(p, decisions, config) for p in partitions if lossy]
    different: dict[object, EnginePlan] = {}
    for one in (*best, *by_size, *alone):
        if one.engines:
            different.setdefault(frozenset(one.engines.items()), one)
    likeliest = _most_promising(different.values())
    known = [one.engines for one in likeliest]
    return [*likeliest, *(e for e in exact if e.engines and e.engines not in known)] or best[:1]


def _most_promising(compositions: Iterable[EnginePlan]) -> list[EnginePlan]:
    """The most promising plans first, without those beyond ``PRUNED_BEYOND`` by their clusters' timings.

    The original's total time is not known here; it is at least the largest time measured for any of its
    parts.
    """
    likeliest = sorted(compositions, key=lambda c: -c.gain_ms())
    whole = max((c.original_ms() for c in likeliest), default=0.0)
    return [
        c
        for c in likeliest
        if whole - c.gain_ms() <= PRUNED_BEYOND * (whole - likeliest[0].gain_ms())
    ]


def _of_one_backend(
    partition: Partition, decisions: Mapping[str, Decision], backend: str
) -> EnginePlan:
    def chosen(built: ClusterCandidates) -> Candidate | None:
        return fastest([c for c in decisions[built.name].winners if c.backend == backend])

    choices = tuple(ClusterChoice(b, chosen(b)) for b in partition.built)
    return EnginePlan(f"{backend} alone", choices, partition.reasons)


def _with_size_dispatch(one: EnginePlan, decisions: Mapping[str, Decision]) -> EnginePlan:
    choices = tuple(replace(c, table=decisions[c.built.name].table) for c in one.choices)
    return replace(one, name=f"{one.name}, by size", choices=choices)


def _without_lossy_engines(
    partition: Partition, decisions: Mapping[str, Decision], config: Config
) -> EnginePlan:
    """A plan without reduced-precision engines, for where these together lose more than each alone."""

    def chosen(built: ClusterCandidates) -> Candidate | None:
        winners = decisions[built.name].winners
        return fastest([c for c in winners if not has_reduced_precision(c.backend, config)])

    choices = tuple(ClusterChoice(b, chosen(b)) for b in partition.built)
    return EnginePlan(f"{partition.name}, exact", choices, partition.reasons)
