# SPDX-License-Identifier: Apache-2.0
"""Turn a cluster into verified engines, one per backend that manages, and a Reason per other.

    candidates, reasons = build(extracted, backends, config)

Nothing here is timed; ``select`` does that. What a backend throws stays in here.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from blade.backends.base import Backend, Cluster
from blade.config import Config
from blade.errors import BackendError
from blade.fallback.attempt import attempt
from blade.fallback.cluster_module import cluster_module
from blade.fallback.isolate import convert_isolated
from blade.fallback.select import Candidate
from blade.fallback.stored import NOTHING, Stored
from blade.fallback.verify import verify
from blade.graph.extract import Extracted
from blade.reason import Reason, Stage
from blade.report import Verdict


def build(
    extracted: Extracted,
    backends: Sequence[Backend],
    config: Config,
    stored: Stored = NOTHING,
) -> tuple[tuple[Candidate, ...], tuple[Reason, ...]]:
    """Convert and verify with each of ``backends``; unmeasured (``timing=False``), the first is enough.

    Candidates that are ``stored`` need neither any more.

    With ``config.strict`` raises what a backend raised, and ``BackendError`` for an engine that is wrong.
    """
    candidates: list[Candidate] = []
    reasons: list[Reason] = []
    for backend in backends:
        found = stored.candidates.get(backend.name) or _candidate(extracted, backend, config)
        if isinstance(found, Reason):
            reasons.append(found)
            continue
        candidates.append(replace(found, key=stored.keys.get(backend.name)))
        if not config.timing:
            break
    return tuple(candidates), tuple(reasons)


def convert_and_verify(
    cluster: Cluster, original: torch.jit.ScriptModule, backend: Backend, config: Config
) -> tuple[torch.ScriptObject, Verdict] | Reason:
    """An engine that was seen to be right, or the Reason why ``backend`` gives none."""
    engine = _convert(cluster, backend, config)
    if isinstance(engine, Reason):
        return engine
    verdict = verify(cluster, engine, original, backend.name, config.strict)
    if not isinstance(verdict, Reason):
        return engine, verdict
    if config.strict:
        raise BackendError(f"{cluster.name} in {backend.name}: {verdict.detail}")
    return verdict


def _candidate(extracted: Extracted, backend: Backend, config: Config) -> Candidate | Reason:
    cluster = extracted.cluster
    found = convert_and_verify(cluster, extracted.fallback, backend, config)
    if isinstance(found, Reason):
        return found
    engine, verdict = found
    module = attempt(
        Stage.CONVERT,
        backend.name,
        cluster.name,
        lambda: cluster_module(extracted, engine),
        config.strict,
    )
    if isinstance(module, Reason):
        return module
    return Candidate(backend.name, engine, module, verdict)


def _convert(cluster: Cluster, backend: Backend, config: Config) -> torch.ScriptObject | Reason:
    """In a process apart unless the backend says that it needs none (``in_process``)."""
    if not getattr(backend, "in_process", False):
        return convert_isolated(backend, cluster, config)
    return attempt(
        Stage.CONVERT,
        backend.name,
        cluster.name,
        lambda: backend.convert(cluster, config),
        config.strict,
    )
