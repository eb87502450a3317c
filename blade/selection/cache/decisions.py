# SPDX-License-Identifier: Apache-2.0
"""The decision cache: a second ``optimize`` builds and measures nothing but the module that it returns.

    captured = capture(model, inputs, config, TraceRecords(config))
    graph_view = view(captured, partial(value_facts, captured, config, contents))
    key = decision_key(captured, graph_view, backends, config, contents)
    decided = cached_decision(key, captured, graph_view, config)         # None: not known
    put_decision(key, decided, captured, config)

The cache has three sections, each with a key of its own:

* ``DECISIONS``: choices. The key covers what a cluster's does (``engines``), for the module as a whole, and
  every usable backend with its version. The engines are those of the engine cache. For a search that ran out
  of time the best choice is stored, until a later call has more time: that search builds and measures only
  what the first one left out. A choice of the original is not stored; the next call searches again. Every
  ``optimize`` compares the optimized module with the user's model.
* ``TRACES``: what capture found out about graphs with a stored decision, for samples of some forms: their paths,
  the sizes that they answer. They were compared with their model. A module from the cache is compared with the
  model, so that the graph it was made from need not be compared again (``Captured.is_compared`` is false).
* ``FACTS``: sizes, dtypes and memory orders of every value of a graph, so that it need not be run to find
  them. The key covers the graph, its weights, and the samples and probes with their values: sizes may depend
  on values. Graphs with custom ops, whose meaning may change, run every time.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import torch

from blade.capture.inputs import Sample
from blade.capture.reference_model import ReferenceModel
from blade.clustering.problem import Group
from blade.config import Config
from blade.core.backend import Backend
from blade.core.captured import Captured
from blade.core.reason import Code, Reason
from blade.graph.shapes.observed_layout import ObservedRun, TensorMeta
from blade.graph.torchscript.extract import outline_bare
from blade.graph.torchscript.observe_values import KeptResults
from blade.graph.torchscript.program import Program
from blade.graph.torchscript.view import GraphView, observe_runs
from blade.report import ClusterReport, Report
from blade.runtime.engine import Engine
from blade.selection.cache.engines import get_engine
from blade.selection.cache.fingerprint import (
    WeightDigests,
    describe_module,
    forms_of,
    make_key,
    text_of,
)
from blade.selection.cache.section import DECISIONS, FACTS, TRACES
from blade.selection.plan.assemble import ValidatedPlan, assemble
from blade.selection.plan.built import ClusterCandidates
from blade.selection.plan.candidate import Candidate
from blade.selection.plan.compositions import WHOLE, ClusterChoice, EnginePlan
from blade.selection.plan.size_dispatch import DispatchAxis, SizeDispatch

log = logging.getLogger(__name__)

_OURS = ("aten::", "prim::")
_OTHERS = ("prim::PythonOp", "prim::CallMethod")  # the graph does not show what they do

ObservedRuns = tuple[ObservedRun, ...]  # per sample, then per probe


@dataclass(frozen=True)
class SelectionResult:
    """The chosen module with its report as of the choice. ``is_cut_short``: a larger ``Config.time_budget``
    would have tried more."""

    confirmed: ValidatedPlan
    clusters: tuple[ClusterReport, ...]
    reasons: tuple[Reason, ...]
    is_cut_short: bool = False


def decision_key(
    captured: Captured,
    view: GraphView,
    backends: Sequence[Backend],
    config: Config,
    contents: WeightDigests,
) -> str | None:
    """Return ``None`` if nothing can be stored: no cache, no version, or no describable value."""
    versions = [(b.name, b.version) for b in backends]
    usable = DECISIONS.is_on(config) and config.dump_dir is None and backends
    if not usable or any(version is None for _, version in versions):
        return None
    # With control flow, values decide what runs, and how often; reduced-precision engines are fitted to them.
    by_value = len(view.program.blocks) > 1 or config.reduces_precision

    def describe() -> list[str] | None:
        module = describe_module(captured, view.program, contents, values=by_value)
        if module is None:
            return None
        return [
            *module,
            repr(config.sample_weights),
            *map(repr, versions),
            repr((sorted(captured.fixed), captured.limits, captured.equal_sizes)),
            *(contents.of_tensors_in(captured.calibration) if by_value else ()),
        ]

    return make_key(WHOLE, describe, config)


def cached_decision(
    key: str | None, captured: Captured, view: GraphView, config: Config
) -> SelectionResult | None:
    """Return the stored choice for such a module; ``None`` if there is none, if it no longer works, or if it
    was made with less time than there is now."""
    return DECISIONS.look_up(
        config, key, lambda data: _restore(data, captured, view, config), WHOLE
    )


def put_decision(
    key: str | None, decided: SelectionResult, captured: Captured, config: Config
) -> None:
    """Store ``decided`` for ``captured``, unless the original was chosen."""
    composition = decided.confirmed.composition
    told = Report(decided.clusters, decided.reasons, compositions=decided.confirmed.tried)
    if key is None or not composition.engines:
        return
    if any(reason.code is Code.TOO_NOISY for reason in told.all_reasons()):
        return  # the next process may find the machine quiet
    clusters = [_cluster(choice) for choice in composition.choices]
    if any(None in keys for keys in (one["keys"].values() for one in clusters)):
        return
    head = {
        "name": composition.name,
        "clusters": clusters,
        "report": told.to_json(),
        "cut_short_s": config.time_budget if decided.is_cut_short else None,
    }
    DECISIONS.keep(config, key, json.dumps(head).encode())
    if captured.record and isinstance(captured.original, ReferenceModel):
        TRACES.keep(config, captured.key, captured.record)
        TRACES.keep(config, _key_of_kind(captured.original.module, config), b"")


def _cluster(choice: ClusterChoice) -> dict[str, Any]:
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


def _restore(
    data: bytes, captured: Captured, view: GraphView, config: Config
) -> SelectionResult | None:
    head = json.loads(data)
    given_s = head["cut_short_s"]
    if given_s is not None and (config.time_budget is None or config.time_budget > given_s):
        return None
    told = Report.from_json(head["report"])
    choices = [_choice(view, one, config) for one in head["clusters"]]
    if any(choice is None for choice in choices):
        return None  # an engine was evicted
    composition = EnginePlan(head["name"], tuple(c for c in choices if c is not None))
    module = assemble(captured, composition, config.evolve(strict=False))
    if isinstance(module, Reason):
        log.info("what the cache has of the whole module is not used: %s", module.detail)
        return None
    confirmed = ValidatedPlan(module, composition, told.compositions)
    return SelectionResult(confirmed, told.clusters, told.reasons, given_s is not None)


def _choice(view: GraphView, one: dict[str, Any], config: Config) -> ClusterChoice | None:
    """Return ``None`` if one of the engines is missing."""
    group = Group(tuple(one["nodes"]), frozenset())
    if not one["keys"]:
        return ClusterChoice(ClusterCandidates(one["name"], group, None, (), ()), None)
    extracted = outline_bare(view, one["name"], group.nodes)
    found: dict[str, Candidate] = {}
    for backend, key in one["keys"].items():
        candidate = get_engine(config, key, extracted, backend)
        if candidate is None or any(cast(Engine, e).why_unavailable() for e in candidate.engines):
            return None
        found[backend] = replace(candidate, key=key)
    built = ClusterCandidates(one["name"], group, extracted, tuple(found.values()), ())
    serving = tuple(None if name is None else found[name] for name in one["serving"])
    if one["size"] is None:
        return ClusterChoice(built, serving[0])
    axis = one["size"]["axis"]
    size = DispatchAxis(None if axis is None else (axis[0], axis[1]), one["size"]["inputs"])
    return ClusterChoice(built, None, SizeDispatch(size, tuple(one["bounds"]), serving, ()))


class TraceRecords:
    """The records that ``capture`` made of graphs with a stored decision."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def has_any(self, model: torch.nn.Module) -> bool:
        """Whether there may be one for ``model``: there is one for a model of the same classes."""
        key = _key_of_kind(model, self._config)
        return TRACES.look_up(self._config, key, lambda _: True, WHOLE) is not None

    def key_of(self, frozen: torch.jit.ScriptModule, samples: Sequence[Sample]) -> str | None:
        """The key of the frozen graph at ``samples``."""
        return make_key(WHOLE, lambda: [text_of(frozen.graph), *forms_of(samples)], self._config)

    def look_up(self, key: str | None) -> bytes | None:
        """The record under ``key``."""
        return TRACES.look_up(self._config, key, lambda data: data, WHOLE)


