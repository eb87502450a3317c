# SPDX-License-Identifier: Apache-2.0
"""``blade.optimize``: the stages from top to bottom.

    optimized = optimize(model, {"input_ids": ids, "attention_mask": mask})
    torch.jit.save(optimized, "model.pt")

``_optimize`` captures the model and asks the backends for support; ``_search`` clusters the graph, converts
and verifies the clusters, selects engines by their speed and splices them in. Stages pass values on; every
decision against something is a ``Reason`` in ``report(optimized)``. ``recalled`` and ``cached`` are the cache
around the stages, ``in_background`` runs the search in a thread.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.export import ExportedProgram

from blade.capture.candidate import KnownTraces
from blade.capture.capture import capture
from blade.capture.samples import weighted
from blade.config import Config
from blade.core.reason import Reason
from blade.errors import ConfigError
from blade.graph.torchscript.boundary_samples import BoundarySamples
from blade.graph.torchscript.view import view
from blade.importers.entrance import import_foreign, is_foreign
from blade.partition.support import resolve, warm_up
from blade.process.gc_pause import relaxed_gc
from blade.process.memory import give_memory_back
from blade.process.torch_state import generators_left_alone, torch_state_kept
from blade.selection.background import in_background
from blade.selection.cache.decisions import SelectionResult, value_facts
from blade.selection.cache.fingerprint import WeightDigests
from blade.selection.cached import cached, recalled
from blade.selection.candidate_builder import CandidateBuilder
from blade.selection.first_round import first_round
from blade.selection.forecast.forecast import worth_trying
from blade.selection.forecast.records import learn_speeds
from blade.selection.learn_paths import learn_paths
from blade.selection.metric_budget import optimize_within_metric
from blade.selection.partitions import (
    Labels,
    cluster_graph,
    convert_and_verify_clusters,
    without_failing_nodes,
)
from blade.selection.plan.assemble import fastest_valid_plan
from blade.selection.plan.built import Partition
from blade.selection.plan.compositions import candidate_plans
from blade.selection.plan.labels import name_outputs
from blade.selection.plan.select import check_weights
from blade.selection.reporting import cluster_reports, make_dump_dir, wrap
from blade.selection.select_engines import (
    cut_short,
    select_engines,
    without_candidates,
)
from blade.selection.task import Task
from blade.selection.widen import search_as_wide_as_needed
from blade.timing.stage_clock import StageClock
from blade.timing.time_budget import TimeBudget


def optimize(
    model: Any, inputs: Any = None, config: Config | None = None
) -> torch.jit.ScriptModule:
    """Return a TorchScript module that answers like ``model`` and is faster where that was measured.

    ``model`` is a module in eval mode, or what ``torch.export.export`` made of one; it is copied, not
    changed. Or it is the path of an ONNX model, a ``ModelProto``, the path of a SavedModel or of a Keras file,
    or a Keras model. ``inputs`` is a tensor, a tuple of positional arguments, a dict of keyword arguments, or a
    list of such samples, at which engines are verified and timed (of ``blade.record``, with how often each was
    seen as its weight); by default, the example inputs of an exported program, or random ones if an ONNX model
    has fixed sizes. Other sizes work as well and need no recompilation; an exported program raises at those that it
    was not exported for. With ``Config(enable_int8=True)`` ``inputs`` may be any iterable of samples; of
    those of equal sizes the first is timed and the others calibrate.
    ``config`` defaults to the innermost active ``with Config(...)``, or to all defaults.

    Raises ``InputError`` for a model or inputs that cannot be used, ``ConfigError`` for a config that
    contradicts itself or the model, and ``BackendError`` if a backend named in the config cannot serve.

    With ``Config(background=True)`` it returns after capture and clustering: the module runs the original,
    and each cluster's engine takes over when it is ready (``blade.wait``, ``Report.state``). That search is
    narrower: one partition, one engine per cluster, no bisection. The decision is not cached, but its engines
    are. Calls during the search compete with the conversions and disturb the timing.
    """
    config = Config.current() if config is None else config
    if not isinstance(config, Config):
        raise ConfigError(f"config: a blade.Config is expected, got {type(config).__name__}")
    if is_foreign(model):
        foreign = import_foreign(model, inputs)
        module = _optimize_within(foreign.module, foreign.inputs, config, foreign.reasons)
        name_outputs(module, foreign.structure)
        return module
    return _optimize_within(model, inputs, config)


def _optimize_within(
    model: torch.nn.Module | ExportedProgram,
    inputs: Any,
    config: Config,
    earlier: Sequence[Reason] = (),
) -> torch.jit.ScriptModule:
    """``_optimize``, as often as a metric of the user's asks for."""
    try:
        if config.reduces_precision and config.accuracy_budget.kind == "metric":
            return optimize_within_metric(
                config, lambda within, found: _optimize(model, inputs, within, (*earlier, *found))
            )
        return _optimize(model, inputs, config, earlier)
    finally:
        give_memory_back()


