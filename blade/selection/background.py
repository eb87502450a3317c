# SPDX-License-Identifier: Apache-2.0
"""Optimize in the background: return a module that serves at once, and add its engines when they are ready.

    module = in_background(search, task)    # the original, in clusters with engines to come
    wait(module, timeout=60)                # True: nothing more will change

A thread runs ``search``, then puts each engine in its place.

The clusters are those of the joint partition and do not change: another partition, or several engines in a
cluster, would be another module. The thread leaves torch's global random generators alone; models that
draw from them are optimized in the foreground. Calls of the module while engines are timed disturb the
measurement, as any load does.
"""

import atexit
import threading
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import cast
from weakref import WeakKeyDictionary

import torch

from blade.capture.equivalence import find_differences
from blade.core.attempt import attempt
from blade.core.reason import Code, Reason, Stage
from blade.errors import BackendError, BladeError, ConfigError, InputError
from blade.fallback.cluster_module import cluster_module
from blade.fallback.isolated_convert import end_conversions
from blade.graph.torchscript.boundary import find_boundary
from blade.graph.torchscript.boundary_samples import BoundarySamples
from blade.graph.torchscript.extract import outline_bare
from blade.graph.torchscript.group import cluster_blocks
from blade.graph.torchscript.splice import splice
from blade.process.memory import give_memory_back
from blade.process.torch_state import generators_left_alone
from blade.report import drop_in_state
from blade.runtime.engine import Engine, make_pending
from blade.selection.cache.decisions import SelectionResult
from blade.selection.learn_paths import wait_for_paths
from blade.selection.plan.assemble import ValidatedPlan
from blade.selection.plan.compositions import WHOLE, EnginePlan
from blade.selection.plan.labels import add_labels
from blade.selection.reporting import wrap, wrap_again, wrap_early
from blade.selection.task import Search, Task

EXIT_S = 60.0  # s; a compilation that runs when the interpreter exits takes seconds at most
Waiting = dict[str, Engine]

_FOREGROUND = Reason(
    Stage.SELECT,
    Code.RANDOM,
    None,
    WHOLE,
    "Config.background=True has no effect on a model that draws from torch's random generators.",
)


@dataclass(eq=False)
class _BackgroundSearch:
    """One search and its result."""

    task: Task
    search: Search
    done: threading.Event = field(default_factory=threading.Event)
    error: BladeError | None = None
    thread: threading.Thread | None = None


def in_background(search: Search, task: Task) -> torch.jit.ScriptModule:
    """Return the original in clusters at once; engines and the final report follow when ``search`` is done.

    Searches in the foreground if the decision is known, or the model draws random numbers.
    """
    if task.decided is not None:
        return wrap(task, search(task))
    if task.draws:
        task = replace(task, reasons=(*task.reasons, _FOREGROUND))
        return wrap(task, search(task))
    module, waiting, task = _begin(task)
    wrap_early(task, _original(module))
    background = _BackgroundSearch(task, search)
    background.thread = threading.Thread(
        target=_run, args=(background, module, waiting), name="blade-optimize", daemon=True
    )
    with _lock:
        _searches[module] = background
        _running.add(background)
    background.thread.start()
    return module


def wait(optimized: torch.nn.Module, timeout: float | None = None) -> bool:
    """Wait at most ``timeout`` seconds for what runs in the background; return whether ``optimized`` has changed
    for the last time, but for paths that further calls show to be missing (``Config.background_paths``).

    Returns ``True`` at once for a module that nothing runs for in this process. With ``Config(strict=True)``
    raises ``BackendError`` if the search failed. What ``blade.accelerate`` returned may change again: with the
    first calls of another kind.
    """
    if (drop_in := drop_in_state(optimized)) is not None:
        return bool(drop_in.wait(timeout))
    with _lock:
        background = _searches.get(optimized)
    end = None if timeout is None else monotonic() + timeout
    if background is not None:
        if not background.done.wait(timeout):
            return False
        if background.error is not None and background.task.config.strict:
            raise background.error
    return wait_for_paths(optimized, None if end is None else max(0.0, end - monotonic()))


