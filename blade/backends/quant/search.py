# SPDX-License-Identifier: Apache-2.0
"""Which layers stay quantized: as many as the accuracy budget lets, and only those that win time.

    found = within_budget(simulation, schemes, budget)
    found.schemes                                     # what may be quantized
    found.alone["linear_3"]                           # the output's error if only that layer is

Each layer is quantized alone to learn what it costs; then the worst ones are reverted, as few as make the
rest hold together. That number is bisected: every set that is returned was run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

from blade.backends.quant.layers import Layer
from blade.backends.quant.simulate import Scheme, Schemes, Simulation
from blade.budget import AccuracyBudget, OutputError
from blade.errors import Refused
from blade.reason import Code

SENSITIVITY_S = 5.0  # for running every layer alone; with fewer samples where that does not do
FEW = 2  # samples on which the number of layers to revert is looked for, before all have their say


Alone = dict[str, tuple[Scheme, OutputError]]
"""What a layer with that very scheme costs alone, by name."""


@dataclass(frozen=True)
class Found:
    """``reverted`` are the layers that are left out, worst first; ``error`` is that of ``schemes``."""

    schemes: dict[str, Scheme]
    error: OutputError
    alone: dict[str, OutputError]
    reverted: tuple[str, ...] = ()


def within_budget(
    simulation: Simulation, schemes: Schemes, budget: AccuracyBudget, known: Alone | None = None
) -> Found:
    """The layers of ``schemes`` that together keep ``budget`` on the samples of ``simulation``.

    ``known``: what layers cost alone, of schemes that were looked at before; those of now are added.
    Raises ``Refused(ACCURACY)`` where none does.
    """
    start = perf_counter()
    error = simulation.error(schemes)
    seconds = perf_counter() - start
    if budget.allows(error):  # nothing depends on what a layer costs: one sample tells the report
        alone = _alone(simulation.with_samples(1), schemes, seconds, known)
        return Found(dict(schemes), error, alone)
    alone = _alone(simulation, schemes, seconds, known)
    order = sorted(schemes, key=lambda name: alone[name].relative, reverse=True)
    tried: dict[int, OutputError] = {0: error}

    def without(count: int, on: Simulation) -> OutputError:
        """The ``count`` worst reverted."""
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
    return Found(kept, tried[count], alone, tuple(order[:count]))


def first_that_holds(low: int, high: int, holds: Callable[[int], bool]) -> int | None:
    """By bisection, the least of low..high that holds if every later one does; one that holds in any case.

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
    """Quantized layers that take equally long, together; the largest weights first."""
    groups: dict[object, list[Layer]] = {}
    for layer in layers:
        if layer.name in schemes:
            groups.setdefault((layer.signature, schemes[layer.name].kind), []).append(layer)
    return sorted(
        (tuple(g) for g in groups.values()), key=lambda g: -sum(x.weight.numel() for x in g)
    )


def _alone(
    simulation: Simulation, schemes: Schemes, run_s: float, known: Alone | None
) -> dict[str, OutputError]:
    """``run_s`` is what a run on all samples takes."""
    known = {} if known is None else known
    fresh = {n: s for n, s in schemes.items() if n not in known or known[n][0] is not s}
    count = len(simulation.samples)
    affordable = max(1, int(count * SENSITIVITY_S / max(run_s * len(fresh), 1e-9)))
    few = simulation if affordable >= count else simulation.with_samples(affordable)
    for name, error in few.alone(fresh).items():
        known[name] = schemes[name], error
    return {name: known[name][1] for name in schemes}
