# SPDX-License-Identifier: Apache-2.0
"""torch.export as the way in for a model whose trace is refused, wrong at some inputs, or does not answer there.

    exported = export_instead(own, inputs, traced, config, reasons)      # ``None``: the trace stays

Control flow of torch (``cond``, ``while_loop``, ``scan``), which no trace takes, is kept.
"""

from dataclasses import replace
from typing import Any

from torch import nn

from blade.capture.candidate import CapturedCandidate, compared
from blade.capture.exported.export_script import export_script
from blade.capture.exported.interface import Interface
from blade.capture.outputs import NotTensors, tensors_of
from blade.capture.references import ReferenceRuns, run_references
from blade.config import Config
from blade.core.reason import Reason
from blade.graph.torchscript.decision_checks import NO_PATH

_SECONDS = 0.015  # of an export, per node of the trace


def export_instead(
    own: nn.Module,
    inputs: Any,
    traced: CapturedCandidate | None,
    config: Config,
    reasons: list[Reason],
) -> CapturedCandidate | None:
    """Return an export of ``own`` that is right and answers more of the references than ``traced``.

    ``reasons`` gets why there is none. It is not tried if it may take over half of ``Config.time_budget``
    (unless there is no trace), for a model with preserved attributes, and for arguments that are guarded by
    value. A stateful model is left to its trace.
    """
    if config.preserved_attributes or not _is_worth_it(traced, config):
        return None
    seen = _references(own, inputs, config) if traced is None else traced.seen
    if seen is None or seen.call.guards or seen.original.is_stateful:
        return None
    fixed = {axis for axis, (low, high) in seen.ranges.items() if low == high}
    interface = Interface(seen.call.names, seen.samples[0], seen.call.bind, tensors_of)
    module = export_script(own, interface, fixed)
    seen.original.reset()
    if isinstance(module, Reason):
        reasons.append(module)
        return None
    found = compared(module, seen, "export", config)
    unserved = [(one, why) for one, why in found.differences if NO_PATH in why]
    wrong = [(one, why) for one, why in found.differences if NO_PATH not in why]
    found = replace(found, differences=wrong, unserved=unserved, has_checks=True)
    samples = {id(one) for one in seen.samples}
    if wrong or any(id(one.sample) in samples for one, _ in unserved):
        return None
    return found if traced is None or faults(found) < faults(traced) else None


def faults(graph: CapturedCandidate) -> tuple[int, int]:
    """How often ``graph`` is wrong, then how often it does not answer: the fewest are the best."""
    return len(graph.differences), len(graph.unserved)


def _is_worth_it(traced: CapturedCandidate | None, config: Config) -> bool:
    if traced is None:
        return True
    if config.allow_tracing is True or traced.is_exact:
        return False
    if config.time_budget is None:
        return True
    nodes = sum(1 for _ in traced.module.inlined_graph.nodes())
    return nodes * _SECONDS <= config.time_budget / 2


def _references(own: nn.Module, inputs: Any, config: Config) -> ReferenceRuns | None:
    try:
        return run_references(own, inputs, config, bake=True)
    except NotTensors:
        return None
