# SPDX-License-Identifier: Apache-2.0
"""What was chosen for a whole module, on disk: the second ``optimize`` only loads it.

    decided = decided_before(captured, graph_view, backends, config)     # None: find out
    keep_decision(key, decided, captured, config)

The key covers what a cluster's does (``stored``), for the module as a whole, and every usable backend with
its version. The engines are those that ``stored`` keeps. Of a search that ran out of time the best it found
is kept, until somebody gives more time: that search builds and measures only what the first one left out.
Nothing is kept of one that ended with the original, which is worth another try. What the module answers is
compared with the user's model in every ``optimize``.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

from torch.utils import _pytree as pytree

from blade.backends.base import Backend
from blade.cache import digest, open_cache
from blade.capture.captured import Captured
from blade.clustering.problem import Group
from blade.config import Config
from blade.fallback.attempt import attempt
from blade.fallback.built import Built
from blade.fallback.candidate import Candidate
from blade.fallback.compose import Confirmed, put_together
from blade.fallback.identity import words_for
from blade.fallback.known_traces import keep_trace
from blade.fallback.propose import WHOLE, Choice, Composition
from blade.fallback.stored import Contents, recall, settings_of
from blade.fallback.table import Size, Table
from blade.graph.extract import outline_bare
from blade.graph.view import GraphView
from blade.reason import Reason, Stage
from blade.report import ClusterReport, Report
from blade.runtime.engine import Engine

log = logging.getLogger(__name__)

KIND = "decision"


@dataclass(frozen=True)
class Decided:
    """The module again; the report says what it said when it was chosen. ``is_cut_short``: more would have been
    tried with a larger ``Config.time_budget``."""

    confirmed: Confirmed
    clusters: tuple[ClusterReport, ...]
    reasons: tuple[Reason, ...]
    is_cut_short: bool = False


def key_of(
    captured: Captured,
    view: GraphView,
    backends: Sequence[Backend],
    config: Config,
    contents: Contents,
) -> str | None:
    """``None`` if nothing can be kept: no cache, or something without a version or a value that tells."""
    found = attempt(
        Stage.SELECT, None, WHOLE, lambda: _key(captured, view, backends, config, contents)
    )
    return None if isinstance(found, Reason) else found


def _key(
    captured: Captured,
    view: GraphView,
    backends: Sequence[Backend],
    config: Config,
    contents: Contents,
) -> str | None:
    versions = [(b.name, getattr(b, "version", None)) for b in backends]
    usable = open_cache(config.cache) is not None and config.dump_dir is None and backends
    if not usable or any(version is None for _, version in versions):
        return None
    # Values decide what runs, and how often, where there is control flow; and lossy engines are fitted to them.
    by_value = len(view.program.blocks) > 1 or config.reduces_precision
    words = words_for(captured, view.program, contents, values=by_value)
    if words is None:
        return None
    further = [x for x in pytree.tree_leaves(captured.calibration) if hasattr(x, "stride")]
    return digest(
        [
            *words,
            *settings_of(config),
            repr(config.sample_weights),
            *map(repr, versions),
            repr((sorted(captured.fixed), captured.limits, captured.ties)),
            *(contents.of([("", t) for t in further]) if by_value else ()),
        ]
    )


def decided_before(
    key: str | None, captured: Captured, view: GraphView, config: Config
) -> Decided | None:
    """What was chosen for such a module; ``None`` if that is not known, does not work any more, or was chosen
    in less time than there was to try and is now."""
    cache = open_cache(config.cache)
    data = cache.get(KIND, key) if cache is not None and key is not None else None
    if data is None:
        return None
    found = attempt(Stage.SELECT, None, WHOLE, lambda: _restore(data, captured, view, config))
    if isinstance(found, Reason):
        log.info("what the cache has of the whole module is not used: %s", found.detail)
        return None
    return found


def keep_decision(key: str | None, decided: Decided, captured: Captured, config: Config) -> None:
    """Store ``decided`` for the next time that ``captured`` is seen, unless the original was chosen."""
    cache = open_cache(config.cache)
    composition = decided.confirmed.composition
    told = Report(decided.clusters, decided.reasons, compositions=decided.confirmed.tried)
    if cache is None or key is None or not composition.engines:
        return
    clusters = [_cluster(choice) for choice in composition.choices]
    if any(None in keys for keys in (one["keys"].values() for one in clusters)):
        return
    head = {
        "name": composition.name,
        "clusters": clusters,
        "report": told.to_json(),
        "cut_short_s": config.time_budget if decided.is_cut_short else None,
    }
    cache.put(KIND, key, json.dumps(head).encode())
    keep_trace(config, captured.key)


def _cluster(choice: Choice) -> dict[str, Any]:
    table = choice.table
    serving = [choice.chosen] if table is None else table.serving
    return {
        "name": choice.built.name,
        "nodes": choice.built.group.nodes,
        "keys": {c.backend: c.key for c in serving if c is not None},
        "serving": [c.backend if c is not None else None for c in serving],
        "size": None if table is None else asdict(table.size),
        "bounds": () if table is None else table.bounds,
    }


def _restore(data: bytes, captured: Captured, view: GraphView, config: Config) -> Decided | None:
    head = json.loads(data)
    given_s = head["cut_short_s"]
    if given_s is not None and (config.time_budget is None or config.time_budget > given_s):
        return None
    told = Report.from_json(head["report"])
    choices = [_choice(view, one, config) for one in head["clusters"]]
    if any(choice is None for choice in choices):
        return None  # an engine was evicted
    composition = Composition(head["name"], tuple(c for c in choices if c is not None))
    module = put_together(captured, composition, config.evolve(strict=False))
    if isinstance(module, Reason):
        log.info("what the cache has of the whole module is not used: %s", module.detail)
        return None
    confirmed = Confirmed(module, composition, told.compositions)
    return Decided(confirmed, told.clusters, told.reasons, given_s is not None)


def _choice(view: GraphView, one: dict[str, Any], config: Config) -> Choice | None:
    """``None`` if one of the engines is not there."""
    cache, group = open_cache(config.cache), Group(tuple(one["nodes"]), frozenset())
    if not one["keys"]:
        return Choice(Built(one["name"], group, None, (), ()), None)
    extracted = outline_bare(view, one["name"], group.nodes)
    assert cache is not None
    found: dict[str, Candidate] = {}
    for backend, key in one["keys"].items():
        candidate = recall(cache, key, extracted, backend)
        if candidate is None or any(cast(Engine, e).why_unavailable() for e in candidate.engines):
            return None
        found[backend] = replace(candidate, key=key)
    built = Built(one["name"], group, extracted, tuple(found.values()), ())
    serving = tuple(None if name is None else found[name] for name in one["serving"])
    if one["size"] is None:
        return Choice(built, serving[0])
    axis = one["size"]["axis"]
    size = Size(None if axis is None else (axis[0], axis[1]), one["size"]["inputs"])
    return Choice(built, None, Table(size, tuple(one["bounds"]), serving, ()))
