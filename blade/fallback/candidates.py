# SPDX-License-Identifier: Apache-2.0
"""Turn clusters into verified engines, one per backend that manages, and a Reason per other.

    [(candidates, reasons)] = build([Wanted(extracted, backends)], config)

Nothing here is timed; ``select`` does that. What a backend throws stays in here. Conversions in processes
apart run beside each other and beside those in this process; the results do not depend on who is first.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic

import torch

from blade.backends import registry
from blade.backends.base import Backend, Cluster
from blade.config import Config
from blade.errors import BackendError
from blade.fallback.attempt import attempt
from blade.fallback.candidate import Candidate
from blade.fallback.cluster_module import cluster_module
from blade.fallback.early_truth import EarlyTruth
from blade.fallback.estimate import estimate_s, note_s
from blade.fallback.fp64 import Fp64
from blade.fallback.isolate import convert_isolated, raise_if_strict, several_workers
from blade.fallback.lossy import budget_of
from blade.fallback.pool import Pool, size_of_pool
from blade.fallback.stored import NOTHING, Stored
from blade.fallback.time_budget import UNLIMITED, TimeBudget
from blade.fallback.verify import verify
from blade.graph.extract import Extracted
from blade.meanwhile import meanwhile
from blade.progress import announce
from blade.reason import Code, Reason, Stage
from blade.report import Verdict
from blade.turns import TURNS

Engine = torch.ScriptObject
Found = tuple[tuple[Candidate, ...], tuple[Reason, ...]]


@dataclass(frozen=True)
class Wanted:
    """A cluster and who is to try it, in this order; what is ``stored`` needs no trying any more.

    The backend called ``first`` is tried whatever time is left; of none, the first of them.
    """

    extracted: Extracted
    backends: Sequence[Backend]
    stored: Stored = NOTHING
    first: str | None = None


def build(wanted: Sequence[Wanted], config: Config, budget: TimeBudget = UNLIMITED) -> list[Found]:
    """Convert and verify each cluster with each of its backends, as far as ``budget`` goes.

    The first backend of a cluster is always tried. Unmeasured (``timing=False``), the first that serves is
    enough. With ``config.strict`` raises what a backend raised, and ``BackendError`` for a wrong engine.
    """
    if not config.timing:
        return [_build_first(done, len(wanted), one, config) for done, one in enumerate(wanted)]
    several = {i: dict[str, Candidate | Reason]() for i in range(len(wanted))}
    size = min(size_of_pool(config), sum(map(_conversions_apart, wanted)))
    with several_workers(max(1, size)), Pool[Engine | Reason](max(1, size)) as pool:
        here: list[_Task] = []
        apart: list[tuple[_Task, Future[Engine | Reason]]] = []
        for task in _tasks(wanted):
            _, one, backend, is_first = task
            if _is_stored(one, backend) or _is_in_process(backend):
                here.append(task)
            else:
                convert = partial(_convert_in_time, one.extracted.cluster, backend, config)
                apart.append((task, pool.submit(convert, budget, is_first)))
        total = len(here) + len(apart)
        for done, (i, one, backend, is_first) in enumerate(here):
            announce("convert", done, total, f"{one.extracted.name}, {backend.name}")
            several[i][backend.name] = _candidate(one, backend, config, budget, is_first)
        for done, ((i, one, backend, _), future) in enumerate(apart, len(here)):
            announce("convert", done, total, f"{one.extracted.name}, {backend.name}")
            engine = raise_if_strict(future.result(), config)
            several[i][backend.name] = _judge(one.extracted, backend, engine, config)
    return [_sort(one, several[i]) for i, one in enumerate(wanted)]


def convert_and_verify(
    cluster: Cluster, original: torch.jit.ScriptModule, backend: Backend, config: Config
) -> tuple[Engine, Verdict] | Reason:
    """An engine that was seen to be right, or the Reason why ``backend`` gives none."""
    engine = convert(cluster, backend, config)
    if isinstance(engine, Reason):
        return engine
    return _verify(cluster, original, backend, engine, config)


_Task = tuple[int, Wanted, Backend, bool]  # number of the cluster, whether the backend is its first


def _tasks(wanted: Sequence[Wanted]) -> list[_Task]:
    """Every conversion: those by the first backend of each cluster, then backend by backend."""
    place = {name: i for i, name in enumerate(registry.names())}
    tasks: list[_Task] = []
    for i, one in enumerate(wanted):
        first = one.first or next((b.name for b in one.backends), None)
        tasks += [(i, one, backend, backend.name == first) for backend in one.backends]
    return sorted(tasks, key=lambda t: (not t[3], place.get(t[2].name.lower(), len(place))))


def _build_first(done: int, total: int, one: Wanted, config: Config) -> Found:
    """The first backend that serves, and the reasons of those before it."""
    announce("convert", done, total, one.extracted.name)
    found: dict[str, Candidate | Reason] = {}
    for backend in one.backends:
        found[backend.name] = _candidate(one, backend, config, UNLIMITED, is_first=True)
        if isinstance(found[backend.name], Candidate):
            break
    return _sort(one, found)


def _sort(one: Wanted, found: dict[str, Candidate | Reason]) -> Found:
    """Candidates and reasons, in the order of the backends."""
    results = [found[b.name] for b in one.backends if b.name in found]
    return (
        tuple(
            replace(r, key=one.stored.keys.get(r.backend))
            for r in results
            if isinstance(r, Candidate)
        ),
        tuple(r for r in results if isinstance(r, Reason)),
    )


def _candidate(
    one: Wanted, backend: Backend, config: Config, budget: TimeBudget, is_first: bool
) -> Candidate | Reason:
    if (stored := one.stored.found(backend.name)) is not None:
        return stored
    cluster = one.extracted.cluster
    early = EarlyTruth(cluster, one.extracted.fallback if config.timing else None)
    with nullcontext() if budget_of(backend, config) else meanwhile(early.find):
        engine = _convert_in_time(cluster, backend, config, budget, is_first)
    return _judge(one.extracted, backend, engine, config, early.found)


def _judge(
    extracted: Extracted,
    backend: Backend,
    engine: Engine | Reason,
    config: Config,
    truth: Fp64 | None = None,
) -> Candidate | Reason:
    """The verified candidate, or the Reason against it; ``truth`` as in ``verify``."""
    if isinstance(engine, Reason):
        return replace(engine, backend=backend.name, subject=extracted.name)
    found = _verify(extracted.cluster, extracted.fallback, backend, engine, config, truth)
    if isinstance(found, Reason):
        return found
    _, verdict = found
    module = attempt(
        Stage.CONVERT,
        backend.name,
        extracted.name,
        lambda: cluster_module(extracted, engine),
        config.strict,
    )
    if isinstance(module, Reason):
        return module
    return Candidate(backend.name, engine, module, verdict)


def _verify(
    cluster: Cluster,
    original: torch.jit.ScriptModule,
    backend: Backend,
    engine: Engine,
    config: Config,
    truth: Fp64 | None = None,
) -> tuple[Engine, Verdict] | Reason:
    budget = budget_of(backend, config)
    with TURNS.converting():
        verdict = verify(
            cluster, engine, original, backend.name, config.strict, budget, truth=truth
        )
    if not isinstance(verdict, Reason):
        return engine, verdict
    if config.strict:
        raise BackendError(f"{cluster.name} in {backend.name}: {verdict.detail}")
    return verdict


def _convert_in_time(
    cluster: Cluster, backend: Backend, config: Config, budget: TimeBudget, is_first: bool
) -> Engine | Reason:
    """A conversion that fits into the budget and is ended where it turns out not to; the first always fits."""
    if is_first and not budget.is_cancelled:
        return convert(cluster, backend, config)
    estimate = attempt(
        Stage.CONVERT, backend.name, cluster.name, lambda: estimate_s(backend, cluster, config)
    )
    if isinstance(estimate, Reason):
        return estimate
    if (why := budget.why_not(estimate)) is not None:
        return _out_of_time(backend, cluster, why)
    left = budget.left_to_convert()
    if left >= config.conversion_deadline_s:
        return convert(cluster, backend, config)
    found = convert(cluster, backend, config.evolve(conversion_deadline_s=left))
    if isinstance(found, Reason) and found.code is Code.CONVERSION_TIMEOUT:
        return _out_of_time(backend, cluster, budget.why_ended("it was converted"))
    return found


def _out_of_time(backend: Backend, cluster: Cluster, why: str) -> Reason:
    return Reason(Stage.CONVERT, Code.TIME_BUDGET, backend.name, cluster.name, why)


def convert(cluster: Cluster, backend: Backend, config: Config) -> Engine | Reason:
    """In a process apart unless the backend says that it needs none (``in_process``)."""
    with TURNS.converting():
        if not _is_in_process(backend):
            start = monotonic()
            found = convert_isolated(backend, cluster, config)
            if not isinstance(found, Reason) or found.code is Code.CONVERSION_TIMEOUT:
                took = partial(note_s, backend, cluster, monotonic() - start, config)
                attempt(Stage.CONVERT, backend.name, cluster.name, took)
            return found
        return attempt(
            Stage.CONVERT,
            backend.name,
            cluster.name,
            lambda: backend.convert(cluster, config),
            config.strict,
        )


def _is_in_process(backend: Backend) -> bool:
    return bool(getattr(backend, "in_process", False))


def _is_stored(one: Wanted, backend: Backend) -> bool:
    return one.stored.found(backend.name) is not None


def _conversions_apart(one: Wanted) -> int:
    return sum(not _is_in_process(b) and not _is_stored(one, b) for b in one.backends)
