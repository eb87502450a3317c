# SPDX-License-Identifier: Apache-2.0
"""torch.export as the way in for a model that cannot be traced.

    exported = export_instead(own, inputs, config, reasons)
    exported.found         # ``None``: it cannot be exported either
    exported.seen          # then ``diagnose_export`` tells why

Control flow of torch (``cond``, ``while_loop``, ``scan``), which no trace takes, is kept. Where there is a trace,
it stays: it sees decisions that an export does not, such as ``x is y``, strides, and sizes in text.
"""

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from blade.capture.candidate import CapturedCandidate, compared
from blade.capture.decisions.identity import code_that_compares_objects
from blade.capture.exported.export_script import export_script
from blade.capture.exported.interface import Interface
from blade.capture.messages import not_exported
from blade.capture.outputs import NotTensors, tensors_of
from blade.capture.references import ReferenceRuns, run_references
from blade.config import Config
from blade.core.reason import Reason
from blade.graph.torchscript.decision_checks import NO_PATH


@dataclass(frozen=True)
class Exported:
    """``found``: the export, or ``None``. ``seen``: what it was compared with, ``None`` if it was not tried."""

    found: CapturedCandidate | None = None
    seen: ReferenceRuns | None = None


def export_instead(own: nn.Module, inputs: Any, config: Config, reasons: list[Reason]) -> Exported:
    """Return an export of ``own`` that answers the samples, and is right wherever it answers.

    ``reasons`` gets why there is none. It is not tried for a model with preserved attributes, for one with a
    state, for one whose code compares objects, and for arguments that are guarded by value.
    """
    if not _may_try(own, config):
        return Exported()
    seen = _references(own, inputs, config)
    if seen is None or not may_export(own, seen, config):
        return Exported()
    fixed = {axis for axis, (low, high) in seen.ranges.items() if low == high}
    interface = Interface(seen.call.names, seen.samples[0], seen.call.bind, tensors_of)
    module = export_script(own, interface, fixed)
    seen.original.reset()
    if isinstance(module, Reason):
        reasons.append(module)
        return Exported(seen=seen)
    found = compared(module, seen, "export", config)
    unserved = [(one, why) for one, why in found.differences if NO_PATH in why]
    wrong = [(one, why) for one, why in found.differences if NO_PATH not in why]
    found = replace(found, differences=wrong, unserved=unserved, has_checks=True)
    samples = {id(one) for one in seen.samples}
    missed = [(one, why) for one, why in unserved if id(one.sample) in samples]
    if wrong or missed:
        reasons.append(not_exported(type(own).__name__, seen.call, wrong, missed))
        return Exported(seen=seen)
    return Exported(found, seen)


def may_export(own: nn.Module, seen: ReferenceRuns, config: Config) -> bool:
    """Whether an export of ``own``, which was ``seen``, can be sound."""
    return _may_try(own, config) and not seen.call.guards and not seen.original.is_stateful


def _may_try(own: nn.Module, config: Config) -> bool:
    return not config.preserved_attributes and code_that_compares_objects(own) is None


def _references(own: nn.Module, inputs: Any, config: Config) -> ReferenceRuns | None:
    try:
        return run_references(own, inputs, config, bake=True)
    except NotTensors:
        return None
