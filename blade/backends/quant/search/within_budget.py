# SPDX-License-Identifier: Apache-2.0
"""The layers that stay quantized: as many as the accuracy budget allows.

    found = within_budget(simulation, schemes, budget)
    found.schemes                                     # the layers that may be quantized
    found.alone["linear_3"]                           # the output's error if only that layer is

Each layer is quantized alone to measure its error. Then the worst layers are reverted, as few as let the
others keep the budget together. Bisection finds that number; every returned set was run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from time import perf_counter

from blade.backends.quant.analysis.layers import Layer
from blade.backends.quant.analysis.simulate import Scheme, Schemes, Simulation
from blade.config.accuracy import AccuracyBudget, OutputError
from blade.core.reason import Code
from blade.errors import Refused

SENSITIVITY_S = 5.0  # time to run every layer alone; use fewer samples if that does not suffice
FEW = 2  # samples for the bisection, before the result is checked on all


ErrorsAlone = dict[str, tuple[Scheme, OutputError]]
"""The error of a layer alone, by name, with the scheme for which it was measured."""


@dataclass(frozen=True)
class LayerSelection:
    """``reverted``: the layers left in float, worst first; ``error``: that of ``schemes``.

    ``alone``: of the layers that were measured.
    """

    schemes: dict[str, Scheme]
    error: OutputError
    alone: dict[str, OutputError]
    reverted: tuple[str, ...] = ()


def within_budget(
    simulation: Simulation,
    schemes: Schemes,
    budget: AccuracyBudget,
    known: ErrorsAlone | None = None,
) -> LayerSelection:
    """The layers of ``schemes`` that together keep ``budget`` on the samples of ``simulation``.

    ``known``: errors of layers alone from earlier calls; new ones are added.
    Raises ``Refused(ACCURACY)`` if no set of layers keeps it.
    """
    start = perf_counter()
    error = simulation.error(schemes)
    seconds = perf_counter() - start
    if budget.allows(error):  # errors alone are only for the report: one sample, for some seconds
        one = seconds / max(1, len(simulation.samples))
        some = dict(islice(schemes.items(), max(1, int(SENSITIVITY_S / max(one, 1e-9)))))
        alone = _alone(simulation.with_samples(1), some, one, known)
        return LayerSelection(dict(schemes), error, alone)
    alone = _alone(simulation, schemes, seconds, known)
    order = sorted(schemes, key=lambda name: alone[name].relative, reverse=True)
    tried: dict[int, OutputError] = {0: error}

    def without(count: int, on: Simulation) -> OutputError:
        """The error with the ``count`` worst layers reverted."""
        return on.error({name: schemes[name] for name in order[count:]})

    def holds(count: int) -> bool:
        tried[count] = without(count, simulation)
        return budget.allows(tried[count])

    few = simulation.with_samples(FEW)
    last = len(order) - 1
    count = first_that_holds(1, last, lambda count: budget.allows(without(count, few)))
    if count is not None and not holds(count):
        count = first_that_holds(count + 1, last, holds)
    if count is None:
        raise Refused(
            Code.ACCURACY,
            f"Config.accuracy_budget is {budget}, and no layer meets it: all {len(order)} together have "
            f"a relative error of {error.relative:.2g} (cosine {error.cosine:.4f}, {error.snr_db:.1f} dB), "
            f"and {order[-1]} alone, the least sensitive, has {alone[order[-1]].relative:.2g}.",
        )
    kept = {name: schemes[name] for name in schemes if name in set(order[count:])}
    return LayerSelection(kept, tried[count], alone, tuple(order[:count]))


def first_that_holds(low: int, high: int, holds: Callable[[int], bool]) -> int | None:
    """Bisection over low..high: the least number that holds if ``holds`` is monotonic, else one that holds.

    ``None`` if ``high`` does not hold.
    """
    if low > high or not holds(high):
        return None
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return high


def groups_of(layers: Sequence[Layer], schemes: Schemes) -> list[tuple[Layer, ...]]:
    """Groups of quantized layers that take equal time; the largest weights first."""
    groups: dict[object, list[Layer]] = {}
    for layer in layers:
        if layer.name in schemes:
            groups.setdefault((layer.signature, schemes[layer.name].kind), []).append(layer)
    return sorted(
        (tuple(g) for g in groups.values()), key=lambda g: -sum(x.weight.numel() for x in g)
    )


def _alone(
    simulation: Simulation, schemes: Schemes, run_s: float, known: ErrorsAlone | None
) -> dict[str, OutputError]:
    """The error of each layer alone; ``run_s``: seconds of a run on all samples."""
    known = {} if known is None else known
    fresh = {n: s for n, s in schemes.items() if n not in known or known[n][0] is not s}
    count = len(simulation.samples)
    affordable = max(1, int(count * SENSITIVITY_S / max(run_s * len(fresh), 1e-9)))
    few = simulation if affordable >= count else simulation.with_samples(affordable)
    for name, error in few.alone(fresh).items():
        known[name] = schemes[name], error
    return {name: known[name][1] for name in schemes}
