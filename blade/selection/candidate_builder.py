# SPDX-License-Identifier: Apache-2.0
"""Build groups of ops into verified engines; each group is built once per backend, and the results are kept.

builder = CandidateBuilder(captured, graph_view, backends, config, samples)
built = builder.build([GroupAssignment(group, eligible=frozenset({"disc", "openvino"}))])     # by nodes
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from blade.clustering.problem import Group
from blade.config import Config
from blade.core.attempt import attempt
from blade.core.backend import Backend
from blade.core.captured import Captured
from blade.core.reason import Reason, Stage
from blade.graph.torchscript.boundary import find_boundary
from blade.graph.torchscript.boundary_samples import BoundarySamples
from blade.graph.torchscript.extract import Extracted, outline
from blade.graph.torchscript.view import GraphView
from blade.partition.assignment import GroupAssignment
from blade.selection.build_candidates import BuildRequest, build_candidates
from blade.selection.cache.engines import look_up_engines, put_refusal
from blade.selection.cache.fingerprint import WeightDigests
from blade.selection.plan.built import ClusterCandidates
from blade.selection.plan.candidate import Candidate
from blade.timing.time_budget import UNLIMITED, TimeBudget
from blade.verification.derived_inputs import crashes

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SubCluster:
    """Nodes to build with these backends; the backend called ``first`` is its first."""

    name: str
    nodes: Sequence[int]
    backends: Sequence[Backend]
    first: str
    extracted: Extracted | None = None  # if it exists already


@dataclass(frozen=True)
class BuildHistory:
    """Results of one group, by backend, and the backends it was tried with."""

    name: str
    extracted: Extracted | None
    found: dict[str, Candidate | Reason]  # by backend
    asked: frozenset[str]


@dataclass(frozen=True)
class CandidateBuilder:
    """Inputs of conversions, and the results so far."""

    captured: Captured
    view: GraphView
    backends: Sequence[Backend]
    config: Config
    samples: BoundarySamples
    budget: TimeBudget = UNLIMITED
    contents: WeightDigests = field(default_factory=WeightDigests)
    _known: dict[tuple[int, ...], BuildHistory] = field(default_factory=dict)

    def build(
        self, attempts: Iterable[GroupAssignment]
    ) -> dict[tuple[int, ...], ClusterCandidates]:
        """Return the candidates of each group, by nodes."""
        wanted = list(attempts)
        for one in wanted:
            untried = BuildHistory(f"cluster_{len(self._known)}", None, {}, frozenset())
            self._known.setdefault(one.group.nodes, untried)
        fresh = [(one, left) for one in wanted if (left := self._untried(one))]
        # One run records the inputs of all groups; a part of a group, when bisecting, needs no others.
        self.samples.record(find_boundary(self.view, one.group.nodes) for one, _ in fresh)
        parts = [
            SubCluster(before.name, one.group.nodes, left, self._first(one), before.extracted)
            for one, left in fresh
            for before in [self._known[one.group.nodes]]
        ]
        made = self.build_parts(parts, not any(one.found for one in self._known.values()))
        for (one, _), now in zip(fresh, made, strict=True):
            before = self._known[one.group.nodes]
            self._known[one.group.nodes] = replace(
                now, found=before.found | now.found, asked=before.asked | now.asked
            )
            _log(self._built(one))
        return {one.group.nodes: self._built(one) for one in wanted}

    def build_parts(
        self, parts: Sequence[SubCluster], one_at_least: bool = True
    ) -> list[BuildHistory]:
        """Build parts without reading or storing known results. ``one_at_least`` as in ``build_candidates``."""
        prepared = [
            attempt(Stage.CONVERT, None, p.name, partial(self.prepare, p), self.config.strict)
            for p in parts
        ]
        wanted = [one for one in prepared if isinstance(one, BuildRequest)]
        results = iter(build_candidates(wanted, self.config, self.budget, one_at_least))
        made = []
        for part, one in zip(parts, prepared, strict=True):
            found: dict[str, Candidate | Reason] = {}
            extracted = None
            if isinstance(one, Reason):
                found |= {b.name: replace(one, backend=b.name) for b in part.backends}
            else:
                candidates, reasons = next(results)
                for reason in reasons:
                    put_refusal(self.config, one.stored.keys.get(str(reason.backend)), reason)
                found |= {c.backend: c for c in candidates}
                found |= {str(r.backend): r for r in reasons}
                extracted = one.extracted
            asked = frozenset(b.name.lower() for b in part.backends)
            made.append(BuildHistory(part.name, extracted, found, asked))
        return made

    def learn(self, nodes: tuple[int, ...], candidates: Iterable[Candidate]) -> None:
        """Replace the known results of these nodes by measured candidates."""
        self._known[nodes].found.update({one.backend: one for one in candidates})

    def extracted(self, nodes: Sequence[int]) -> Extracted | None:
        """Return the extracted group of these nodes, if it was built and can be expressed for a backend."""
        return self._known[tuple(nodes)].extracted

    def prepare(self, part: SubCluster) -> BuildRequest:
        """Cut ``part`` out of the graph, and look up its stored results."""
        extracted = part.extracted
        if extracted is None:
            fixed, samples = self.captured.is_fixed, self.samples
            [outlined] = outline(
                self.captured, self.view, [part.nodes], fixed=fixed, samples=samples
            )
            extracted = replace(outlined, name=part.name)
        stored = look_up_engines(extracted, part.backends, self.config, self.contents)
        return BuildRequest(extracted, part.backends, stored, part.first)

    def _untried(self, one: GroupAssignment) -> list[Backend]:
        """Return the backends to try; without timing, none after the first success."""
        asked = self._known[one.group.nodes].asked
        if asked and not self.config.timing:
            return []
        return [b for b in self.backends if b.name.lower() in one.eligible - asked]

    def _first(self, one: GroupAssignment) -> str:
        """Return the first backend that takes the group."""
        return next(b.name for b in self.backends if b.name.lower() in one.group.label)

    def _built(self, one: GroupAssignment) -> ClusterCandidates:
        known = self._known[one.group.nodes]
        found = [known.found[b.name] for b in self.backends if b.name in known.found]
        mine, everyone = one.eligible, one.group.label | known.asked
        return ClusterCandidates(
            name=known.name,
            group=Group(one.group.nodes, mine),
            extracted=known.extracted,
            candidates=tuple(
                c for c in found if isinstance(c, Candidate) and c.backend.lower() in mine
            ),
            reasons=(
                *(r for r in found if isinstance(r, Reason)),
                *one.reasons,
                *_crashes(known.extracted),
            ),
            eligible=tuple(b.name for b in self.backends if b.name.lower() in everyone),
        )


def _crashes(extracted: Extracted | None) -> tuple[Reason, ...]:
    """Crashes of the original at derived inputs; empty for a cluster that could not be extracted."""
    if extracted is None or not extracted.has_cluster:
        return ()
    return crashes(extracted.cluster.gm)


def _log(built: ClusterCandidates) -> None:
    ops, serves = len(built.group.nodes), ", ".join(c.backend for c in built.candidates)
    log.info("%s: %d ops, verified engines: %s", built.name, ops, serves or "none")
    for reason in built.reasons:
        log.info("%s: not %s: %s", built.name, reason.backend, reason.detail)
