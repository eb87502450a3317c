# SPDX-License-Identifier: Apache-2.0
"""Optimize in the background: a module that serves at once, and its engines once they are ready.

    module, waiting, task = begin(task)           # the original, in clusters with engines to come
    start(module, waiting, task, stage, finish)   # a thread searches, then each engine goes to its place
    wait(module, timeout=60)                      # True: nothing more will change

The clusters are those of the mixture and stay as they are: another partition, or several engines in a
cluster, would be another module. Nothing that runs in the thread draws from torch's global random
generators, so models that draw from them are optimized in the foreground. Calls of the module while engines
are timed disturb the measurement, as any load does.
"""

import atexit
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import cast
from weakref import WeakKeyDictionary

import torch

from blade.capture.compare import find_differences
from blade.errors import BackendError, BladeError, ConfigError, InputError
from blade.fallback.attempt import attempt
from blade.fallback.cluster_module import cluster_module
from blade.fallback.decided import Decided
from blade.fallback.isolate import end_conversions
from blade.fallback.propose import WHOLE
from blade.fallback.search import Stages, Task, search
from blade.graph.boundary import find_boundary
from blade.graph.extract import outline_bare
from blade.graph.group import group
from blade.graph.samples import Samples
from blade.graph.splice import splice
from blade.reason import Code, Reason, Stage
from blade.runtime.engine import Engine, make_pending

EXIT_S = 60.0  # what is going on when the interpreter ends is a compilation of seconds at most
Waiting = dict[str, Engine]
Finish = Callable[[Decided | Reason], None]


@dataclass(eq=False)
class _Background:
    """One search, and what became of it."""

    task: Task
    stage: Stages
    finish: Finish
    done: threading.Event = field(default_factory=threading.Event)
    error: BladeError | None = None
    thread: threading.Thread | None = None


def begin(task: Task) -> tuple[torch.jit.ScriptModule, Waiting, Task]:
    """The module with an engine to come in each cluster, these engines by cluster, and what to search.

    Raises ``BackendError`` if the module does not answer as the user's does even so.
    """
    captured, view = task.captured, task.graph
    clustering = group(view, task.labels, min_size=task.config.min_cluster_size)
    # what reaches the clusters is seen now: the run that shows it starts from a seed of its own
    samples = Samples(captured, view)
    samples.record(find_boundary(view, one.nodes) for one in clustering.groups)
    waiting: Waiting = {}
    placed = []
    for i, one in enumerate(clustering.groups):
        extracted = outline_bare(view, f"cluster_{i}", one.nodes)
        if extracted.outputs:
            engine = make_pending(extracted.name)
            waiting[extracted.name] = cast(Engine, engine)
            placed.append((extracted, cluster_module(extracted, engine)))
    module = splice(captured, placed)
    references, original = captured.references, captured.original
    for reference, why in find_differences(module, references, original=original):
        raise BackendError(f"in clusters, at {reference.what} the module differs: {why}")
    for pending in waiting.values():
        pending.renew()
    return module, waiting, replace(task, fixed=True, samples=samples)


def start(
    module: torch.jit.ScriptModule, waiting: Waiting, task: Task, stage: Stages, finish: Finish
) -> None:
    """Search in a thread, hand the engines over, then ``finish``."""
    search = _Background(task, stage, finish)
    search.thread = threading.Thread(
        target=_run, args=(search, waiting), name="blade-optimize", daemon=True
    )
    with _lock:
        _searches[module] = search
        _running.add(search)
    search.thread.start()


def wait(optimized: torch.nn.Module, timeout: float | None = None) -> bool:
    """Whether ``optimized`` is what it will stay; waits for that, at most ``timeout`` seconds.

    At once ``True`` for a module that was not optimized with ``Config(background=True)`` in this process.
    With ``Config(strict=True)`` raises ``BackendError`` if the search failed.
    """
    with _lock:
        background = _searches.get(optimized)
    if background is None:
        return True
    if not background.done.wait(timeout):
        return False
    if background.error is not None and background.task.config.strict:
        raise background.error
    return True


def _run(background: _Background, waiting: Waiting) -> None:
    try:
        with torch.inference_mode(False), torch.no_grad():
            found = _find(background)
            if isinstance(found, Decided):
                _hand_over(found, waiting)
            background.finish(found)
    finally:
        for engine in waiting.values():
            if engine.backend() == "pending":
                engine.set_enabled(False)  # none will come
        with _lock:
            _running.discard(background)
        background.done.set()


def _find(background: _Background) -> Decided | Reason:
    try:
        found = attempt(
            Stage.SELECT, None, WHOLE, lambda: search(background.task, background.stage)
        )
    except (ConfigError, InputError) as error:
        detail = f"The search in the background ended: {error}"
        found = Reason(Stage.SELECT, Code.CONVERSION_FAILED, None, WHOLE, detail)
    if isinstance(found, Reason):
        background.error = BackendError(f"{found.detail}\n{found.error or ''}".strip())
    return found


def _hand_over(found: Decided, waiting: Waiting) -> None:
    for choice in found.confirmed.composition.choices:
        if choice.chosen is not None:
            [engine] = choice.chosen.engines
            waiting[choice.built.name].adopt(cast(Engine, engine))


def _end() -> None:
    """At exit: nothing further is begun, and what goes on is waited for. A thread that is still in native code
    when the interpreter is gone would take the process down."""
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
_searches: WeakKeyDictionary[torch.nn.Module, _Background] = WeakKeyDictionary()
_running: set[_Background] = set()
atexit.register(_end)
