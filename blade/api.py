# SPDX-License-Identifier: Apache-2.0
"""``blade.optimize``: the six stages in one direction.

    optimized = optimize(model, {"input_ids": ids, "attention_mask": mask})
    torch.jit.save(optimized, "model.pt")

capture -> support -> cluster and convert -> verify -> select -> splice and check. Stages hand on values;
everything decided against is a ``Reason`` in ``report(optimized)``.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from blade.backends.base import Backend
from blade.capture.captured import Captured
from blade.capture.remembered import remember
from blade.capture.torchscript import LookUp, capture
from blade.config import Config
from blade.errors import ConfigError
from blade.fallback.background import begin, start
from blade.fallback.compose import Confirmed
from blade.fallback.decided import Decided, decided_before, keep_decision, key_of
from blade.fallback.known_facts import facts_of
from blade.fallback.known_traces import look_up_trace
from blade.fallback.metric import meet
from blade.fallback.propose import WHOLE, Composition
from blade.fallback.search import Task, search
from blade.fallback.stored import Contents
from blade.fallback.support import Support, expect, resolve, support
from blade.fallback.time_budget import TimeBudget
from blade.garbage import rarely_collected
from blade.graph.listing import kind_of, list_nodes
from blade.graph.view import GraphView, view
from blade.hardware import cpu_name
from blade.progress import announce
from blade.reason import Code, Reason, Stage
from blade.report import ATTRIBUTE, SEARCHING, ClusterReport, Report, versions

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

    With ``Config(background=True)`` it returns after capture and clustering: the module runs the original, and
    each cluster's engine takes over once it is there (``blade.wait``, ``Report.state``). That search is narrower:
    one way to cut the graph, one engine a cluster, nothing bisected; and what it chose is not remembered as a
    whole, its engines are. Calls meanwhile run beside the conversions, and disturb the timing.
    """
    config = Config.current() if config is None else config
    if not isinstance(config, Config):
        raise ConfigError(f"config: a blade.Config is expected, got {type(config).__name__}")
    if config.reduces_precision and config.accuracy_budget.kind == "metric":
        return meet(config, lambda within, reasons: _optimize(model, inputs, within, reasons))
    return _optimize(model, inputs, config)


def _optimize(
    model: torch.nn.Module, inputs: Any, config: Config, known: Sequence[Reason] = ()
) -> torch.jit.ScriptModule:
    """The stages; ``known`` reasons are those of earlier attempts."""
    clock = _Clock()
    budget = TimeBudget(config.time_budget)
    with _torch_state_kept(), rarely_collected():
        with clock.stage("support"):
            backends, against = resolve(config)
            expect(model, backends)
        seen = _look(model, inputs, config, backends, clock, _look_up(config))
        if seen.decided is None and not seen.captured.is_compared:
            seen = _look(model, inputs, config, backends, clock)
        captured, graph, plan, decided = seen.captured, seen.graph, seen.plan, seen.decided
        known = (*known, *captured.reasons, *against, *plan.reasons)
        task = Task(captured, graph, plan.labels, backends, config, budget, seen.contents)
        if decided is None and config.background:
            if not any(reason.code is Code.RANDOM for reason in plan.reasons):
                return _in_background(task, known, clock)
            known = (*known, _FOREGROUND)
        if decided is None:
            decided = search(task, clock.stage)
            keep_decision(seen.key, decided, captured, config)
    module = decided.confirmed.module
    report = _report(task, decided, known, clock.seconds)
    module._c._register_attribute(ATTRIBUTE, torch._C.StringType.get(), report.to_json())
    _tell(task, module, report)
    return module


def _look_up(config: Config) -> LookUp | None:
    """``None`` where what is handed out is held to a budget, which says less of the graph it is made from."""
    return None if config.reduces_precision else partial(look_up_trace, config)


@dataclass(frozen=True)
class _Seen:
    """A model before anything is built, and what the cache has for it."""

    captured: Captured
    graph: GraphView
    plan: Support
    contents: Contents
    key: str | None
    decided: Decided | None


def _look(
    model: torch.nn.Module,
    inputs: Any,
    config: Config,
    backends: Sequence[Backend],
    clock: "_Clock",
    look_up: LookUp | None = None,
) -> _Seen:
    """``look_up`` as ``capture`` takes it."""
    contents = Contents()
    with clock.stage("capture"):
        captured = capture(model, inputs, config, look_up)
        _check_weights(captured, config)
    with clock.stage("support"):
        graph = view(captured, partial(facts_of, captured, config, contents))
        plan = support(graph.nodes, graph.pinned, backends, config)
    with clock.stage("convert"):
        key = key_of(captured, graph, backends, config, contents)
        decided = decided_before(key, captured, graph, config)
    return _Seen(captured, graph, plan, contents, key, decided)


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


_FOREGROUND = Reason(
    Stage.SELECT,
    Code.RANDOM,
    None,
    WHOLE,
    "Config.background=True has no effect on a model that draws from torch's random generators.",
)


def _in_background(task: Task, known: Sequence[Reason], clock: _Clock) -> torch.jit.ScriptModule:
    """The original in clusters; the report and what is kept follow when the engines are there."""
    module, waiting, task = begin(task)
    first = Decided(Confirmed(module, Composition(WHOLE, ())), (), ())
    report = replace(_report(task, first, known, clock.seconds), state=SEARCHING)
    module._c._register_attribute(ATTRIBUTE, torch._C.StringType.get(), report.to_json())

    def finish(found: Decided | Reason) -> None:
        if isinstance(found, Reason):
            decided = replace(first, reasons=(found,))
        else:
            decided = found
        report = _report(task, decided, known, clock.seconds)
        module._c.setattr(ATTRIBUTE, report.to_json())
        _tell(task, module, report)

    start(module, waiting, task, clock.stage, finish)
    return module


def _tell(task: Task, module: torch.jit.ScriptModule, report: Report) -> None:
    if task.config.dump_dir is not None:
        _dump(task.config.dump_dir, task.captured, task.graph, module, report)
    for one in report.clusters:
        _log(one)


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


def _report(
    task: Task, decided: Decided, known: Sequence[Reason], seconds: Mapping[str, float]
) -> Report:
    captured, graph = task.captured, task.graph
    members = {c.built.name: c.built.group.nodes for c in decided.confirmed.composition.choices}
    inside = {node for nodes in members.values() for node in nodes}
    outside = [n for i, n in enumerate(graph.nodes) if i not in inside]
    return Report(
        clusters=decided.clusters,
        reasons=(*known, *decided.reasons),
        outside=dict(Counter(map(kind_of, outside))),
        versions=versions(),
        cpu=cpu_name(),
        seconds=dict(seconds),
        nodes=list_nodes(graph, members),
        inputs=remember(_names(captured), captured.samples),
        compositions=decided.confirmed.tried,
    )


def _names(captured: Captured) -> list[str]:
    """Of the graph's inputs: one per entry of a sample."""
    return [v.debugName() for v in captured.module.graph.inputs()][1:]


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
