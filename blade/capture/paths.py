# SPDX-License-Identifier: Apache-2.0
"""The paths through a model's code that were traced, as one module.

    table = PathTable(first)
    table.add(second)                    # joins where the decisions of both part
    table.module("Model", ["x"])

A path is a trace with checks of its decisions. Checks of sizes are conditions on the sizes of the inputs and
stand at its beginning; checks of elements stand where the decision fell.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from blade.capture.decisions.recorder import Recorder, TracedDecision
from blade.capture.inputs import Sample
from blade.capture.messages import limit_in
from blade.core.captured import Path
from blade.graph.torchscript.check_arguments import check_arguments
from blade.graph.torchscript.check_forms import (
    CONTAINERS,
    FLOATS,
    IDENTITY,
    INTEGERS,
    RANK,
    STRUCTURE,
    check_forms,
)
from blade.graph.torchscript.decision_checks import (
    LIMITED,
    checks_of,
    describe_checks,
    drop_check,
)
from blade.graph.torchscript.hoist_size_checks import ASSUMED, HoistedChecks, hoist_size_checks
from blade.graph.torchscript.merge_paths import PathGraph, merged, same_computation
from blade.graph.torchscript.to_script_module import defaults_of
from blade.graph.torchscript.undo_writes import undo_writes

WHAT_TO_DO = (
    "Optimize with a sample that takes this path, too (Config.max_paths bounds their number), or call the original "
    "model here."
)


FORMS = (RANK, FLOATS, INTEGERS, IDENTITY)


@dataclass
class CapturedPath:
    """A traced path: its module, what was decided, and the conditions that its checks compare.

    ``conditions`` has, by decision, the relation between sizes that has to hold, or the source line of a
    decision on elements. ``others`` are the paths that begin at a check of this one.
    """

    module: torch.jit.ScriptModule
    recorder: Recorder
    sample: Sample
    structure: str | None = None  # of the output, if it was noted
    hoisted: HoistedChecks = field(default_factory=lambda: HoistedChecks((), ()))
    conditions: dict[int, str] = field(default_factory=dict)
    elements: frozenset[int] = frozenset()  # decisions on elements
    others: dict[int, CapturedPath] = field(default_factory=dict)

    @property
    def decisions(self) -> Sequence[TracedDecision]:
        return self.recorder.decisions

    def tree(self) -> PathGraph:
        return PathGraph(
            self.module.graph, {index: other.tree() for index, other in self.others.items()}
        )


def finish(
    module: torch.jit.ScriptModule,
    recorder: Recorder,
    sample: Sample,
    structure: str | None = None,
    known: HoistedChecks | None = None,
) -> CapturedPath:
    """Move the checks of sizes in ``module``, a frozen trace at ``sample``, and write all checks' messages.

    ``known``: where the checks of such a trace were moved before.
    """
    graph, decisions = module.graph, recorder.decisions
    given: Any = graph.inputs()
    conditions: dict[int, str] = {}
    hoisted = HoistedChecks((), ())
    if len(list(given)) == len(sample) + 1:
        if decisions:
            conditions, hoisted = hoist_size_checks(graph, sample, known)
        forms = {k: i for k, i in recorder.consulted.items() if k in FORMS}
        conditions = check_forms(graph, sample, forms) | conditions
        conditions = check_arguments(graph, sample, recorder.arguments) | conditions
    left = {check.index for check in checks_of(graph)}
    elements = frozenset(left - conditions.keys() - {LIMITED})

    def describe(index: int) -> str:
        if index in (STRUCTURE, CONTAINERS):
            return f"its containers have to hold the same: {conditions[index]}. {WHAT_TO_DO}"
        if index == ASSUMED:
            return f"its sizes have to fit together: {conditions[index]}. {WHAT_TO_DO}"
        one = decisions[index]
        if one.kind == "argument":
            was = f"its argument {one} was {one.outcome} when the model was captured"
            return f"{was}, and here {conditions[index]} has to hold. {WHAT_TO_DO}"
        if one.kind == "form":
            asked = f"{one} asks for the {one.outcome[1:-1]} of a tensor"
            return f"{asked}, and here {conditions[index]} has to hold. {WHAT_TO_DO}"
        of = f" (here, {conditions[index]} has to hold)" if index in conditions else ""
        return (
            f"{one} gave {one.outcome} when the model was captured and gives another value now{of}. "
            f"{WHAT_TO_DO}"
        )

    describe_checks(graph, describe)
    undo_writes(graph)
    texts = conditions | {
        index: f"{decisions[index]} gave {decisions[index].outcome}" for index in elements
    }
    limits = [check.text for check in checks_of(graph) if check.index == LIMITED]
    if limits:
        texts[LIMITED] = "; ".join(map(limit_in, limits))
    conditions = dict(sorted(texts.items()))
    return CapturedPath(module, recorder, sample, structure, hoisted, conditions, elements)


@dataclass(frozen=True)
class Widened:
    """What made ``PathTable`` wider without a path: these checks of this path were dropped."""

    path: int
    checks: tuple[int, ...]


class PathTable:
    """The paths of one model, the first of them that of its first sample.

    ``steps``: what became of the paths that were added, in order: a path, or checks that went.
    """

    def __init__(self, first: CapturedPath) -> None:
        self.paths = [first]
        self.steps: list[CapturedPath | Widened] = []

    def widened_by(self, path: CapturedPath) -> bool:
        """Drop the check at which ``path`` parts from a known path, if both compute the same behind it.

        A decision without consequences is none, nor are those that the same line of the model's code takes in
        other layers, if ``path`` takes all of them the other way.
        """
        known, index = self._parting(path)
        if index not in known.conditions or not _is_alike(known, path, index):
            return False
        decision = known.decisions[index]
        if decision.kind == "argument" and decision.outcome not in ("True", "False"):
            return False  # a third value may compute something else
        dropped = {index}
        if not any(_is_same_line(path.decisions, k, decision) for k in range(len(path.decisions))):
            dropped |= {k for k in known.conditions if _is_same_line(known.decisions, k, decision)}
        self.widen(Widened(self.paths.index(known), tuple(sorted(dropped))))
        return True

    def widen(self, step: Widened) -> None:
        """Drop the checks of ``step``."""
        known = self.paths[step.path]
        for index in step.checks:
            drop_check(known.module.graph, index)
            del known.conditions[index]
            known.elements -= {index}
        if set(known.conditions) == {ASSUMED}:  # nothing relies on it any more
            drop_check(known.module.graph, ASSUMED)
            known.conditions.clear()
        self.steps.append(step)

    def add(self, path: CapturedPath) -> bool:
        """Let ``path`` begin where its decisions part from those of a known path; ``False`` if they do not."""
        known, index = self._parting(path)
        if index in known.others or index not in known.conditions:
            return False
        known.others[index] = path
        self.paths.append(path)
        self.steps.append(path)
        return True

    def _parting(self, path: CapturedPath) -> tuple[CapturedPath, int]:
        """The known path that a call along ``path`` is on when no check leads it further, and where they part."""
        known = self.paths[0]
        index = _common(known.decisions, path.decisions)
        while index in known.others:
            known = known.others[index]
            index = _common(known.decisions, path.decisions)
        return known, index

    def remove_last(self) -> None:
        """Take back the last addition."""
        last = self.paths.pop()
        self.steps.remove(last)
        for known in self.paths:
            known.others = {k: one for k, one in known.others.items() if one is not last}

    def is_of_a_count(self, why: str) -> bool:
        """Whether a count or another number, not a yes or no, made a call fail with the message ``why``."""
        index = int(why.partition("[")[2].partition("]")[0])
        found = [
            known.decisions[index].kind
            for known in self.paths
            if index < len(known.decisions) and str(known.decisions[index]) in why
        ]
        return bool(found) and found[0] not in ("bool", "comparison")

    def finish_again(self, module: torch.jit.ScriptModule) -> None:
        """``finish`` for another copy of the only path's module."""
        [only] = self.paths
        finish(module, only.recorder, only.sample)

    def ends(self) -> tuple[int, ...]:
        """The indices of the paths in the order in which the merged graph has their ends."""

        def below(path: CapturedPath) -> Iterator[CapturedPath]:
            for check in checks_of(path.module.graph):
                if check.index in path.others:
                    yield from below(path.others[check.index])
            yield path

        indices = {id(path): k for k, path in enumerate(self.paths)}
        return tuple(indices[id(path)] for path in below(self.paths[0]))

    def described(self) -> tuple[Path, ...]:
        """The paths as the report shows them."""
        return tuple(Path(tuple(one.conditions.values())) for one in self.paths)

    def module(self, name: str, inputs: Sequence[str]) -> torch.jit.ScriptModule:
        """One module of all paths; raises ``CannotMerge``."""
        if len(self.paths) == 1:
            return self.paths[0].module
        defaults = defaults_of(self.paths[0].module)
        return merged(self.paths[0].tree(), name, inputs, defaults)


def _is_same_line(
    decisions: Sequence[TracedDecision], index: int, decision: TracedDecision
) -> bool:
    """Whether decision ``index`` is ``decision``, or was taken alike by the same line of code."""
    if index >= len(decisions):
        return False  # of no decision: what the others rely on
    one = decisions[index]
    return (one.where, one.line, one.kind, one.outcome) == (
        decision.where,
        decision.line,
        decision.kind,
        decision.outcome,
    )


def _common(first: Sequence[TracedDecision], second: Sequence[TracedDecision]) -> int:
    """How many decisions both take alike before the one that falls out differently."""
    for index, (a, b) in enumerate(zip(first, second)):
        if (a.where, a.kind, a.outcome) != (b.where, b.kind, b.outcome):
            return index
    return min(len(first), len(second))


def _is_alike(known: CapturedPath, path: CapturedPath, index: int) -> bool:
    """Whether both compute the same, but for the check of decision ``index`` at which they part."""
    if known.others:
        return False
    needed = {text for k, text in path.conditions.items() if k != index}
    kept = {text for k, text in known.conditions.items() if k != index}
    return needed <= kept and same_computation(known.module.graph, path.module.graph)
