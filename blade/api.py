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
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from blade.backends.base import Backend
from blade.cache import open_cache
from blade.capture.captured import Captured
from blade.capture.compare import find_differences
from blade.capture.torchscript import capture
from blade.config import Config
from blade.errors import BackendError, ConfigError
from blade.fallback.attempt import attempt
from blade.fallback.compile import Built, compile_clusters
from blade.fallback.select import Decision, select
from blade.fallback.stored import keep
from blade.fallback.support import kind_of, resolve, support
from blade.graph.splice import splice
from blade.graph.view import GraphView, view
from blade.reason import Code, Reason, Stage
from blade.report import ATTRIBUTE, ORIGINAL, ClusterReport, Report, cpu_name
from blade.runtime.engine import renew
from blade.version import __version__

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Choice:
    """A cluster and who serves it."""

    built: Built
    decision: Decision


def optimize(
    model: torch.nn.Module, inputs: Any, config: Config | None = None
) -> torch.jit.ScriptModule:
    """A TorchScript module that answers like ``model`` and is faster where that was measured.

    ``model`` is a module in eval mode; it is copied, not changed. ``inputs`` is a tensor, a tuple of
    positional arguments, a dict of keyword arguments, or a list of such samples: where to measure.
    Other sizes work as well and need no recompilation. ``config`` defaults to the innermost active
    ``with Config(...)``, or to all defaults.

    Raises ``InputError`` for a model or inputs that cannot be used, ``ConfigError`` for a config that
    contradicts itself or the model, and ``BackendError`` if a backend named in the config cannot serve.
    """
    config = Config.current() if config is None else config
    if not isinstance(config, Config):
        raise ConfigError(f"config: a blade.Config is expected, got {type(config).__name__}")
    clock = _Clock()
    with _torch_state_kept():
        with clock.stage("support"):
            backends, against = resolve(config)
        with clock.stage("capture"):
            captured = capture(model, inputs, config)
        with clock.stage("support"):
            graph = view(captured)
            plan = support(graph.nodes, graph.pinned, backends, config)
        with clock.stage("convert"):
            built, failed = compile_clusters(captured, graph, plan.labels, backends, config)
        with clock.stage("select"):
            choices = [_choose(one, config) for one in built]
        with clock.stage("splice"):
            optimized, choices, wrong = _splice(captured, choices, config)
        reasons = (*captured.reasons, *against, *plan.reasons, *failed, *wrong)
        report = _report(graph, choices, reasons, backends, clock.seconds)
    if config.dump_dir is not None:
        _dump(config.dump_dir, captured, graph, optimized, report)
    optimized._c._register_attribute(ATTRIBUTE, torch._C.StringType.get(), report.to_json())
    for choice in choices:
        _log(choice)
    return optimized


class _Clock:
    """Seconds per stage, in order of first use."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
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


def _choose(built: Built, config: Config) -> _Choice:
    if built.extracted is None or not built.candidates:
        return _Choice(built, Decision(None, ()))
    fallback, samples = built.extracted.fallback, built.extracted.samples
    decision = select(built.name, fallback, built.candidates, samples, config)
    if (cache := open_cache(config.cache)) is not None:
        for candidate in decision.tried:
            keep(cache, candidate)
    return _Choice(built, decision)


def _splice(
    captured: Captured, choices: list[_Choice], config: Config
) -> tuple[torch.jit.ScriptModule, list[_Choice], tuple[Reason, ...]]:
    """The whole module, if it answers as the user's model does; else the captured one as it was."""
    placed = [
        (choice.built.extracted, choice.decision.chosen.module)
        for choice in choices
        if choice.built.extracted is not None and choice.decision.chosen is not None
    ]
    if not placed:
        return captured.module, choices, ()

    def whole() -> torch.jit.ScriptModule:
        module = splice(captured, placed)
        if (sentence := _why_different(captured, module)) is not None:
            raise BackendError(sentence)
        for choice in choices:
            if choice.decision.chosen is not None:
                renew(choice.decision.chosen.engine)
        return module

    result = attempt(
        Stage.VERIFY, None, "the whole module", whole, config.strict, Code.WRONG_VALUES
    )
    if not isinstance(result, Reason):
        return result, choices, ()
    log.warning("the optimized module is not used: %s", result.detail)
    return captured.module, [replace(c, decision=Decision(None, ())) for c in choices], (result,)


def _why_different(captured: Captured, module: torch.jit.ScriptModule) -> str | None:
    """How ``module`` differs from the user's model at any sizes it was run at, ``None`` if nowhere.

    The clusters were verified far more tightly; this is about how they were put together.
    """
    for one, why in find_differences(module, captured.references):
        return f"put together, at {one.what} the module differs from the original: {why}"
    return None


def _report(
    graph: GraphView,
    choices: Sequence[_Choice],
    reasons: Sequence[Reason],
    backends: Sequence[Backend],
    seconds: Mapping[str, float],
) -> Report:
    inside = {node for choice in choices for node in choice.built.group.nodes}
    outside = [n for i, n in enumerate(graph.nodes) if i not in inside]
    return Report(
        clusters=tuple(_cluster_report(graph, choice) for choice in choices),
        reasons=tuple(reasons),
        outside=dict(Counter(map(kind_of, outside))),
        versions={
            "blade": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        cpu=cpu_name(),
        seconds=dict(seconds),
    )


def _cluster_report(graph: GraphView, choice: _Choice) -> ClusterReport:
    built, chosen = choice.built, choice.decision.chosen
    return ClusterReport(
        name=built.name,
        ops=dict(Counter(kind_of(graph.nodes[n]) for n in built.group.nodes)),
        backend=chosen.backend if chosen else ORIGINAL,
        timings=chosen.timings if chosen else (),
        verdict=chosen.verdict if chosen else None,
        reasons=(*built.reasons, *choice.decision.reasons),
    )


def _log(choice: _Choice) -> None:
    name, chosen = choice.built.name, choice.decision.chosen
    speed = ", ".join(f"{t.speedup:.2f}x" for t in chosen.timings) if chosen else ""
    log.info("%s: %s %s", name, chosen.backend if chosen else ORIGINAL, speed or "(not measured)")
    for reason in choice.decision.reasons:
        log.info("%s: not %s: %s", name, reason.backend, reason.detail)


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
