# SPDX-License-Identifier: Apache-2.0
"""The decision cache around the stages: a known module is not searched again.

task = recalled(prepare, config)       # prepare captures; task.decided is the cached decision
decided = cached(search)(task)         # searches only if there is none
"""

from collections.abc import Callable
from dataclasses import replace

from blade.capture.candidate import KnownTraces
from blade.config import Config
from blade.selection.cache.decisions import (
    SelectionResult,
    TraceRecords,
    cached_decision,
    decision_key,
    put_decision,
)
from blade.selection.cache.section import DECISIONS, TRACES
from blade.selection.task import Search, Task

WAIT_S = 600.0  # s; for another process that has all the time it wants
Prepare = Callable[[KnownTraces | None], Task]


def recalled(prepare: Prepare, config: Config) -> Task:
    """Return the task that ``prepare`` makes, with the cached decision.

    A trace in the cache is not compared with the model, because the optimized module will be. If the cache
    turns out to have no decision, ``prepare`` runs again and compares. With reduced precision the trace is
    always compared: a result verified only to a budget says too little about it.
    """
    known = None if config.reduces_precision or not TRACES.is_on(config) else TraceRecords(config)
    task = with_decision(prepare(known))
    if task.decided is None and not task.captured.is_compared:
        task = with_decision(prepare(None))
    return task


def cached(search: Search) -> Search:
    """Skip ``search`` if the task brings a decision; otherwise store its result under the task's key.

    A process that would search for the same waits until another one has, for at most ``Config.time_budget``.
    """

    def find(task: Task) -> SelectionResult:
        if task.decided is not None:
            return task.decided
        wait_s = WAIT_S if task.config.time_budget is None else task.config.time_budget
        with DECISIONS.locked(task.config, task.key, wait_s) as waited:
            if waited and (decided := _decision(task)) is not None:
                return decided
            decided = search(task)
            put_decision(task.key, decided, task.captured, task.config)
            return decided

    return find


def with_decision(task: Task) -> Task:
    """Return ``task`` with the key of its decision, and with the decision if the cache has one."""
    with task.clock.stage("convert"):
        key = decision_key(task.captured, task.graph, task.backends, task.config, task.contents)
        task = replace(task, key=key)
        return replace(task, decided=_decision(task))


def _decision(task: Task) -> SelectionResult | None:
    """What is stored under the task's key."""
    return cached_decision(task.key, task.captured, task.graph, task.config)
