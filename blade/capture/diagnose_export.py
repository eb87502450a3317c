# SPDX-License-Identifier: Apache-2.0
"""Reasons for each decision of a model's code that stops its export, where nothing else could capture it.

    reasons += diagnose_export(seen, differences, budget)      # seconds: only where capture fails

The model runs in a forked process, which leaves nothing behind and can be ended. A model on a GPU, which such a
process cannot use, is copied to the CPU for it.
"""

import tempfile
from collections.abc import Sequence
from functools import partial

import torch
from torch.utils import _pytree as pytree

from blade.capture.exported.draft_export import Drafted, ExportFailure, draft_export
from blade.capture.exported.interface import Interface
from blade.capture.inputs import Sample
from blade.capture.messages import Differences, capture_failed
from blade.capture.model import private_copy
from blade.capture.outputs import tensors_of
from blade.capture.references import ReferenceRuns
from blade.core.attempt import attempt
from blade.core.reason import Code, Reason, Stage
from blade.process.forked_trial import DEADLINE_S, ForkedRunner
from blade.timing.time_budget import TimeBudget
from blade.verification.derived_inputs import can_try

_SHOWN = 8  # failures, each a Reason
_LEAST_S = 1.0  # of the time budget: an export takes longer


def diagnose_export(
    seen: ReferenceRuns, differences: Differences, budget: TimeBudget
) -> list[Reason]:
    """Return what stops an export of the model of ``seen``, by ``torch.export.draft_export``.

    It has to answer at the samples, at ``differences``, and at sizes of declared ranges. A model that raises at
    symbolic sizes is tried again at the sample's.
    """
    name = seen.original.name
    others = [*seen.samples[1:], *(one.sample for one, _ in differences)]
    others += seen.probes if seen.ranges else ()
    failures: list[ExportFailure] = []
    raised: Reason | None = None
    for there in [others, []] if others else [[]]:
        if budget.left() < _LEAST_S:
            why = budget.why_ended("torch.export.draft_export could name what stops an export")
            return [*_reasons(name, failures), capture_failed(name, Code.TIME_BUDGET, why)]
        draft = partial(_draft, seen, there, min(budget.left(), DEADLINE_S))
        drafted = attempt(Stage.CAPTURE, None, name, draft, code=Code.EXPORT_FAILED)
        if isinstance(drafted, Reason):
            drafted = Drafted((), drafted)
        failures += drafted.failures
        raised = drafted.raised
        if raised is None:
            break
    return _reasons(name, failures) if failures or raised is None else [raised]


def _draft(seen: ReferenceRuns, others: Sequence[Sample], limit_s: float) -> Drafted:
    model, samples = seen.original.module, [seen.samples[0], *others]
    if not can_try([samples, *seen.original.tensors()]):
        model = private_copy(model).cpu()
        samples = pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, samples)
    interface = Interface(seen.call.names, samples[0], seen.call.bind, tensors_of)

    def run(folder: str) -> Drafted:
        tempfile.tempdir = folder
        return draft_export(model, interface, samples[1:])

    with (
        tempfile.TemporaryDirectory() as folder,
        ForkedRunner(run, slack_s=round(limit_s) - DEADLINE_S, answers=True) as apart,
    ):
        apart.post(folder)
        tried = apart.result()
    if tried.answers:
        drafted: Drafted = tried.answers[0]
        return drafted
    why = f"torch.export.draft_export, in a process apart, {tried.why or 'gave no answer'}."
    return Drafted((), capture_failed(seen.original.name, Code.EXPORT_FAILED, why))


def _reasons(name: str, failures: Sequence[ExportFailure]) -> list[Reason]:
    unique = list({(one.place or one.text, one.kind): one.text for one in failures}.values())
    shown = unique[:_SHOWN]
    if len(unique) > _SHOWN:
        shown[-1] += f" There are {len(unique) - _SHOWN} more."
    return [capture_failed(name, Code.EXPORT_FAILED, text) for text in shown]
