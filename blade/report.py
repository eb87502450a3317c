# SPDX-License-Identifier: Apache-2.0
"""What blade did to a model and why: a value that prints, turns to JSON, and travels in the saved file.

print(report(optimized))            # a table per cluster, then every reason against alternatives
Report.from_json(text) == Report.from_json(text).to_json()
stats(optimized)["cluster_0"]       # live counters of one engine: {"calls": 8, "engine_runs": 7, ...}
rearm(optimized)                    # engines given up after failures in a row are tried again
"""

import json
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from blade.errors import InputError
from blade.hardware import gpu_name
from blade.reason import Code, Reason, Stage
from blade.report_graph import InputReport, NodeReport, inputs_from, nodes_from
from blade.version import __version__

# The attribute of an optimized module that holds its report as JSON text.
ATTRIBUTE = "blade_report"
ENGINES = (
    "engine",
    "engine_1",
    "engine_2",
)  # attributes of a cluster: one per engine, in this order
READY, SEARCHING = "ready", "searching"
ORIGINAL = "torchscript"  # the name of the base case wherever a backend's name is expected

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Timing:
    """Medians in milliseconds at one sample of the user; ``spread`` is how far off their ratio may likely be,
    0.05 = 5%, and ``below`` how far lower the speed-up may be, which is less where the original's times vary."""

    shapes: tuple[Shape, ...]
    original_ms: float
    engine_ms: float
    spread: float
    below: float | None = None  # as ``spread``, where it is not known

    @property
    def speedup(self) -> float:
        return self.original_ms / self.engine_ms

    @property
    def shortfall(self) -> float:
        """``below``, known or not."""
        return self.spread if self.below is None else self.below


@dataclass(frozen=True)
class Verdict:
    """How far an engine was checked, and how far from the truth it was seen.

    Errors are relative to the largest magnitude of the tensor they occur in. ``error_fp64`` and
    ``original_error_fp64`` are those of the engine and of the original against a run in fp64; ``None``
    where the cluster cannot run in fp64.
    """

    checked: int
    refused: int
    error: float
    error_fp64: float | None = None
    original_error_fp64: float | None = None


@dataclass(frozen=True)
class Tried:
    """One backend at one cluster: how far it came. ``reason`` is what speaks against it, if anything."""

    backend: str
    chosen: bool
    timings: tuple[Timing, ...] = ()
    verdict: Verdict | None = None
    reason: Reason | None = None


@dataclass(frozen=True)
class LayerPrecision:
    """One layer of a quantized cluster: what it computes in, and why.

    ``error`` is the relative error of the cluster's outputs if only this layer is quantized, ``saved_ms`` the
    time that it saves at the first sample; ``None`` where that was not measured. ``why``: why not in 8 bits.
    """

    layer: str
    op: str
    precision: str
    error: float | None = None
    saved_ms: float | None = None
    why: str = ""


@dataclass(frozen=True)
class ClusterReport:
    """One cluster: what it holds, who runs it, how fast, how exact, and why nobody else does."""

    name: str
    ops: Mapping[str, int]
    backend: str
    timings: tuple[Timing, ...] = ()
    verdict: Verdict | None = None
    reasons: tuple[Reason, ...] = ()
    tried: tuple[Tried, ...] = ()
    sizes: str = ""  # which of several backends serves which sizes
    precision: tuple[LayerPrecision, ...] = ()


@dataclass(frozen=True)
class Composed:
    """One way to put the module together: which engine serves which cluster (by name), and its timings
    as a whole against the original, one per sample of the user."""

    name: str
    engines: Mapping[str, str]
    timings: tuple[Timing, ...]
    chosen: bool


@dataclass(frozen=True)
class Report:
    """What ``optimize`` did with a model; ``str()`` of it is for people.

    ``reasons`` are those that concern no cluster; ``outside`` counts the ops that are in none, by kind;
    ``versions`` and ``cpu`` are of the machine that optimized; ``seconds`` are per stage of ``optimize``;
    ``nodes`` are the ops of the whole model, in program order; ``inputs`` is what each sample looked like;
    ``compositions`` are all ways to put the module together that were measured as a whole. ``state`` is
    ``SEARCHING`` while engines are made in the background.
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

    @property
    def timings(self) -> tuple[Timing, ...]:
        """Those of the whole module, as it was handed out; empty if none were taken."""
        return next((one.timings for one in self.compositions if one.chosen), ())

    def all_reasons(self) -> tuple[Reason, ...]:
        """Those of the model and those of every cluster."""
        return (*self.reasons, *(r for c in self.clusters for r in c.reasons))

    def to_json(self) -> str:
        """All of it as one JSON object, which ``from_json`` reads."""
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
            return Report(clusters, reasons, **data, nodes=nodes, inputs=inputs, compositions=whole)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a report of blade: {error!r}") from error

    def to_html(self) -> str:
        """One self-contained page: the graph by backend, times, speed-up by size, every reason."""
        from blade.report_page import render  # for few callers, and it needs this module

        return render(self)

    def __str__(self) -> str:
        from blade.report_text import render  # as above

        return render(self)


def report(optimized: torch.nn.Module) -> Report:
    """The report of a module that ``blade.optimize`` returned, also after ``torch.jit.save`` and ``load``.

    Raises ``InputError`` for any other object, and ``ValueError`` for a report that this version cannot read.
    """
    text = getattr(optimized, ATTRIBUTE, None)
    if not isinstance(optimized, torch.jit.ScriptModule) or not isinstance(text, str):
        raise InputError(
            f"optimized: a module returned by blade.optimize (or loaded from its file) is expected, "
            f"but this {type(optimized).__name__} carries no report"
        )
    return Report.from_json(text)


def stats(optimized: torch.nn.Module) -> dict[str, dict[str, int]]:
    """Run-time counters per engine: calls, engine runs, and fallbacks by ``Code``.

    Raises ``InputError`` for anything but an optimized module.
    """
    return {name: dict(engine.stats()) for name, engine in _engines(optimized)}


def rearm(optimized: torch.nn.Module) -> None:
    """Let every engine serve again that ``Config.max_failures`` failures in a row, or a failure to load
    its backend, took out of service. Counters stay.

    Raises ``InputError`` for anything but an optimized module.
    """
    for _, engine in _engines(optimized):
        engine.rearm()


def _engines(optimized: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Name and engine of each cluster that has one; a second one by size is "cluster_0/onnxruntime"."""
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
    """What a report says it was made with."""
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
        for one in data.pop("tried", ())  # files of before have none
    )
    reasons = _reasons(data.pop("reasons"))
    precision = tuple(LayerPrecision(**one) for one in data.pop("precision", ()))
    return ClusterReport(
        **{**data, **_measured(data)}, reasons=reasons, tried=tried, precision=precision
    )


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
    """A Reason from the form it has in JSON."""
    return Reason(**{**data, "stage": Stage(data["stage"]), "code": Code(data["code"])})


def _reasons(data: Iterable[dict[str, Any] | None]) -> tuple[Reason, ...]:
    return tuple(reason_from(one) for one in data if one is not None)
