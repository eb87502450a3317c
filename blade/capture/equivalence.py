# SPDX-License-Identifier: Apache-2.0
"""Compare a captured module with the original, and find the inputs where they differ."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from blade.capture.derived_shapes import Axis
from blade.capture.equivalence_fp64 import Fp64Model
from blade.capture.inputs import Sample
from blade.capture.reference_model import (
    Answer,
    ModelState,
    ReferenceModel,
    answer_of,
    seeded,
)
from blade.config.accuracy import ELSEWHERE, AccuracyBudget, output_error
from blade.core import torchscript
from blade.core.attempt import attempt
from blade.core.captured import Reference
from blade.core.reason import Code, Reason, Stage
from blade.graph.torchscript.decision_checks import NO_PATH
from blade.process.forked_trial import ForkedRunner, TrialOutcome
from blade.verification.derived_inputs import can_try
from blade.verification.index_guard import in_bounds
from blade.verification.tolerance import difference, tolerance_of, underflow, unit

Beyond = Callable[[int, torch.Tensor, torch.Tensor], str | None]
"""(output, wanted, got) -> ``None`` if ``got`` is right all the same, else a text to append."""


def reference(
    original: ReferenceModel, sample: Sample, axes: frozenset[Axis], what: str
) -> Reference | None:
    """Return the reference for ``sample``, ``None`` if the original does not accept it.

    On a GPU indices are checked first (``in_bounds``): ``sample`` may be a derived one.
    """

    def answers() -> list[Answer]:
        if not original.is_stateful:
            once = seeded(lambda: original.run(sample, times=1))
            if not original.is_stateful:  # this run may be the first to show it
                return once
        return seeded(lambda: original.run(sample, times=2))

    def careful() -> list[Answer]:
        with in_bounds(sample, original.device):
            return answers()

    result = attempt(Stage.CAPTURE, None, what, careful, code=Code.TRACE_FAILED)
    return None if isinstance(result, Reason) else Reference(sample, tuple(result), axes, what)


def find_differences(
    module: nn.Module,
    references: Sequence[Reference],
    budget: AccuracyBudget | None = None,
    seed: bool = True,
    original: Callable[..., Any] | None = None,
    forward: Callable[..., Any] | None = None,
    apart: bool = False,
) -> list[tuple[Reference, str]]:
    """Return every reference that ``module`` does not meet, with a sentence on the difference.

    ``budget``: parts of ``module`` have reduced precision, and this bounds the errors of its outputs.
    ``seed``: start from the references' random seed, which no other thread may use meanwhile; a module that
    draws no numbers needs none. ``original``: the model behind ``references``, for a float64 run if one is
    needed. ``forward``: called instead of ``module``'s own, whose executor is then not used. ``apart``: run
    derived inputs in a forked process first; a crash there is a difference.
    """
    state, exact = ModelState(module), Fp64Model(original, references, seed)
    run = module if forward is None else forward
    derived = [k for k, one in enumerate(references) if not one.what.startswith("sample")]
    if not apart or not can_try([r.sample for r in references] + [*_tensors(module)]):
        derived = []
    found = []

    def answers_at(k: int) -> list[Answer] | Reason:
        try:
            return _run_or_error(run, references[k], seed)
        finally:
            state.restore()

    with ForkedRunner(answers_at, answers=True) as trials:
        if derived:
            trials.post(*derived)
        for k, one in enumerate(references):
            tried = trials.result() if k in derived else TrialOutcome()
            if tried.why is not None:
                found.append((one, f"in a process apart it {tried.why}"))
                continue
            if not tried.answers:
                tried = TrialOutcome(answers=(answers_at(k),))
            [answers] = tried.answers
            if (why := _why_different(answers, one, budget, exact)) is not None:
                found.append((one, why))
    return found


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _run_or_error(module: Callable[..., Any], one: Reference, seed: bool) -> list[Answer] | Reason:
    """Return the answers of ``module`` at ``one``, or the Reason of its exception."""

    def answers() -> list[Answer]:
        # Without the profiling executor, which would specialize at every size.
        with torch.no_grad(), torchscript.unoptimized():
            return [answer_of(lambda sample: module(*sample), one.sample) for _ in one.answers]

    return attempt(
        Stage.CAPTURE,
        None,
        one.what,
        lambda: seeded(answers) if seed else answers(),
        code=Code.TRACE_SPECIALIZED,
    )


def _why_different(
    result: list[Answer] | Reason,
    one: Reference,
    budget: AccuracyBudget | None,
    exact: Fp64Model,
) -> str | None:
    if isinstance(result, Reason):
        _, no_path, rest = (result.error or "").partition(NO_PATH)
        return f"{no_path}{rest.strip()}" if no_path else result.detail
    here = budget if budget is None or not one.axes else budget.scaled(ELSEWHERE)
    for call, ((output, arguments), (actual, left)) in enumerate(zip(one.answers, result)):
        if (
            why := _why_values(output, actual, here, partial(exact.why_not, one, call))
        ) is not None:
            return why
        if (why := _why_values(arguments, left)) is not None:
            return f"arguments were written to differently: {why.replace('output', 'argument')}"
    return None


def _why_values(
    expected: Any,
    actual: Any,
    budget: AccuracyBudget | None = None,
    beyond: Beyond = lambda *_: "",
) -> str | None:
    """Compare values; ``beyond`` is called for output ``index`` if its error exceeds ``Tolerance.graph``."""
    want, got = pytree.tree_leaves(expected), pytree.tree_leaves(actual)
    if len(want) != len(got):
        return f"it returned {len(got)} values instead of {len(want)}"
    for index, (x, y) in enumerate(zip(want, got)):
        if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
            if type(x) is not type(y) or not _is_same_plain(x, y):
                return f"output {index} is {y!r} instead of {x!r}"
            continue
        if (why := _why_tensor(x, y, budget, partial(beyond, index))) is not None:
            return f"output {index} {why}"
    return None


def _is_same_plain(want: Any, got: Any) -> bool:
    """Compare plain values; floats have passed through tensors, most often of float32."""
    if isinstance(want, float) and want != got:
        both_nan = want != want and got != got
        return both_nan or math.isclose(want, got, rel_tol=tolerance_of(torch.float32).graph)
    return bool(want == got)


def _why_tensor(
    want: torch.Tensor,
    got: torch.Tensor,
    budget: AccuracyBudget | None,
    beyond: Callable[[torch.Tensor, torch.Tensor], str | None],
) -> str | None:
    if want.shape != got.shape:
        return f"has shape {list(got.shape)} instead of {list(want.shape)}"
    if want.dtype != got.dtype:
        return f"has dtype {got.dtype} instead of {want.dtype}"
    if want.numel() == 0 or torch.equal(want, got):
        return None
    if budget is not None:
        error = output_error(got, want)
        seen = f"has a relative error of {error.relative:.2g} (cosine {error.cosine:.4f})"
        return None if budget.allows(error) else f"{seen}; allowed is {budget}"
    tolerance = tolerance_of(want.dtype).graph
    if not tolerance:
        return "has other values"
    if not torch.equal(torch.isfinite(want), torch.isfinite(got)):
        return "has infinities or NaNs in other places"
    off, largest = difference(got, want)
    # smaller numbers have lost digits, and some kernels make zeros of them
    allowed = tolerance * unit(largest, underflow(want.dtype))
    if off <= allowed or (further := beyond(want, got)) is None:
        return None
    return f"is off by up to {off:.3g}; {allowed:.3g} is allowed{further}"
