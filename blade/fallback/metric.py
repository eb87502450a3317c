# SPDX-License-Identifier: Apache-2.0
"""An accuracy budget in the user's own metric: optimize, score the whole model, tighten until it holds.

    optimized = meet(config, lambda within, reasons: ...)      # the function optimizes

What a metric drops by follows from no cluster's error. So the model is optimized with bounds on the relative
error, the loosest first, and each result is scored on the labelled samples, against the exact optimized
model; that one is what comes back where no bound does.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from blade.budget import AccuracyBudget
from blade.config import Config
from blade.errors import ConfigError
from blade.fallback.lossy import is_lossy
from blade.reason import Code, Reason, Stage
from blade.report import report

log = logging.getLogger(__name__)
Build = Callable[[Config, Sequence[Reason]], torch.jit.ScriptModule]
BOUNDS = (0.4, 0.2, 0.1, 0.05, 0.025, 0.0125)


def meet(config: Config, build: Build) -> torch.jit.ScriptModule:
    """The first of ``BOUNDS`` whose model keeps ``config.accuracy_budget``, a metric; else the exact model.

    Raises ``ConfigError`` where the metric does not return a number.
    """
    budget = config.accuracy_budget
    full = config.evolve(
        enable_int8=False,
        enable_fp8=False,
        enable_fp16=False,
        enable_bf16=False,
        accuracy_budget=BOUNDS[0],
    )
    exact = build(full, ())
    own = score(budget, exact)
    reasons: list[Reason] = []
    for bound in BOUNDS:
        made = build(config.evolve(accuracy_budget=bound), reasons)
        if not any(is_lossy(c.backend, config) for c in report(made).clusters):
            return made  # nothing is reduced, and the report says why
        value = score(budget, made)
        log.info("relative error %g: the metric is %g, was %g", bound, value, own)
        if own - value <= budget.bound:
            return made
        detail = (
            f"With a relative error of up to {bound:g} the metric drops from {own:.6g} to {value:.6g}; "
            f"Config.accuracy_budget allows a drop of {budget.bound:g}."
        )
        reasons.append(Reason(Stage.VERIFY, Code.ACCURACY, None, "the whole module", detail))
    return build(full, reasons)


def score(budget: AccuracyBudget, module: Callable[..., Any]) -> float:
    """The metric of what ``module`` answers to the budget's samples."""
    assert budget.metric is not None, budget
    with torch.no_grad():
        outputs = [_call(module, inputs) for inputs, _ in budget.samples]
    value = budget.metric(outputs, [label for _, label in budget.samples])
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = float(value)
    if not isinstance(value, (int, float)) or value != value:
        raise ConfigError(
            f"Config.accuracy_budget: the metric is to return a number, the higher the better; got {value!r}"
        )
    return float(value)


def _call(module: Callable[..., Any], inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return module(**inputs)
    return module(*inputs) if isinstance(inputs, tuple) else module(inputs)
