# SPDX-License-Identifier: Apache-2.0
"""Reports on what blade did to a model and why: they print, convert to JSON, and are in the saved file.

print(report(optimized))            # one sentence, a table of clusters, why not each other backend
print(report(optimized).explain())  # everything: layers, kernels, every reason
Report.from_json(text) == Report.from_json(text).to_json()
stats(optimized)["cluster_0"]       # live counters of one engine: {"calls": 8, "engine_runs": 7, ...}
rearm(optimized)                    # engines that the circuit breaker stopped are tried again
"""

import json
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import torch

from blade.core import learned_calls
from blade.core.hardware import gpu_name
from blade.core.reason import Code, Reason, Stage
from blade.errors import InputError
from blade.report.graph import (
    InputReport,
    NodeReport,
    inputs_from,
    nodes_from,
)
from blade.version import __version__

# Attribute of an optimized module with its report as JSON text.
ATTRIBUTE = "blade_report"
# Attribute with the structure of the original's output, if it has one that TorchScript has not.
STRUCTURE = "blade_structure"
# Attribute with the dtypes and sizes of the samples (core/examples.py).
EXAMPLES = "blade_examples"
# Attribute of what blade.accelerate returns: an object with report, stats, wait and rearm.
DROP_IN = "_blade_state"
ENGINES = (
    "engine",
    "engine_1",
    "engine_2",
)  # attributes of a cluster: one per engine, in this order
READY, SEARCHING = "ready", "searching"
ORIGINAL = "torchscript"  # the original's name wherever a backend's name is expected

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Timing:
    """Medians in milliseconds at one sample of the user.

    ``spread``: likely relative error of their ratio (0.05 = 5%). ``below`` and ``above``: how much lower and
    higher the speed-up may be; the larger one is ``spread``. ``original_ms``: the captured model as
    TorchScript; ``eager_ms``: the user's module called from Python. Other processes disturbed ``disturbed`` of
    the ``rounds``; these do not count, unless too few others are left.
    """

    shapes: tuple[Shape, ...]
    original_ms: float
    engine_ms: float
    spread: float
    below: float | None = None  # ``None``: equal to ``spread``
    eager_ms: float | None = None  # ``None``: not measured
    above: float | None = None  # ``None``: equal to ``spread``
    rounds: int = 0  # 0: unknown
    disturbed: int = 0

    @property
    def speedup(self) -> float:
        return self.original_ms / self.engine_ms

    @property
    def shortfall(self) -> float:
        """``below``, or ``spread`` if that is unknown."""
        return self.spread if self.below is None else self.below

    @property
    def excess(self) -> float:
        """``above``, or ``spread`` if that is unknown."""
        return self.spread if self.above is None else self.above

    @property
    def low(self) -> float:
        """The least speed-up that the rounds allow."""
        return self.speedup / (1 + self.shortfall)

    @property
    def high(self) -> float:
        """The largest speed-up that the rounds allow."""
        return self.speedup * (1 + self.excess)


@dataclass(frozen=True)
class Verdict:
    """The result of verifying an engine: number of cases, and errors.

    Errors are relative to the largest magnitude of the tensor. ``error_fp64`` and ``original_error_fp64`` are
    the errors of the engine and of the original against the fp64 reference; ``None`` if the cluster cannot
    run in fp64.
    """

    checked: int
    refused: int
    error: float
    error_fp64: float | None = None
    original_error_fp64: float | None = None


@dataclass(frozen=True)
class Tried:
    """The result of one backend at one cluster. ``reason`` says why it does not serve, if so."""

    backend: str
    chosen: bool
    timings: tuple[Timing, ...] = ()
    verdict: Verdict | None = None
    reason: Reason | None = None


@dataclass(frozen=True)
class LayerPrecision:
    """The precision of one layer of a quantized cluster, and why.

    ``error`` is the relative error of the cluster's outputs if only this layer is quantized, ``saved_ms`` the
    time that it saves at the first sample; ``None``: not measured. ``why``: why not in 8 bits.
    """

    layer: str
    op: str
    precision: str
    error: float | None = None
    saved_ms: float | None = None
    why: str = ""


@dataclass(frozen=True)
class KernelTime:
    """One kernel or library call of a DISC engine, and the milliseconds of all its ``calls`` at each sample.

    ``ops`` are the ops it computes; "" if its name tells.
    """

    name: str
    calls: int
    ms: tuple[float, ...]
    ops: str = ""


