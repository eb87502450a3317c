# SPDX-License-Identifier: Apache-2.0
"""The optimized module with its report inside, log lines, and the files of ``Config.dump_dir``.

clusters = cluster_reports(task, confirmed, decisions)
optimized = wrap(task, decided)
"""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import cast

import torch

from blade.capture.input_summary import summarize_inputs
from blade.capture.reference_model import ReferenceModel
from blade.core.attempt import attempt
from blade.core.captured import Captured
from blade.core.disk_cache import untrusted
from blade.core.hardware import cpu_name
from blade.core.reason import Code, Reason, Stage
from blade.errors import ConfigError, warn_user
from blade.graph.torchscript.answer_by_original import answer_by_original
from blade.graph.torchscript.count_paths import count_paths
from blade.graph.torchscript.decision_checks import checks_of
from blade.graph.torchscript.listing import check_nodes, kind_of, list_nodes
from blade.graph.torchscript.splice import clone
from blade.graph.torchscript.view import GraphView
from blade.report import (
    ATTRIBUTE,
    ORIGINAL,
    READY,
    SEARCHING,
    ClusterReport,
    KernelTime,
    LayerPrecision,
    Report,
    Tried,
    versions,
)
from blade.report.layer_notes import left_targets_of, precision_of
from blade.runtime.engine import Engine
from blade.runtime.originals import give_up_paths, register
from blade.selection.cache.decisions import SelectionResult
from blade.selection.kernel_times import kernel_times
from blade.selection.lent_original import LentOriginal
from blade.selection.plan.assemble import ValidatedPlan
from blade.selection.plan.built import ClusterCandidates
from blade.selection.plan.compositions import ClusterChoice
from blade.selection.plan.labels import add_labels, set_report
from blade.selection.plan.select import Decision
from blade.selection.precision_gains import precision_gains
from blade.selection.task import Task

log = logging.getLogger(__name__)


def make_dump_dir(folder: Path | None) -> None:
    """Make the folder that ``Config.dump_dir`` names, before anything takes long.

    Raises ``ConfigError`` if it cannot be written.
    """
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"dump_dir: {str(folder)!r} cannot be written ({error.strerror}). Name a folder that this process "
            "may write, or leave dump_dir out."
        ) from error


def wrap(task: Task, decided: SelectionResult) -> torch.jit.ScriptModule:
    """Return the chosen module, with its report inside."""
    module = _answering(decided.confirmed.module, task.captured)
    _lend_original(task.captured, module)
    report = _report(task, decided, READY)
    _attach(task, module, report)
    torch.ops.blade.reset_path_calls(task.captured.paths_number)  # trials were counted
    _tell(task, module, report)
    return module


def wrap_early(task: Task, decided: SelectionResult) -> torch.jit.ScriptModule:
    """Return the interim module of a search that continues: the report says so, and nothing is logged yet."""
    module = decided.confirmed.module
    _lend_original(task.captured, module)
    report = _report(task, decided, SEARCHING)
    _attach(task, module, report)
    return module


def _attach(task: Task, module: torch.jit.ScriptModule, report: Report) -> None:
    """Give ``module`` its report; what ran without engines has no labels yet."""
    if not module._c.hasattr(ATTRIBUTE):
        add_labels(module, task.captured)
    set_report(module, report)


def _answering(module: torch.jit.ScriptModule, captured: Captured) -> torch.jit.ScriptModule:
    """``module``, or a copy whose failing checks ask the original, if it is the captured one, without engines."""
    if next(checks_of(module.graph), None) is None:
        return module
    again = clone(module)
    answer_by_original(again.graph, captured.original_number)
    count_paths(again.graph, captured.paths_number, captured.ends)
    return again


def _lend_original(captured: Captured, module: torch.jit.ScriptModule) -> None:
    """Let the original answer where no path of ``module`` does, as long as ``module`` lives.

    Where no path answers a sample, such as by an element that every way to compute it rounds otherwise, it answers all
    calls at once.
    """
    original = captured.original
    if captured.original_number and isinstance(original, ReferenceModel):
        number = captured.original_number
        register(number, module, LentOriginal(number, original, captured.references))
        if not captured.samples:
            give_up_paths(number)


def wrap_again(module: torch.jit.ScriptModule, task: Task, decided: SelectionResult) -> None:
    """Replace the report of ``module`` once its engines are in place."""
    report = _report(task, decided, READY)
    set_report(module, report)
    torch.ops.blade.reset_path_calls(task.captured.paths_number)
    _tell(task, module, report)


def cluster_reports(
    task: Task, confirmed: ValidatedPlan, decisions: Mapping[str, Decision]
) -> tuple[ClusterReport, ...]:
    """Reports of the clusters of the confirmed plan."""
    choices = confirmed.composition.choices
    return tuple(_cluster_report(task, c, decisions[c.built.name]) for c in choices)


