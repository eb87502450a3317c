# SPDX-License-Identifier: Apache-2.0
"""Verify an engine of reduced precision: its form as strictly as any, its values against the user's budget.

    sentence = why_not(budget, case, got, want)       # None, or in which way it is too far from the original

At the user's samples the budget holds as it is. At inputs derived from them, whose ranges were not
calibrated, the error may be ``budget.ELSEWHERE`` times larger. Where floats are redrawn, scaled out of all
ranges or not finite, only the form is compared: a scale calibrated on smaller values is expected to saturate
there.
"""

from collections.abc import Sequence

import torch

from blade.backends import registry
from blade.config import Config
from blade.config.accuracy import (
    DEFAULT,
    ELSEWHERE,
    AccuracyBudget,
    output_error,
)
from blade.core.backend import Backend
from blade.core.reason import Code
from blade.report import ORIGINAL
from blade.verification import compare
from blade.verification.allowed_layouts import Layouts
from blade.verification.cases import Case

Tensors = Sequence[torch.Tensor]


def is_value_checked(case: Case) -> bool:
    """Whether values at ``case`` are compared: other contents only if distributed as the sample's."""
    if case.kind != "contents" or case.name == "shuffled contents":
        return True
    return case.name == "random contents" and not any(t.is_floating_point() for t in case.inputs)


def why_not(
    budget: AccuracyBudget, case: Case, got: Tensors, want: Tensors, like: Layouts = ()
) -> str | None:
    """Return ``None`` if ``got`` has the form of ``want`` and is within ``budget`` at ``case``.

    ``like``: outputs whose memory layouts ``got`` may have as well (``compare.why_other_form``).
    """
    strides = case.kind != "layout"
    sentence = compare.why_other_form(
        got, want, strides=strides, places=is_value_checked(case), like=like
    )
    if sentence or not is_value_checked(case):
        return sentence
    here = budget if case.kind == "sample" else budget.scaled(ELSEWHERE)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        error = output_error(a, b)
        if not here.allows(error):
            return (
                f"output {i} has a relative error of {error.relative:.2g} (cosine {error.cosine:.4f}, "
                f"{error.snr_db:.1f} dB); allowed is {here}"
            )
    return None


def code_of(case: Case, got: Tensors, want: Tensors, like: Layouts = ()) -> Code:
    """Return the code of the refusal: accuracy for values beyond the budget, a defect for everything else."""
    strides = case.kind != "layout"
    form = compare.why_other_form(
        got, want, strides=strides, places=is_value_checked(case), like=like
    )
    return Code.WRONG_VALUES if form else Code.ACCURACY


def budget_of(backend: Backend, config: Config) -> AccuracyBudget | None:
    """Return ``config.accuracy_budget`` if ``backend`` makes reduced-precision engines under ``config``.

    A metric cannot be applied to a cluster; the default budget replaces one that ``optimize_within_metric``
    has not turned into a relative error.
    """
    if not _reduces_precision(backend, config):
        return None
    given = config.accuracy_budget
    return DEFAULT if given.kind == "metric" else given


def has_reduced_precision(backends: str, config: Config) -> bool:
    """Whether a backend of this name, or one of several ("disc+quant"), makes reduced-precision engines."""
    names = [name for name in backends.split("+") if name != ORIGINAL]
    return any(_reduces_precision(registry.load(name), config) for name in names)


def _reduces_precision(backend: Backend, config: Config) -> bool:
    """Whether it always does, or the config permits it (``Backend.reduced_precision``,
    ``reduced_precision_with``)."""
    permitted = (getattr(config, field) for field in backend.reduced_precision_with)
    return backend.reduced_precision or any(permitted)
