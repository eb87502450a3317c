# SPDX-License-Identifier: Apache-2.0
"""``blade.optimize``: the six stages in one direction.

    optimized = optimize(model, {"input_ids": ids, "attention_mask": mask})
    torch.jit.save(optimized, "model.pt")

capture -> support -> cluster and convert -> verify -> select -> splice and check. Stages hand on values;
everything decided against is a ``Reason`` in ``report(optimized)``.
"""

import logging
import platform
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import torch

from blade.cache import open_cache
from blade.capture.captured import Captured
from blade.capture.remembered import remember
from blade.capture.torchscript import capture
from blade.config import Config
from blade.errors import ConfigError
from blade.fallback.compile import Built, Partition, compile_clusters
from blade.fallback.compose import Choice, Confirmed, confirm, propose
from blade.fallback.metric import meet
from blade.fallback.select import Decision, select, weights_of
from blade.fallback.stored import keep
from blade.fallback.support import resolve, support
from blade.fallback.time_budget import TimeBudget
from blade.graph.listing import kind_of, list_nodes
from blade.graph.view import GraphView, view
from blade.precision import precision_of
from blade.progress import announce
from blade.reason import Reason
from blade.report import ATTRIBUTE, ORIGINAL, ClusterReport, LayerPrecision, Report, Tried, cpu_name
from blade.runtime.engine import Engine
from blade.version import __version__

log = logging.getLogger(__name__)


def optimize(
    model: torch.nn.Module, inputs: Any, config: Config | None = None
) -> torch.jit.ScriptModule:
    """A TorchScript module that answers like ``model`` and is faster where that was measured.

    ``model`` is a module in eval mode; it is copied, not changed. ``inputs`` is a tensor, a tuple of
    positional arguments, a dict of keyword arguments, or a list of such samples: where to measure.
    Other sizes work as well and need no recompilation. With ``Config(enable_int8=True)`` it may be any
    iterable of samples; of those of equal sizes the first is measured and the others calibrate.
    ``config`` defaults to the innermost active ``with Config(...)``, or to all defaults.

    Raises ``InputError`` for a model or inputs that cannot be used, ``ConfigError`` for a config that
    contradicts itself or the model, and ``BackendError`` if a backend named in the config cannot serve.
    """
    config = Config.current() if config is None else config
    if not isinstance(config, Config):
        raise ConfigError(f"config: a blade.Config is expected, got {type(config).__name__}")
    if config.enable_int8 and config.accuracy_budget.kind == "metric":
        return meet(config, lambda within, reasons: _optimize(model, inputs, within, reasons))
    return _optimize(model, inputs, config)


def _optimize(
    model: torch.nn.Module, inputs: Any, config: Config, known: Sequence[Reason] = ()
) -> torch.jit.ScriptModule:
    """The stages; ``known`` reasons are those of earlier attempts."""
    clock = _Clock()
    budget = TimeBudget(config.time_budget)
    with _torch_state_kept():
        with clock.stage("support"):
            backends, against = resolve(config)
        with clock.stage("capture"):
            captured = capture(model, inputs, config)
            _check_weights(captured, config)
        with clock.stage("support"):
            graph = view(captured)
            plan = support(graph.nodes, graph.pinned, backends, config)
        with clock.stage("convert"):
            partitions, failed = compile_clusters(
                captured, graph, plan.labels, backends, config, budget
            )
        with clock.stage("select"):
            decisions = _decide(partitions, config, budget)
        with clock.stage("splice"):
            names = [b.name for b in backends]
            compositions = propose(partitions, decisions, names)
            ranks = {name: i for i, name in enumerate(names)}
            made = confirm(captured, compositions, ranks, config, budget)
        reasons = (*known, *captured.reasons, *against, *plan.reasons, *failed, *made.reasons)
        report = _report(captured, graph, made, decisions, reasons, clock.seconds)
    if config.dump_dir is not None:
        _dump(config.dump_dir, captured, graph, made.module, report)
    made.module._c._register_attribute(ATTRIBUTE, torch._C.StringType.get(), report.to_json())
    for one in report.clusters:
        _log(one)
    return made.module


