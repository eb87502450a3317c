# SPDX-License-Identifier: Apache-2.0
"""Turn clusters into verified engines: one per backend that succeeds, and a Reason for each other backend.

    [(candidates, reasons)] = build_candidates([BuildRequest(extracted, backends)], config)

Nothing is timed here; ``select`` does that. Exceptions of a backend become Reasons. Conversions in separate
processes run in parallel with each other and with those in this process; their order does not change the
results.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic

import torch

from blade.backends import registry
from blade.config import Config
from blade.core.attempt import attempt
from blade.core.backend import Backend
from blade.core.cluster import Cluster
from blade.core.progress import announce
from blade.core.reason import Code, Reason, Stage
from blade.errors import BackendError
from blade.fallback.cluster_module import cluster_module
from blade.fallback.convert_pool import ConvertPool, size_of_pool
from blade.fallback.isolated_convert import convert_isolated, keep_workers, raise_if_strict
from blade.fallback.run_limits import admit_autocast, recheck
from blade.graph.torchscript.extract import Extracted
from blade.process.overlap import overlapping
from blade.process.timing_lock import TIMING_LOCK
from blade.report import Verdict
from blade.selection.cache.engines import NONE_CACHED, CachedEngines
from blade.selection.plan.candidate import Candidate
from blade.timing.conversion_estimate import estimate_s, record_seconds
from blade.timing.time_budget import UNLIMITED, TimeBudget
from blade.verification.derived_inputs import end
from blade.verification.fp64_reference import Fp64Reference
from blade.verification.prefetch_reference import PrefetchedReference
from blade.verification.reduced_precision import budget_of
from blade.verification.verify import try_forked, verify

Engine = torch.ScriptObject
Found = tuple[tuple[Candidate, ...], tuple[Reason, ...]]
_OVERTIME = 2.0  # time budgets that may be over before the first engine of a cluster begins


@dataclass(frozen=True)
class BuildRequest:
    """A cluster and the backends to try, in this order; engines in ``stored`` are not built again.

    The backend called ``first``, by default the first of ``backends``, is tried before the time gets short.
    """

    extracted: Extracted
    backends: Sequence[Backend]
    stored: CachedEngines = NONE_CACHED
    first: str | None = None


def build_candidates(
    wanted: Sequence[BuildRequest],
    config: Config,
    budget: TimeBudget = UNLIMITED,
    one_at_least: bool = True,
) -> list[Found]:
    """Convert and verify each cluster with each of its backends, as far as ``budget`` goes.

    The first backend of a cluster is tried until twice the budget is over; with ``one_at_least`` that of the largest
    cluster is tried whatever time is left. With ``timing=False`` the first verified engine of a cluster ends its
    search. With ``config.strict``, raises the backend's exception, and ``BackendError`` for a wrong engine.
    """
    if not config.timing:
        return [_build_first(done, len(wanted), one, config) for done, one in enumerate(wanted)]
    try:
        return _build_measured(wanted, config, budget, one_at_least)
    finally:
        for one in wanted:
            _end(one)


def _end(one: BuildRequest) -> None:
    if one.extracted.has_cluster:  # else nothing was tried
        end(one.extracted.cluster.gm)


def _build_measured(
    wanted: Sequence[BuildRequest], config: Config, budget: TimeBudget, one_at_least: bool
) -> list[Found]:
    """A cluster gets its form in FX when its first conversion begins: out of time, none is made.

    Conversions in separate processes are submitted before this process converts the same cluster.
    """
    several = {i: dict[str, Candidate | Reason]() for i in range(len(wanted))}
    total, done = sum(len(one.backends) for one in wanted), 0  # conversions
    with _pool(sum(map(_conversions_apart, wanted)), config) as pool:
        apart: list[tuple[_Task, Future[Engine | Reason]]] = []
        for task in _tasks(wanted, one_at_least):
            if (found := _without_converting(task, budget, config)) is not None:
                several[task.index][task.backend.name] = found
            elif task.is_apart:
                convert = partial(_convert_apart, task.extracted, task.backend, config)
                apart.append((task, pool.submit(convert, budget, task.is_first)))
                continue
            else:
                announce("convert", done, total, task.what)
                several[task.index][task.backend.name] = _candidate(task, config, budget)
            done += 1
        for task, future in apart:
            announce("convert", done, total, task.what)
            done += 1
            engine = raise_if_strict(future.result(), config)
            found = _verified_candidate(task.extracted, task.backend, engine, config)
            several[task.index][task.backend.name] = found
    return [_in_backend_order(one, several[i]) for i, one in enumerate(wanted)]


def _without_converting(
    task: "_Task", budget: TimeBudget, config: Config
) -> Candidate | Reason | None:
    """The stored result, or the reason not to begin a conversion: no time is left, or there is no form in FX."""
    if (stored := task.request.stored.found(task.backend.name)) is not None:
        return stored
    name, backend = task.extracted.name, task.backend.name
    if (why := task.why_late(budget)) is not None:
        return Reason(Stage.CONVERT, Code.TIME_BUDGET, backend, name, why)
    made = attempt(Stage.CONVERT, None, name, lambda: task.extracted.cluster, config.strict)
    return replace(made, backend=backend) if isinstance(made, Reason) else None


def convert_each(
    cluster: Cluster, backends: Sequence[Backend], config: Config, budget: TimeBudget
) -> dict[str, Engine | Reason]:
    """Return the engine or the Reason of each of ``backends``, by name, in their order; nothing is verified.

    With ``timing=False`` the first success ends the search. Otherwise conversions in separate processes run
    in parallel, as far as ``budget`` goes; the first backend is always tried.
    """
    found: dict[str, Engine | Reason] = {}
    if not config.timing or len(backends) == 1:
        for backend in backends:
            found[backend.name] = convert(cluster, backend, config)
            if not isinstance(found[backend.name], Reason):
                break
        return found
    apart = [b for b in backends if not b.in_process]
    here = [b for b in backends if b.in_process]
    with _pool(len(apart), config) as pool:
        futures = [
            pool.submit(convert_in_time, cluster, b, config, budget, b is backends[0])
            for b in apart
        ]
        for b in here:
            found[b.name] = convert_in_time(cluster, b, config, budget, b is backends[0])
        for b, future in zip(apart, futures, strict=True):
            found[b.name] = raise_if_strict(future.result(), config)
    named = {b.name: found[b.name] for b in backends}
    # a failure of the pool itself knows neither backend nor cluster
    return {
        name: replace(one, backend=name, subject=cluster.name) if isinstance(one, Reason) else one
        for name, one in named.items()
    }


def convert_and_verify(
    cluster: Cluster, original: torch.jit.ScriptModule, backend: Backend, config: Config
) -> tuple[Engine, Verdict] | Reason:
    """Return a verified engine, or the Reason why ``backend`` gives none."""
    try_forked(cluster, original)
    try:
        engine = convert(cluster, backend, config)
        if isinstance(engine, Reason):
            return engine
        return _verify(cluster, original, backend, engine, config)
    finally:
        end(cluster.gm)


@contextmanager
def _pool(conversions: int, config: Config) -> Iterator[ConvertPool[Engine | Reason]]:
    """A pool for this many ``conversions``, with as many processes as the machine has room for."""
    size = max(1, min(size_of_pool(config), conversions))
    with keep_workers(size), ConvertPool[Engine | Reason](size) as pool:
        yield pool


@dataclass(frozen=True)
class _Task:
    """A conversion. ``index``: of the cluster; ``is_first``: the backend is its first."""

    index: int
    request: BuildRequest
    backend: Backend
    is_first: bool
    is_exempt: bool = False  # from the time budget

    @property
    def extracted(self) -> Extracted:
        return self.request.extracted

    @property
    def what(self) -> str:
        return f"{self.extracted.name}, {self.backend.name}"

    @property
    def is_apart(self) -> bool:
        return not self.backend.in_process

    def why_late(self, budget: TimeBudget) -> str | None:
        """``None`` if the conversion may begin now; otherwise, or later by its estimate, it is left out."""
        if self.is_exempt and not budget.is_cancelled:
            return None
        if self.is_first:
            is_late = budget.is_used(_OVERTIME)
            return budget.why_ended("it was converted") if is_late else None
        return budget.why_not(0.0)


def _tasks(wanted: Sequence[BuildRequest], one_at_least: bool) -> list[_Task]:
    """Return all conversions, cluster by cluster: separate processes, then this one.

    The largest cluster that the first sample reaches is the first; those that only other sizes reach are the last.
    """
    place = {name: i for i, name in enumerate(registry.names())}
    tasks: list[_Task] = []
    for i, one in enumerate(wanted):
        first = one.first or next((b.name for b in one.backends), None)
        tasks += [_Task(i, one, backend, backend.name == first) for backend in one.backends]
    firsts = (t for t in tasks if t.is_first)
    largest = max(firsts, key=_importance, default=None)
    tasks = [replace(t, is_exempt=one_at_least and t is largest) for t in tasks]

    def turn(task: _Task) -> tuple[bool, int, int, bool, bool, int]:
        rank = place.get(task.backend.name.lower(), len(place))
        is_later = largest is not None and task.index != largest.index
        run = task.extracted.first_run
        return is_later, run, task.index, not task.is_apart, not task.is_first, rank

    return sorted(tasks, key=turn)


def _importance(task: _Task) -> tuple[int, int]:
    return -task.extracted.first_run, len(task.extracted.nodes)


def _build_first(done: int, total: int, one: BuildRequest, config: Config) -> Found:
    """Return the first verified candidate, and the reasons of the backends before it."""
    announce("convert", done, total, one.extracted.name)
    found: dict[str, Candidate | Reason] = {}
    try:
        for backend in one.backends:
            task = _Task(done, one, backend, is_first=True, is_exempt=True)
            made = _without_converting(task, UNLIMITED, config)
            found[backend.name] = _candidate(task, config, UNLIMITED) if made is None else made
            if isinstance(found[backend.name], Candidate):
                break
    finally:
        _end(one)
    return _in_backend_order(one, found)


def _in_backend_order(one: BuildRequest, found: dict[str, Candidate | Reason]) -> Found:
    """Return candidates and reasons, in the order of the backends."""
    results = [found[b.name] for b in one.backends if b.name in found]
    return (
        tuple(
            replace(r, key=one.stored.keys.get(r.backend))
            for r in results
            if isinstance(r, Candidate)
        ),
        tuple(r for r in results if isinstance(r, Reason)),
    )


def _candidate(task: _Task, config: Config, budget: TimeBudget) -> Candidate | Reason:
    extracted, backend = task.extracted, task.backend
    cluster = extracted.cluster
    try_forked(cluster, extracted.fallback)
    early = PrefetchedReference(cluster, extracted.fallback if config.timing else None)
    with nullcontext() if budget_of(backend, config) else overlapping(early.find):
        engine = convert_in_time(cluster, backend, config, budget, task.is_first)
    return _verified_candidate(extracted, backend, engine, config, early.found)


def _verified_candidate(
    extracted: Extracted,
    backend: Backend,
    engine: Engine | Reason,
    config: Config,
    truth: Fp64Reference | None = None,
) -> Candidate | Reason:
    """Return the verified candidate, or the Reason against it; ``truth`` as in ``verify``."""
    if isinstance(engine, Reason):
        return replace(engine, backend=backend.name, subject=extracted.name)
    cluster, original = extracted.cluster, extracted.fallback
    found = _verify(cluster, original, backend, engine, config, truth, extracted.answers)
    if isinstance(found, Reason):
        return found
    _, verdict = found
    recheck(engine, extracted.cluster, verdict, config)
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
    truth: Fp64Reference | None = None,
    answers: Sequence[Sequence[torch.Tensor]] = (),
) -> tuple[Engine, Verdict] | Reason:
    budget = budget_of(backend, config)
    admit_autocast(engine)
    with TIMING_LOCK.converting():
        verdict = verify(
            cluster,
            engine,
            original,
            backend.name,
            config.strict,
            budget,
            truth=truth,
            answers=answers,
        )
    if not isinstance(verdict, Reason):
        return engine, verdict
    if config.strict:
        raise BackendError(f"{cluster.name} in {backend.name}: {verdict.detail}")
    return verdict


def _convert_apart(
    extracted: Extracted, backend: Backend, config: Config, budget: TimeBudget, is_first: bool
) -> Engine | Reason:
    try_forked(extracted.cluster, extracted.fallback)
    return convert_in_time(extracted.cluster, backend, config, budget, is_first)


def convert_in_time(
    cluster: Cluster, backend: Backend, config: Config, budget: TimeBudget, is_first: bool
) -> Engine | Reason:
    """Convert within the budget, and stop the conversion where it exceeds that; the first always runs."""
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
    """Convert in a separate process unless the backend needs none (``in_process``)."""
    with TIMING_LOCK.converting():
        if not backend.in_process:
            start = monotonic()
            found = convert_isolated(backend, cluster, config)
            if not isinstance(found, Reason) or found.code is Code.CONVERSION_TIMEOUT:
                took = partial(record_seconds, backend, cluster, monotonic() - start, config)
                attempt(Stage.CONVERT, backend.name, cluster.name, took)
            return found
        return attempt(
            Stage.CONVERT,
            backend.name,
            cluster.name,
            lambda: backend.convert(cluster, config),
            config.strict,
        )


def _is_stored(one: BuildRequest, backend: Backend) -> bool:
    return one.stored.found(backend.name) is not None


def _conversions_apart(one: BuildRequest) -> int:
    return sum(not b.in_process and not _is_stored(one, b) for b in one.backends)