def _key_of_kind(model: torch.nn.Module, config: Config) -> str | None:
    return make_key(WHOLE, lambda: [f"{n} {type(m)}" for n, m in model.named_modules()], config)


def value_facts(
    captured: Captured,
    config: Config,
    contents: WeightDigests,
    program: Program,
    kept: KeptResults | None = None,
) -> ObservedRuns:
    """The value facts of all samples and probes of ``captured``, whose graph is ``program``; ``kept`` keeps results
    if it runs."""
    kinds = {line.kind for line in program.lines}
    is_closed = all(kind.startswith(_OURS) for kind in kinds) and kinds.isdisjoint(_OTHERS)
    if not is_closed or not FACTS.is_on(config):
        return observe_runs(captured, program, kept)
    key = make_key(WHOLE, lambda: describe_module(captured, program, contents, values=True))
    values = list(program.values)  # in the order of the text, which is part of the key
    found = FACTS.look_up(config, key, lambda data: _decode_facts(data, values), WHOLE)
    if found is None:
        found = observe_runs(captured, program, kept)
        FACTS.keep(config, key, _encode_facts(found, values))
    return found


def _encode_facts(facts: ObservedRuns, values: list[int]) -> bytes:
    place = {value: k for k, value in enumerate(values)}
    different = {fact: None for seen in facts for each in seen.values() for fact in each}
    number = {fact: k for k, fact in enumerate(different)}
    runs = [[[place[v], [number[f] for f in each]] for v, each in seen.items()] for seen in facts]
    plain = [[f.sizes, str(f.dtype), str(f.device), f.order] for f in different]
    return json.dumps({"facts": plain, "runs": runs}).encode()


def _decode_facts(data: bytes, values: list[int]) -> ObservedRuns:
    head = json.loads(data)
    facts = [_fact(*one) for one in head["facts"]]
    return tuple(
        {values[k]: tuple(facts[i] for i in each) for k, each in run} for run in head["runs"]
    )


def _fact(sizes: list[int], dtype: str, device: str, order: list[int] | None) -> TensorMeta:
    kind: Any = getattr(torch, dtype.removeprefix("torch."))
    axes = None if order is None else tuple(order)
    return TensorMeta(tuple(sizes), kind, torch.device(device), axes)
