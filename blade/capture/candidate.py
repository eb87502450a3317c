# SPDX-License-Identifier: Apache-2.0
"""A module that may become the captured one, and where it is wrong or does not answer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from blade.capture.attributes import attributes_of
from blade.capture.clean import forward_of, freeze
from blade.capture.derived_shapes import Axis, axes_of
from blade.capture.equivalence import find_differences
from blade.capture.inputs import Sample
from blade.capture.messages import Differences
from blade.capture.paths import PathTable, finish
from blade.capture.references import ReferenceRuns
from blade.capture.trace import Trace
from blade.config import Config
from blade.core.captured import EqualSizes, Reference, SizeRange
from blade.core.reason import Code, Reason, Stage
from blade.graph.torchscript.decision_checks import NO_PATH
from blade.verification.index_guard import in_bounds


class KnownTraces(Protocol):
    """Records of traces that were compared with their models (``recapture``)."""

    def has_any(self, model: torch.nn.Module) -> bool:
        """Whether a trace of such a model may be known."""

    def key_of(self, frozen: torch.jit.ScriptModule, samples: Sequence[Sample]) -> str | None:
        """The key of the graph ``frozen`` at ``samples``; ``None`` if nothing can be known of it."""

    def look_up(self, key: str | None) -> bytes | None:
        """The record of the trace with this key."""


@dataclass(frozen=True)
class CapturedCandidate:
    """A module, the view of the model it was compared in, and where it is wrong.

    ``unserved`` are the references at which a trace raises because a decision falls out differently there.
    """

    module: torch.jit.ScriptModule
    seen: ReferenceRuns
    how: str
    differences: Differences
    warnings: tuple[Reason, ...] = ()
    unserved: Differences = ()
    table: PathTable | None = None  # of a trace
    limits: tuple[SizeRange, ...] = ()
    equal_sizes: tuple[EqualSizes, ...] = ()
    key: str | None = None
    record: bytes = b""
    is_compared: bool = True
    frozen: torch.jit.ScriptModule | None = None  # ``module`` frozen, if still unchanged
    fixed: frozenset[Axis] = frozenset()  # sizes that an exported program has as constants
    has_checks: bool = False  # an export whose guards are checks

    @property
    def decides_on_elements(self) -> bool:
        """Whether the module holds for some elements of its inputs only."""
        return self.table is not None and any(path.elements for path in self.table.paths)

    @property
    def structure(self) -> str | None:
        """The structure of all outputs, if it is the same on every path; ``None`` for a script, which keeps it."""
        if self.how == "script":
            return None
        found = set(self.seen.structures)
        if self.table is not None and self.frozen is not None:
            found |= {path.structure for path in self.table.paths if path.structure is not None}
        return found.pop() if len(found) == 1 else None

    @property
    def is_guarded(self) -> bool:
        """Whether the original may answer where a check of the module fails."""
        return self.table is not None or self.has_checks

    @property
    def is_exact(self) -> bool:
        """Whether the module is right at every reference."""
        return not self.differences and not self.unserved


def compared(
    module: Any,
    seen: ReferenceRuns,
    how: str,
    config: Config,
    traced: Trace | None = None,
    limits: tuple[SizeRange, ...] = (),
    known: KnownTraces | None = None,
    sample: Sample | None = None,
) -> CapturedCandidate:
    """Freeze ``module`` as it will be returned, and compare it with every reference within ``limits``. ``sample``
    is the one that ``traced`` was made at; its key is that which it has among ``known`` traces."""
    frozen, table, key = module, None, None
    if traced is None or not traced.is_frozen:
        frozen = freeze(module, config.preserved_attributes, config.freeze_module)
    elif known is not None:
        key = known.key_of(frozen, seen.samples)
    if traced is not None and sample is not None:
        table = PathTable(finish(frozen, traced.recorder, sample, traced.structure))
    within = [one for one in seen.references if is_within(one.sample, limits)]
    differences, unserved = differences_of(frozen, seen, within)
    # unused so far, unless a run may have changed attributes
    reused = None if attributes_of(frozen) else frozen
    if traced is None:
        return CapturedCandidate(module, seen, how, [*differences, *unserved], frozen=reused)
    warnings = tuple(
        Reason(Stage.CAPTURE, Code.TRACER_WARNING, None, module.original_name, text)
        for text in traced.warnings
    )
    found = CapturedCandidate(module, seen, how, differences, warnings, unserved, table, limits)
    return replace(found, key=key, frozen=reused)


def differences_of(
    frozen: torch.jit.ScriptModule, seen: ReferenceRuns, references: Sequence[Reference]
) -> tuple[Differences, Differences]:
    """Return the references at which ``frozen`` is wrong, and those at which none of its paths answers."""
    forward = forward_of(frozen)
    with in_bounds(seen.samples, seen.original.device):  # an index may be of other sizes
        found = find_differences(
            frozen, references, original=seen.original, forward=forward, apart=True
        )
    unserved = [(one, why) for one, why in found if NO_PATH in why]
    return [(one, why) for one, why in found if NO_PATH not in why], unserved


def is_within(sample: Sample, limits: Sequence[SizeRange]) -> bool:
    """Whether all sizes of ``sample`` are within ``limits``."""
    sizes = axes_of(sample)
    return all(one.low <= sizes[one.index, one.axis] <= one.high for one in limits)
