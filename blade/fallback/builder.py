# SPDX-License-Identifier: Apache-2.0
"""Groups of ops with verified engines; whatever was built of a group is kept, and never built twice.

builder = Builder(captured, graph_view, backends, config, budget, samples)
built = builder.build([Attempt(group, takers=("disc", "openvino"), reasons=())])     # by nodes
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from blade.backends.base import Backend
from blade.capture.captured import Captured
from blade.clustering.problem import Group
from blade.config import Config
from blade.fallback.attempt import attempt
from blade.fallback.built import Built
from blade.fallback.candidate import Candidate
from blade.fallback.candidates import Wanted, build
from blade.fallback.stored import Contents, keep_refusal, look_up
from blade.fallback.time_budget import UNLIMITED, TimeBudget
from blade.graph.boundary import find_boundary
from blade.graph.extract import Extracted, outline
from blade.graph.samples import Samples
from blade.graph.view import GraphView
from blade.reason import Reason, Stage

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Attempt:
    """A group, who of its label (all that take it) is to try it, and why the others do not."""

    group: Group
    takers: frozenset[str]
    reasons: tuple[Reason, ...] = ()


@dataclass(frozen=True)
class Part:
    """Nodes to build with these backends; the conversion by the one called ``first`` is no question of time."""

    name: str
    nodes: Sequence[int]
    backends: Sequence[Backend]
    first: str
    extracted: Extracted | None = None  # if that was done


@dataclass(frozen=True)
class Known:
    """Of one group: whom it was tried with, and what came of that."""

    name: str
    extracted: Extracted | None
    found: dict[str, Candidate | Reason]  # by backend
    asked: frozenset[str]


@dataclass(frozen=True)
class Builder:
    """What conversions need, and what is known so far."""

    captured: Captured
    view: GraphView
    backends: Sequence[Backend]
    config: Config
    samples: Samples
    budget: TimeBudget = UNLIMITED
    contents: Contents = field(default_factory=Contents)
    _known: dict[tuple[int, ...], Known] = field(default_factory=dict)

    def build(self, attempts: Iterable[Attempt]) -> dict[tuple[int, ...], Built]:
        """By nodes."""
        wanted = list(attempts)
        for one in wanted:
            untried = Known(f"cluster_{len(self._known)}", None, {}, frozenset())
            self._known.setdefault(one.group.nodes, untried)
        fresh = [(one, left) for one in wanted if (left := self._untried(one))]
        # One run for all of them; a part of a group, when bisecting, needs no other inputs than the whole.
        self.samples.record(find_boundary(self.view, one.group.nodes) for one, _ in fresh)
        parts = [
            Part(before.name, one.group.nodes, left, self._first(one), before.extracted)
            for one, left in fresh
            for before in [self._known[one.group.nodes]]
        ]
        for (one, _), now in zip(fresh, self.build_parts(parts), strict=True):
            before = self._known[one.group.nodes]
            self._known[one.group.nodes] = replace(
                now, found=before.found | now.found, asked=before.asked | now.asked
            )
            _log(self._built(one))
        return {one.group.nodes: self._built(one) for one in wanted}

    def build_parts(self, parts: Sequence[Part]) -> list[Known]:
        """Without a look at what is known, and nothing is kept."""
        prepared = [
            attempt(Stage.CONVERT, None, p.name, partial(self._prepare, p), self.config.strict)
            for p in parts
        ]
        wanted = [one for one in prepared if isinstance(one, Wanted)]
        results = iter(build(wanted, self.config, self.budget))
        made = []
        for part, one in zip(parts, prepared, strict=True):
            found: dict[str, Candidate | Reason] = {}
            extracted = None
            if isinstance(one, Reason):
                found |= {b.name: replace(one, backend=b.name) for b in part.backends}
            else:
                candidates, reasons = next(results)
                for reason in reasons:
                    keep_refusal(self.config, one.stored.keys.get(str(reason.backend)), reason)
                found |= {c.backend: c for c in candidates}
                found |= {str(r.backend): r for r in reasons}
                extracted = one.extracted
            asked = frozenset(b.name.lower() for b in part.backends)
            made.append(Known(part.name, extracted, found, asked))
        return made

    def learn(self, nodes: tuple[int, ...], candidates: Iterable[Candidate]) -> None:
        """In place of what is known of them: they were measured."""
        self._known[nodes].found.update({one.backend: one for one in candidates})

    def _untried(self, one: Attempt) -> list[Backend]:
        """Unmeasured, the first that serves is enough, and those after it are never asked."""
        asked = self._known[one.group.nodes].asked
        if asked and not self.config.timing:
            return []
        return [b for b in self.backends if b.name.lower() in one.takers - asked]

    def _first(self, one: Attempt) -> str:
        """The first of all that take the group: its conversion is no question of time."""
        return next(b.name for b in self.backends if b.name.lower() in one.group.label)

    def _built(self, one: Attempt) -> Built:
        known = self._known[one.group.nodes]
        found = [known.found[b.name] for b in self.backends if b.name in known.found]
        mine, everyone = one.takers, one.group.label | known.asked
        return Built(
            name=known.name,
            group=Group(one.group.nodes, mine),
            extracted=known.extracted,
            candidates=tuple(
                c for c in found if isinstance(c, Candidate) and c.backend.lower() in mine
            ),
            reasons=(*(r for r in found if isinstance(r, Reason)), *one.reasons),
            takers=tuple(b.name for b in self.backends if b.name.lower() in everyone),
        )

    def _prepare(self, part: Part) -> Wanted:
        extracted = part.extracted
        if extracted is None:
            [outlined] = outline(
                self.captured, self.view, [part.nodes], fixed=self._is_fixed, samples=self.samples
            )
            extracted = replace(outlined, name=part.name)
        stored = look_up(extracted, part.backends, self.config, self.contents)
        if any(stored.found(b.name) is None for b in part.backends):
            _ = extracted.cluster  # what has no form in FX raises here
        return Wanted(extracted, part.backends, stored, part.first)

    def _is_fixed(self, name: str, axis: int) -> bool:
        """Whether the user declared one size for this axis of the graph's input ``name``."""
        _, *inputs = (v.debugName() for v in self.captured.module.graph.inputs())
        return name in inputs and (inputs.index(name), axis) in self.captured.fixed


def _log(built: Built) -> None:
    ops, serves = len(built.group.nodes), ", ".join(c.backend for c in built.candidates)
    log.info("%s: %d ops, verified engines: %s", built.name, ops, serves or "none")
    for reason in built.reasons:
        log.info("%s: not %s: %s", built.name, reason.backend, reason.detail)