def _begin(task: Task) -> tuple[torch.jit.ScriptModule, Waiting, Task]:
    """Return the module with pending engines, these engines by cluster, and the task to search.

    The task has no key: its result is not the best for the module as a whole, so it is not stored.

    Raises ``BackendError`` if even this module does not answer as the user's does.
    """
    captured, view = task.captured, task.graph
    clustering = cluster_blocks(view, task.plan.labels, min_size=task.config.min_cluster_size)
    # record the clusters' inputs now: the run starts from a seed of its own
    samples = BoundarySamples(captured, view)
    samples.record(find_boundary(view, one.nodes) for one in clustering.groups)
    waiting: Waiting = {}
    placed = []
    for i, one in enumerate(clustering.groups):
        extracted = outline_bare(view, f"cluster_{i}", one.nodes)
        if extracted.outputs:
            engine = make_pending(extracted.name)
            if task.config.recheck:  # ask; the later engine decides which calls are due
                cast(Engine, engine).set_limit("recheck_every", 1)
            waiting[extracted.name] = cast(Engine, engine)
            placed.append((extracted, cluster_module(extracted, engine)))
    module = splice(captured, placed)
    add_labels(module, captured)
    references, original = captured.references, captured.original
    for reference, why in find_differences(module, references, original=original):
        raise BackendError(f"in clusters, at {reference.what} the module differs: {why}")
    for pending in waiting.values():
        pending.renew()
    return module, waiting, replace(task, fixed=True, samples=samples, key=None)


def _original(module: torch.jit.ScriptModule, *reasons: Reason) -> SelectionResult:
    """The result without engines, interim or for these reasons."""
    return SelectionResult(ValidatedPlan(module, EnginePlan(WHOLE, ())), (), reasons)


def _run(background: _BackgroundSearch, module: torch.jit.ScriptModule, waiting: Waiting) -> None:
    try:
        with torch.inference_mode(False), torch.no_grad(), generators_left_alone():
            found = _find(background)
            if isinstance(found, SelectionResult):
                _install_engines(found, waiting)
            decided = _original(module, found) if isinstance(found, Reason) else found
            wrap_again(module, background.task, decided)
    finally:
        for engine in waiting.values():
            if engine.backend() == "pending":
                engine.set_enabled(False)  # no engine will come
        with _lock:
            _running.discard(background)
        background.done.set()
        give_memory_back()


def _find(background: _BackgroundSearch) -> SelectionResult | Reason:
    try:
        found = attempt(Stage.SELECT, None, WHOLE, lambda: background.search(background.task))
    except (ConfigError, InputError) as error:
        detail = f"The search in the background ended: {error}"
        found = Reason(Stage.SELECT, Code.CONVERSION_FAILED, None, WHOLE, detail)
    if isinstance(found, Reason):
        background.error = BackendError(f"{found.detail}\n{found.error or ''}".strip())
    return found


def _install_engines(found: SelectionResult, waiting: Waiting) -> None:
    for choice in found.confirmed.composition.choices:
        if choice.chosen is not None:
            [engine] = choice.chosen.engines
            waiting[choice.built.name].adopt(cast(Engine, engine))


def _end() -> None:
    """At exit: start nothing more, and wait for the running search. A thread that is in native code when the
    interpreter is finalized would crash the process."""
    with _lock:
        left = list(_running)
    for background in left:
        background.task.budget.cancel()
    if left:
        end_conversions()
    for background in left:
        assert background.thread is not None
        background.thread.join(EXIT_S)


_lock = threading.Lock()
_searches: WeakKeyDictionary[torch.nn.Module, _BackgroundSearch] = WeakKeyDictionary()
_running: set[_BackgroundSearch] = set()
atexit.register(_end)
