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

SENSITIVITY_S = 20.0  # for running every layer alone; with fewer samples where that does not do


@dataclass(frozen=True)
class Found:
    """``reverted`` are the layers that are left out, worst first; ``error`` is that of ``schemes``."""

    schemes: dict[str, Scheme]
    error: OutputError
    alone: dict[str, OutputError]
    reverted: tuple[str, ...] = ()


def within_budget(simulation: Simulation, schemes: Schemes, budget: AccuracyBudget) -> Found:
    """The layers of ``schemes`` that together keep ``budget`` on the samples of ``simulation``.

    Raises ``Refused(ACCURACY)`` where none does.
    """
    start = perf_counter()
    error = simulation.error(schemes)
    seconds = perf_counter() - start
    if budget.allows(error):  # nothing depends on what a layer costs: one sample tells the report
        return Found(dict(schemes), error, _alone(simulation.with_samples(1), schemes, seconds))
    alone = _alone(simulation, schemes, seconds)
    order = sorted(schemes, key=lambda name: alone[name].relative, reverse=True)
    tried: dict[int, OutputError] = {0: error}

    def holds(count: int) -> bool:
        """With the ``count`` worst reverted."""
        tried[count] = simulation.error({name: schemes[name] for name in order[count:]})
        return budget.allows(tried[count])

    count = first_that_holds(1, len(order) - 1, holds)
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


def _alone(simulation: Simulation, schemes: Schemes, run_s: float) -> dict[str, OutputError]:
    count = len(simulation.samples)
    affordable = max(1, int(count * SENSITIVITY_S / max(run_s * len(schemes), 1e-9)))
    few = simulation if affordable >= count else simulation.with_samples(affordable)
    return {name: few.error({name: scheme}) for name, scheme in schemes.items()}