def _report(task: Task, decided: SelectionResult, state: str) -> Report:
    captured, graph = task.captured, task.graph
    members = {c.built.name: c.built.group.nodes for c in decided.confirmed.composition.choices}
    inside = {node for nodes in members.values() for node in nodes}
    checks = check_nodes(graph)
    outside = [n for i, n in enumerate(graph.nodes) if i not in inside and i not in checks]
    names = {graph.nodes[node].name for node in checks}
    reasons = [one for one in task.reasons if one.subject not in names]
    return Report(
        clusters=decided.clusters,
        reasons=(*reasons, *decided.reasons, *untrusted(task.config.cache)),
        outside=dict(Counter(map(kind_of, outside))),
        versions=versions(),
        cpu=cpu_name(),
        seconds=dict(task.clock.seconds),
        nodes=list_nodes(graph, members),
        inputs=summarize_inputs(_names(captured), captured.samples),
        compositions=decided.confirmed.tried,
        state=state,
        model=captured.original.name if isinstance(captured.original, ReferenceModel) else "",
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        paths=tuple(one.conditions for one in captured.paths),
        gains=precision_gains(decided.clusters, task.config),
    )


def _names(captured: Captured) -> list[str]:
    """Names of the graph's inputs: one per entry of a sample."""
    return [v.debugName() for v in captured.module.graph.inputs()][1:]


def _cluster_report(task: Task, choice: ClusterChoice, decision: Decision) -> ClusterReport:
    graph, built, served = task.graph, choice.built, choice.served
    serving = served.backend.split("+") if served else []
    # of several engines by size, each is slower than another one somewhere
    lost = [r for r in decision.reasons if r.backend not in serving]
    reasons = (*built.reasons, *lost)
    return ClusterReport(
        name=built.name,
        ops=dict(Counter(kind_of(graph.nodes[n]) for n in built.group.nodes)),
        backend=served.backend if served else ORIGINAL,
        timings=served.timings if served else (),
        verdict=served.verdict if served else None,
        reasons=(*reasons, *_left_targets(built.name, served.engines if served else ())),
        tried=_tried(built, decision, serving, reasons),
        sizes=str(choice.table) if choice.table else "",
        precision=_precision(served.engines if served else ()),
        kernels=_kernels(task, choice),
    )


def _tried(
    built: ClusterCandidates, decision: Decision, chosen: Sequence[str], reasons: Sequence[Reason]
) -> tuple[Tried, ...]:
    """Every backend that takes the cluster, in their order; without timing, backends after the first that
    serves are not tried."""
    candidates = {c.backend: c for c in decision.tried}
    against = {r.backend: r for r in reasons}
    found = []
    for name in built.eligible:
        one, reason = candidates.get(name), against.get(name)
        if one is not None:
            found.append(Tried(name, name in chosen, one.timings, one.verdict, reason))
        elif reason is not None:
            found.append(Tried(name, False, reason=reason))
    return tuple(found)


def _precision(engines: Sequence[torch.ScriptObject]) -> tuple[LayerPrecision, ...]:
    return tuple(one for e in engines for one in precision_of(cast(Engine, e).program()))


def _left_targets(cluster: str, engines: Sequence[torch.ScriptObject]) -> Iterator[Reason]:
    """Why engines have no code for some of ``Config.gpu_targets``."""
    for engine in (cast(Engine, e) for e in engines):
        for name, why in left_targets_of(engine.program()).items():
            text = f"It has no code for {name}, where the original runs: {why}"
            yield Reason(Stage.CONVERT, Code.CONVERSION_FAILED, engine.backend(), cluster, text)


def _kernels(task: Task, choice: ClusterChoice) -> tuple[KernelTime, ...]:
    """Times of the cluster's kernels; empty if timing is off or no time is left."""
    served, cut = choice.served, choice.built.extracted
    if not task.config.timing or not task.budget.left() or served is None or cut is None:
        return ()
    return tuple(one for e in served.engines for one in kernel_times(e, cut.samples))


def _tell(task: Task, module: torch.jit.ScriptModule, report: Report) -> None:
    if task.config.dump_dir is not None:
        dump = partial(_dump, task.config.dump_dir, task.captured, task.graph, module, report)
        failed = attempt(Stage.SELECT, None, "dump_dir", dump)
        if isinstance(failed, Reason):
            warn_user(f"dump_dir: not every file was written: {failed.detail}")
    for one in report.clusters:
        _log(one)


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
    """Write the graph before and after, the support of each node, and the report."""
    folder.mkdir(parents=True, exist_ok=True)
    nodes = "\n".join(f"{i}\t{n.name}\t{n.target}\t{n.source}" for i, n in enumerate(graph.nodes))
    (folder / "01_captured.txt").write_text(str(captured.module.graph))
    (folder / "02_nodes.txt").write_text(nodes)
    (folder / "03_optimized.txt").write_text(str(optimized.graph))
    (folder / "report.txt").write_text(report.explain())
    (folder / "report.json").write_text(report.to_json())
