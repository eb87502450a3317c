# SPDX-License-Identifier: Apache-2.0
"""Where a forecast was wrong: the search begins again with the backends that it left out.

task, decided = search_as_wide_as_needed(task, cached(search))
"""

from dataclasses import replace

from blade.core.reason import Code
from blade.partition.support import support
from blade.selection.cache.decisions import SelectionResult
from blade.selection.cached import with_decision
from blade.selection.task import Search, Task

SERVED = 0.8  # share of the nodes that some backend takes, which engines must serve


def search_as_wide_as_needed(task: Task, search: Search) -> tuple[Task, SelectionResult]:
    """Search; if the predicted winners do not serve, do it again with every backend. Return the last task, too."""
    decided = search(task)
    if task.left_out and falls_short(task, decided):
        task = widened(task)
        decided = search(task)
    return task, decided


def falls_short(task: Task, decided: SelectionResult) -> bool:
    """Whether engines serve few of the nodes that a backend takes: they failed, or they were no faster."""
    taken = sum(map(bool, task.plan.labels))
    choices = decided.confirmed.composition.choices
    served = sum(len(one.built.group.nodes) for one in choices if one.served is not None)
    return served < SERVED * taken


def widened(task: Task) -> Task:
    """Return ``task`` with every usable backend, and without the reasons for leaving some out."""
    every = (*task.backends, *task.left_out)
    names = {one.name for one in task.left_out}
    graph, config = task.graph, task.config
    with task.clock.stage("support"):
        plan = support(graph.nodes, graph.excluded, every, config, graph.loops)
    before = {*task.plan.reasons}
    kept = tuple(
        r
        for r in task.reasons
        if r not in before and not (r.code is Code.NOT_TRIED and r.backend in names)
    )
    wide = replace(
        task, backends=every, plan=plan, reasons=(*kept, *plan.reasons), left_out=(), decided=None
    )
    return with_decision(wide)