@dataclass(frozen=True)
class ClusterReport:
    """One cluster: its ops, backend, timings and verdict, and why no other backend serves."""

    name: str
    ops: Mapping[str, int]
    backend: str
    timings: tuple[Timing, ...] = ()
    verdict: Verdict | None = None
    reasons: tuple[Reason, ...] = ()
    tried: tuple[Tried, ...] = ()
    sizes: str = ""  # which of several backends serves which sizes
    precision: tuple[LayerPrecision, ...] = ()
    kernels: tuple[KernelTime, ...] = ()  # of an engine of DISC, where they were measured


@dataclass(frozen=True)
class Composed:
    """One engine plan: the engine of each cluster (by name), and the timings of the whole module against the
    original, one per sample of the user."""

    name: str
    engines: Mapping[str, str]
    timings: tuple[Timing, ...]
    chosen: bool


@dataclass(frozen=True)
class Report:
    """The report of ``optimize`` on one model; ``str()`` is a summary, ``explain()`` everything as text.

    ``reasons``: those that concern no cluster. ``outside``: number of ops outside of clusters, by kind.
    ``versions`` and ``cpu``: of the machine that optimized. ``seconds``: per stage of ``optimize``.
    ``nodes``: the ops of the whole model, in program order. ``inputs``: a summary of each sample.
    ``compositions``: all engine plans that were measured as a whole. ``state`` is ``SEARCHING`` while engines
    are made in the background. ``model``: name of the model's class. ``date``: when it was optimized (UTC).
    Both are "" in files that lack them. ``paths``: the conditions under which each captured path answers.
    ``gains``: a sentence on what lower precisions would gain, or "".
    """

    clusters: tuple[ClusterReport, ...] = ()
    reasons: tuple[Reason, ...] = ()
    outside: Mapping[str, int] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    cpu: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)
    nodes: tuple[NodeReport, ...] = ()
    inputs: tuple[tuple[InputReport, ...], ...] = ()
    compositions: tuple[Composed, ...] = ()
    state: str = READY
    model: str = ""
    date: str = ""
    paths: tuple[tuple[str, ...], ...] = ()
    gains: str = ""

    @property
    def timings(self) -> tuple[Timing, ...]:
        """Timings of the whole module as it was returned; empty if it was not measured."""
        return next((one.timings for one in self.compositions if one.chosen), ())

    def all_reasons(self) -> tuple[Reason, ...]:
        """The reasons of the model and of every cluster."""
        return (*self.reasons, *(r for c in self.clusters for r in c.reasons))

    def to_json(self) -> str:
        """The report as one JSON object, which ``from_json`` reads."""
        return json.dumps(asdict(self), allow_nan=False)

    @staticmethod
    def from_json(text: str) -> "Report":
        """The inverse of ``to_json``; ``ValueError`` on anything else."""
        try:
            data = json.loads(text)
            clusters = tuple(_cluster(one) for one in data.pop("clusters"))
            nodes, inputs = nodes_from(data.pop("nodes", ())), inputs_from(data.pop("inputs", ()))
            whole = _compositions(data.pop("compositions", ()))
            reasons = _reasons(data.pop("reasons"))
            data["paths"] = tuple(tuple(map(str, one)) for one in data.get("paths", ()))
            return Report(clusters, reasons, **data, nodes=nodes, inputs=inputs, compositions=whole)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a report of blade: {error!r}") from error

    def to_html(self) -> str:
        """One self-contained page: the graph by backend, times, speed-up by size, every reason."""
        from blade.report.html import render  # late: few callers want a page
        from blade.report.text import summary  # late: that module imports this one

        return render(self.to_json(), self.model, self.date, summary(self))

    def __str__(self) -> str:
        from blade.report.text import render_text  # as above

        return render_text(self)

    def explain(self) -> str:
        """Everything as text: each cluster, layer and kernel, every reason, how it was built."""
        from blade.report.text import render_all  # as above

        return render_all(self)


def report(optimized: torch.nn.Module) -> Report:
    """The report of a module that ``blade.optimize`` or ``blade.accelerate`` returned, also after it was saved and
    loaded; of the latter, that of the optimized module which answers most calls.

    Raises ``InputError`` for any other object, and ``ValueError`` for a report that this version cannot read.
    """
    if (drop_in := drop_in_state(optimized)) is not None:
        return cast(Report, drop_in.report())
    text = getattr(optimized, ATTRIBUTE, None)
    if not isinstance(optimized, torch.jit.ScriptModule) or not isinstance(text, str):
        raise InputError(
            f"optimized: a module returned by blade.optimize (or loaded from its file) is expected, "
            f"but this {type(optimized).__name__} carries no report"
        )
    return Report.from_json(text)


