# SPDX-License-Identifier: Apache-2.0
"""An accuracy budget in the user's own metric: optimize, score the whole model, tighten until it holds.

    optimized = optimize_within_metric(config, lambda within, reasons: ...)      # the function optimizes

The drop of a metric does not follow from the errors of clusters. So the model is optimized with bounds on the
relative error, the loosest first, and each result is scored on the labelled samples against the exact
optimized model, which is returned if no bound holds.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from blade.config import Config
from blade.config.accuracy import AccuracyBudget
from blade.core.reason import Code, Reason, Stage
from blade.errors import ConfigError
from blade.report import report
from blade.verification.reduced_precision import has_reduced_precision

log = logging.getLogger(__name__)
Build = Callable[[Config, Sequence[Reason]], torch.jit.ScriptModule]
BOUNDS = (0.4, 0.2, 0.1, 0.05, 0.025, 0.0125)


def optimize_within_metric(config: Config, build: Build) -> torch.jit.ScriptModule:
    """Return the first model, by ``BOUNDS``, that meets the metric of ``config``, or the exact one.

    Raises ``ConfigError`` if the metric does not return a number.
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
        if not any(has_reduced_precision(c.backend, config) for c in report(made).clusters):
            return made  # no precision is reduced, and the report says why
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
    """Return the metric of the answers of ``module`` to the budget's samples."""
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