class _Clock:
    """Seconds per stage, in order of first use."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        announce(name)
        start = perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - start


@contextmanager
def _torch_state_kept() -> Iterator[None]:
    """Grad mode, inference mode, threads and random generators come out as they went in."""
    threads = torch.get_num_threads()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=devices), torch.inference_mode(False), torch.no_grad():
        try:
            yield
        finally:
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)


def _check_weights(captured: Captured, config: Config) -> None:
    given, count = config.sample_weights, len(captured.samples)
    if given is not None and len(given) != count:
        tuning = " and shapes of dynamic_tuning_shapes" if config.dynamic_tuning_shapes else ""
        raise ConfigError(
            f"Config.sample_weights has {len(given)} entries; there are {count} samples{tuning}."
        )


def _decide(
    partitions: Sequence[Partition], config: Config, budget: TimeBudget
) -> dict[str, Decision]:
    """By cluster, of all partitions."""
    cache = open_cache(config.cache)
    decisions: dict[str, Decision] = {}
    every = {one.name: one for p in partitions for one in p.built}
    for done, built in enumerate(every.values()):
        announce("select", done, len(every), built.name)
        decisions[built.name] = decision = _decide_one(built, config, budget)
        if cache is not None:
            for candidate in decision.tried:
                keep(cache, candidate)
    return decisions


def _decide_one(built: Built, config: Config, budget: TimeBudget) -> Decision:
    if built.extracted is None or not built.candidates:
        return Decision(None, ())
    cut, weights = built.extracted, weights_of(built.extracted, config)
    return select(built.name, cut.fallback, built.candidates, cut.samples, config, weights, budget)


def _report(
    captured: Captured,
    graph: GraphView,
    made: Confirmed,
    decisions: Mapping[str, Decision],
    reasons: Sequence[Reason],
    seconds: Mapping[str, float],
) -> Report:
    choices = made.composition.choices
    inside = {node for choice in choices for node in choice.built.group.nodes}
    outside = [n for i, n in enumerate(graph.nodes) if i not in inside]
    return Report(
        clusters=tuple(_cluster_report(graph, c, decisions[c.built.name]) for c in choices),
        reasons=(*reasons, *made.composition.reasons),
        outside=dict(Counter(map(kind_of, outside))),
        versions={
            "blade": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        cpu=cpu_name(),
        seconds=dict(seconds),
        nodes=list_nodes(graph, {c.built.name: c.built.group.nodes for c in choices}),
        inputs=remember(_names(captured), captured.samples),
        compositions=made.tried,
    )


def _names(captured: Captured) -> list[str]:
    """Of the graph's inputs: one per entry of a sample."""
    return [v.debugName() for v in captured.module.graph.inputs()][1:]


def _cluster_report(graph: GraphView, choice: Choice, decision: Decision) -> ClusterReport:
    built, served = choice.built, choice.served
    serving = served.backend.split("+") if served else []
    # of several by size, each is slower than another one somewhere
    lost = [r for r in decision.reasons if r.backend not in serving]
    reasons = (*built.reasons, *lost)
    return ClusterReport(
        name=built.name,
        ops=dict(Counter(kind_of(graph.nodes[n]) for n in built.group.nodes)),
        backend=served.backend if served else ORIGINAL,
        timings=served.timings if served else (),
        verdict=served.verdict if served else None,
        reasons=reasons,
        tried=_tried(built, decision, serving, reasons),
        sizes=str(choice.table) if choice.table else "",
        precision=_precision(served.engines if served else ()),
    )


def _tried(
    built: Built, decision: Decision, chosen: Sequence[str], reasons: Sequence[Reason]
) -> tuple[Tried, ...]:
    """Every backend that takes the cluster, in their order; unmeasured, those after the first that
    serves are not tried."""
    candidates = {c.backend: c for c in decision.tried}
    against = {r.backend: r for r in reasons}
    found = []
    for name in built.takers:
        one, reason = candidates.get(name), against.get(name)
        if one is not None:
            found.append(Tried(name, name in chosen, one.timings, one.verdict, reason))
        elif reason is not None:
            found.append(Tried(name, False, reason=reason))
    return tuple(found)


def _precision(engines: Sequence[torch.ScriptObject]) -> tuple[LayerPrecision, ...]:
    return tuple(one for e in engines for one in precision_of(cast(Engine, e).program()))


def _log(one: ClusterReport) -> None:
    speed = ", ".join(f"{t.speedup:.2f}x" for t in one.timings)
    log.info("%s: %s %s", one.name, one.backend, speed or "(not measured)")
    for reason in one.reasons:
        log.info("%s: not %s: %s", one.name, reason.backend, reason.detail)


def _dump(
    folder: Path,
    captured: Captured,
    graph: GraphView,
    optimized: torch.jit.ScriptModule,
    report: Report,
) -> None:
    """The graph before and after, the nodes as backends judged them, and the report."""
    folder.mkdir(parents=True, exist_ok=True)
    nodes = "\n".join(f"{i}\t{n.name}\t{n.target}\t{n.source}" for i, n in enumerate(graph.nodes))
    (folder / "01_captured.txt").write_text(str(captured.module.graph))
    (folder / "02_nodes.txt").write_text(nodes)
    (folder / "03_optimized.txt").write_text(str(optimized.graph))
    (folder / "report.txt").write_text(str(report))
    (folder / "report.json").write_text(report.to_json())