def stats(optimized: torch.nn.Module) -> dict[str, dict[str, int]]:
    """Run-time counters per engine: calls, engine runs, and fallbacks by ``Code``.

    "path 1" and so on have the calls that each of several captured paths answered, in the order of the report;
    "learned" has those that a path answered which ``Config.background_paths`` captured later, and "original" those
    that none answered, and the original model did, if there were any. Of what ``blade.accelerate`` returned,
    "call 1" and so on are the optimized modules, the most called first, and their engines "call 1: cluster_0".
    Raises ``InputError`` for anything but an optimized module.
    """
    if (drop_in := drop_in_state(optimized)) is not None:
        return cast(dict[str, dict[str, int]], drop_in.stats())
    found = {name: dict(engine.stats()) for name, engine in engines_of(optimized)}
    graph: Any = optimized.graph
    asked = {
        int(node.inputsAt(1).toIValue())
        for node in graph.findAllNodes("blade::answer_by_original", True)
    }
    for node in graph.findAllNodes("blade::count_path", True):
        number, path = (int(value.toIValue()) for value in node.inputs())
        found[f"path {path + 1}"] = {"calls": torch.ops.blade.path_calls(number, path)}
    learned = sum(map(learned_calls.calls_of, asked))
    if learned:
        found["learned"] = {"calls": learned}
    calls = sum(map(torch.ops.blade.original_calls, asked)) - learned
    return {**found, "original": {"calls": calls}} if calls else found


def rearm(optimized: torch.nn.Module) -> None:
    """Reset the circuit breakers: every engine that stopped after ``Config.max_failures`` failures in a row,
    or because its backend failed to load, is tried again. Counters stay.

    Raises ``InputError`` for anything but an optimized module.
    """
    if (drop_in := drop_in_state(optimized)) is not None:
        drop_in.rearm()
        return
    for _, engine in engines_of(optimized):
        engine.rearm()


def drop_in_state(module: Any) -> Any | None:
    """What answers the calls of ``module`` if ``blade.accelerate`` made it, else ``None``."""
    return vars(module).get(DROP_IN) if hasattr(module, "__dict__") else None


def engines_of(optimized: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Name and engine of each cluster that has one; with size dispatch a second is "cluster_0/onnxruntime"."""
    report(optimized)
    for name, module in optimized.named_modules():
        for attribute in ENGINES:
            found = getattr(module, attribute, None)
            if isinstance(found, torch.ScriptObject):
                engine: Any = found
                yield name if attribute == ENGINES[0] else f"{name}/{engine.backend()}", engine


def shape_text(shapes: Iterable[Sequence[int]]) -> str:
    """``1x16 ()`` for a matrix and a scalar."""
    return " ".join("x".join(map(str, shape)) or "()" for shape in shapes)


def versions() -> dict[str, str]:
    """The versions that a report contains."""
    gpu = gpu_name()
    return {
        "blade": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        **({"gpu": gpu} if gpu else {}),
    }


def _cluster(data: dict[str, Any]) -> ClusterReport:
    tried = tuple(
        Tried(**{**one, **_measured(one), "reason": next(iter(_reasons([one["reason"]])), None)})
        for one in data.pop("tried", ())  # older files have none
    )
    reasons = _reasons(data.pop("reasons"))
    precision = tuple(LayerPrecision(**one) for one in data.pop("precision", ()))
    kernels = tuple(
        KernelTime(**{**one, "ms": tuple(one["ms"])}) for one in data.pop("kernels", ())
    )
    parts = {"reasons": reasons, "tried": tried, "precision": precision, "kernels": kernels}
    return ClusterReport(**{**data, **_measured(data), **parts})


def _measured(data: dict[str, Any]) -> dict[str, Any]:
    """``timings`` and ``verdict`` of ``data``."""
    verdict = data["verdict"]
    return {"timings": _timings(data["timings"]), "verdict": verdict and Verdict(**verdict)}


def _compositions(data: Iterable[dict[str, Any]]) -> tuple[Composed, ...]:
    return tuple(Composed(**{**one, "timings": _timings(one["timings"])}) for one in data)


def _timings(data: list[dict[str, Any]]) -> tuple[Timing, ...]:
    return tuple(
        Timing(**{**one, "shapes": tuple(tuple(shape) for shape in one["shapes"])}) for one in data
    )


def reason_from(data: Mapping[str, Any]) -> Reason:
    """A Reason from its JSON form."""
    return Reason(**{**data, "stage": Stage(data["stage"]), "code": Code(data["code"])})


def _reasons(data: Iterable[dict[str, Any] | None]) -> tuple[Reason, ...]:
    return tuple(reason_from(one) for one in data if one is not None)
