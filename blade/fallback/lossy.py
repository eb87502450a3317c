# SPDX-License-Identifier: Apache-2.0
"""What an engine with reduced precision is held to: form as strictly as any, values to the user's budget.

    sentence = why_not(budget, case, got, want)       # None, or in which way it is too far from the original

At the user's samples the budget holds as it is. At inputs derived from them, whose ranges nobody calibrated,
the error may be ``budget.ELSEWHERE`` times larger. Where floats are drawn anew, scaled out of all ranges or
not finite, only the form is compared: what a calibrated scale makes of values twice as large as any that it
was calibrated on, or of an infinity, is no defect.
"""

from collections.abc import Sequence

import torch

from blade.backends import registry
from blade.budget import DEFAULT, ELSEWHERE, AccuracyBudget, output_error
from blade.config import Config
from blade.fallback import compare
from blade.fallback.cases import Case
from blade.reason import Code
from blade.report import ORIGINAL

Tensors = Sequence[torch.Tensor]


def is_judged(case: Case) -> bool:
    """Whether values at ``case`` count: those of other contents if these are distributed as the sample's."""
    if case.kind != "contents" or case.name == "shuffled contents":
        return True
    return case.name == "random contents" and not any(t.is_floating_point() for t in case.inputs)


def why_not(
    budget: AccuracyBudget, case: Case, got: Tensors, want: Tensors, like: Tensors = ()
) -> str | None:
    """``None`` if ``got`` has the form of ``want`` and is as near to it as ``budget`` asks at ``case``.

    ``like``: what ``got`` may lie in memory as, too (``compare.form``).
    """
    strides = case.kind != "layout"
    sentence = compare.form(got, want, strides=strides, places=is_judged(case), like=like)
    if sentence or not is_judged(case):
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


def code_of(case: Case, got: Tensors, want: Tensors, like: Tensors = ()) -> Code:
    """Of the sentence: values beyond the budget are a matter of accuracy, everything else is a defect."""
    strides = case.kind != "layout"
    form = compare.form(got, want, strides=strides, places=is_judged(case), like=like)
    return Code.WRONG_VALUES if form else Code.ACCURACY


def budget_of(backend: object, config: Config) -> AccuracyBudget | None:
    """``config.accuracy_budget`` if ``backend`` makes lossy engines under ``config``.

    A metric says nothing of a cluster; where nobody made errors of it (``metric.meet``), it is the default.
    """
    if not _makes_lossy(backend, config):
        return None
    given = config.accuracy_budget
    return DEFAULT if given.kind == "metric" else given


def is_lossy(backends: str, config: Config) -> bool:
    """Whether engines of the backend of this name are, or of one of several ("disc+quant")."""
    names = [name for name in backends.split("+") if name != ORIGINAL]
    return any(_makes_lossy(registry.load(name), config) for name in names)


def _makes_lossy(backend: object, config: Config) -> bool:
    """Always (``lossy``), or where a permission makes the difference (``lossy_with``)."""
    fields = getattr(backend, "lossy_with", ())
    return bool(getattr(backend, "lossy", False)) or any(getattr(config, f) for f in fields)