def _optimize(
    model: torch.nn.Module | ExportedProgram,
    inputs: Any,
    config: Config,
    earlier: Sequence[Reason] = (),
) -> torch.jit.ScriptModule:
    """Capture, support, search, wrap; ``earlier`` are the reasons of earlier attempts."""
    make_dump_dir(config.dump_dir)
    clock, budget = StageClock(), TimeBudget(config.time_budget)
    with torch_state_kept(), relaxed_gc():
        with clock.stage("support"):
            backends, unusable = resolve(config)
            warm_up(model, backends)

        def prepare(known: KnownTraces | None) -> Task:
            digests = WeightDigests()
            captured = clock.timed("capture", capture)(model, inputs, config, known, budget)
            own = weighted(inputs, len(captured.samples), config)
            check_weights(captured, own)
            with clock.stage("support"):
                graph = view(captured, partial(value_facts, captured, own, digests))
                worth, plan, unlikely = worth_trying(graph, backends, own)
            reasons = (*earlier, *captured.reasons, *unusable, *unlikely, *plan.reasons)
            left_out = tuple(b for b in backends if b not in worth)
            task = Task(captured, graph, plan, worth, own, budget, clock, reasons, digests)
            return replace(task, left_out=left_out)

        task = recalled(prepare, config)
        if config.background:
            module = in_background(cached(_search), task)
        else:
            module = wrap(*search_as_wide_as_needed(task, cached(_search)))
    if config.background_paths:
        optimize_again = _optimize if task.draws else _optimize_drawing_none
        learn_paths(module, task.captured, optimize_again, config)
    return module


def _optimize_drawing_none(
    model: torch.nn.Module, inputs: Any, config: Config
) -> torch.jit.ScriptModule:
    """``_optimize`` for a model that draws no numbers, while the program may."""
    with generators_left_alone():
        return _optimize(model, inputs, config)


def _search(task: Task) -> SelectionResult:
    """Cluster, convert, verify, select, splice: return the fastest module that answers like the model."""
    config, clock, budget = task.config, task.clock, task.budget
    partitions, against = _build_engines(task)
    with clock.stage("select"):
        builts = [one for p in partitions for one in p.built]
        decisions = select_engines(task, builts)
    late = cut_short(partitions, decisions, budget)
    tried = [b.name.lower() for b in task.backends]
    learn_speeds(task.graph, task.plan, tried, config, builts, decisions)
    partitions = [without_candidates(one) for one in partitions]  # frees every engine that lost
    with clock.stage("splice"):
        names = [b.name for b in task.backends]
        compositions = candidate_plans(partitions, decisions, names, config)
        confirmed = fastest_valid_plan(
            task.captured, compositions, names, config, budget, not task.fixed
        )
    clusters = cluster_reports(task, confirmed, decisions)
    reasons = (*against, *late, *confirmed.reasons, *confirmed.composition.reasons)
    return SelectionResult(confirmed, clusters, reasons, is_cut_short=bool(late))


def _build_engines(task: Task) -> tuple[list[Partition], list[Reason]]:
    """Cluster, convert, verify. Groups that no backend can build are bisected, and the rest is built again.

    A cluster is verified as soon as it is converted, while others convert.
    """
    builder = CandidateBuilder(
        task.captured,
        task.graph,
        task.backends,
        task.config,
        task.samples or BoundarySamples(task.captured, task.graph),
        task.budget,
        task.contents,
    )
    slow, eliminated = first_round(task, builder)

    def build(labels: Labels) -> list[Partition]:
        clusters = cluster_graph(builder, labels, slow, task.fixed)
        return convert_and_verify_clusters(builder, clusters)

    with task.clock.stage("convert"):
        partitions, culprits = without_failing_nodes(builder, task.plan.labels, build, task.fixed)
    return partitions, [*eliminated, *culprits]
