# SPDX-License-Identifier: Apache-2.0
"""Compositions: a way to cut the graph, and who serves each of its clusters.

    compositions = propose(partitions, decisions, backends, config)     # the likeliest first

Each partition's winners are one composition, and so are those of each backend alone.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from blade.config import Config
from blade.fallback.built import Built, Partition
from blade.fallback.candidate import Candidate
from blade.fallback.cluster_module import cluster_module
from blade.fallback.lossy import is_lossy
from blade.fallback.select import Decision, fastest
from blade.fallback.table import Table
from blade.reason import Reason
from blade.report import Timing

WHOLE = "the whole module"
FAR = 1.5  # times as long as the likeliest composition: not worth measuring


@dataclass(frozen=True)
class Choice:
    """A cluster and who serves it, by size if there is a ``table``; ``None`` is the original."""

    built: Built
    chosen: Candidate | None
    table: Table | None = None

    @property
    def served(self) -> Candidate | Table | None:
        return self.table or self.chosen

    def module(self) -> torch.jit.ScriptModule:
        assert self.built.extracted is not None
        if self.table is not None:
            return cluster_module(self.built.extracted, self.table.dispatch())
        assert self.chosen is not None and self.chosen.module is not None
        return self.chosen.module


@dataclass(frozen=True)
class Composition:
    """A partition with a choice for each of its clusters."""

    name: str
    choices: tuple[Choice, ...]
    reasons: tuple[Reason, ...] = ()

    @property
    def engines(self) -> dict[str, str]:
        """Cluster -> backend, or several ("disc+onnxruntime"), of those that have one."""
        return {c.built.name: c.served.backend for c in self.choices if c.served is not None}

    def gain_ms(self) -> float:
        """What its engines save by their own timings, over all samples."""
        return sum(t.original_ms - t.engine_ms for t in self._timings())

    def original_ms(self) -> float:
        """What the original takes where they serve."""
        return sum(t.original_ms for t in self._timings())

    def _timings(self) -> list[Timing]:
        return [t for c in self.choices if c.served is not None for t in c.served.timings]

    def without_engines(self) -> "Composition":
        return Composition(
            self.name, tuple(Choice(c.built, None) for c in self.choices), self.reasons
        )


def propose(
    partitions: Sequence[Partition],
    decisions: Mapping[str, Decision],
    backends: Sequence[str],
    config: Config,
) -> list[Composition]:
    """Different compositions with at least one engine, by what their clusters' timings promise.

    ``decisions`` are by cluster, ``backends`` in the order of the registry. The first of the result may
    be one without engines if there is no other.
    """
    best = [
        Composition(p.name, tuple(Choice(b, decisions[b.name].chosen) for b in p.built), p.reasons)
        for p in partitions
    ]
    by_size = [_with_tables(one, decisions) for one in best]
    alone = [
        max((_of_one_backend(p, decisions, name) for p in partitions), key=Composition.gain_ms)
        for name in backends
    ]
    lossy = [name for name in backends if is_lossy(name, config)]
    exact = [_exact(p, decisions, config) for p in partitions if lossy]
    different: dict[object, Composition] = {}
    for one in (*best, *by_size, *alone):
        if one.engines:
            different.setdefault(frozenset(one.engines.items()), one)
    likeliest = _promising(different.values())
    known = [one.engines for one in likeliest]
    return [*likeliest, *(e for e in exact if e.engines and e.engines not in known)] or best[:1]


def _promising(compositions: Iterable[Composition]) -> list[Composition]:
    """The likeliest first, without those that would take ``FAR`` times as long by their clusters' timings.

    How long the original takes is not known here; it is at least as long as what most of it took.
    """
    likeliest = sorted(compositions, key=lambda c: -c.gain_ms())
    whole = max((c.original_ms() for c in likeliest), default=0.0)
    return [c for c in likeliest if whole - c.gain_ms() <= FAR * (whole - likeliest[0].gain_ms())]


def _of_one_backend(
    partition: Partition, decisions: Mapping[str, Decision], backend: str
) -> Composition:
    def chosen(built: Built) -> Candidate | None:
        return fastest([c for c in decisions[built.name].winners if c.backend == backend])

    choices = tuple(Choice(b, chosen(b)) for b in partition.built)
    return Composition(f"{backend} alone", choices, partition.reasons)


def _with_tables(one: Composition, decisions: Mapping[str, Decision]) -> Composition:
    choices = tuple(replace(c, table=decisions[c.built.name].table) for c in one.choices)
    return replace(one, name=f"{one.name}, by size", choices=choices)


def _exact(partition: Partition, decisions: Mapping[str, Decision], config: Config) -> Composition:
    """Without lossy engines, for where these together lose more than each of them alone."""

    def chosen(built: Built) -> Candidate | None:
        winners = decisions[built.name].winners
        return fastest([c for c in winners if not is_lossy(c.backend, config)])

    choices = tuple(Choice(b, chosen(b)) for b in partition.built)
    return Composition(f"{partition.name}, exact", choices, partition.reasons)
