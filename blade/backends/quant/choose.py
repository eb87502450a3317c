# SPDX-License-Identifier: Apache-2.0
"""From plans to the engine that serves: within the budget, and fast where it is quantized.

    chosen = choose(cluster, prepared, plans, config, compile_)
    chosen.engine, chosen.layers                    # a LayerPrecision of each layer

Every plan that keeps the budget is compiled, and the fastest is kept. Then each group of equal layers
is put back to float in its turn; one that the cluster is no slower without is not quantized. What that
takes is bounded by ``SEARCH_S``, or ``UNHURRIED_S`` with ``Config(time_budget=None)``: groups not reached
in time stay as they are.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import exp, isfinite, log
from statistics import mean, median
from time import perf_counter
from typing import Any

from blade.backends.base import Cluster
from blade.backends.quant.plans import Plan, Prepared
from blade.backends.quant.search import Found, groups_of, within_budget
from blade.backends.quant.simulate import Inputs, Scheme
from blade.backends.quant.timing import Clock, Gain, Run, is_worth_it, measured_gain, race
from blade.backends.quant.write import write
from blade.config import Config
from blade.errors import Refused
from blade.reason import Code
from blade.report import LayerPrecision

logger = logging.getLogger(__name__)
Compile = Callable[[Cluster], Any]
SEARCH_S, UNHURRIED_S = 30.0, 300.0
TIMED = 3  # samples: the first, the smallest, the largest
MARGIN = 0.95  # of the budget: engines round a little differently than the simulation


@dataclass(frozen=True)
class Chosen:
    """``engine`` runs the cluster with some of its layers quantized."""

    engine: Any
    schemes: dict[str, Scheme]
    layers: tuple[LayerPrecision, ...]


@dataclass(frozen=True)
class _Variant:
    """A plan within the budget, compiled."""

    plan: Plan
    found: Found
    engine: Any


def choose(
    cluster: Cluster,
    prepared: Prepared,
    plans: Iterable[Plan],
    config: Config,
    compile_: Compile,
    clock: Clock = perf_counter,
) -> Chosen:
    """Raises ``Refused``: ACCURACY if no plan keeps the budget, SLOWER if no layer wins time."""
    search = _Search(cluster, prepared, config, compile_, clock)
    variants = search.variants(plans)
    if not config.timing:
        return search.chosen(variants[0], {}, {})
    best = search.fastest(variants)
    gains = search.gains(best)
    slow = {name: why for name, (gain, why) in gains.items() if why}
    if slow:
        best = search.without(best, slow)
    saved = {name: gain for name, (gain, why) in gains.items() if not why}
    return search.chosen(best, saved, slow)


class _Search:
    def __init__(
        self,
        cluster: Cluster,
        prepared: Prepared,
        config: Config,
        compile_: Compile,
        clock: Clock,
    ) -> None:
        self.cluster, self.prepared, self.config = cluster, prepared, config
        self._compile, self._clock = compile_, clock
        self._samples = _few(cluster.samples)
        self._end = clock() + (UNHURRIED_S if config.time_budget is None else SEARCH_S)
        self._compile_s = 0.0

    def variants(self, plans: Iterable[Plan]) -> list[_Variant]:
        """One per plan that keeps the budget; with no time left, or unmeasured, the first one only."""
        made: list[_Variant] = []
        refused: list[Refused] = []
        for plan in plans:
            if made and (not self.config.timing or not self._is_time_for(1)):
                break
            try:
                made.append(self._variant(plan))
            except Refused as refusal:
                if refusal.code != Code.ACCURACY:
                    raise
                refused.append(refusal)
        if not made:
            raise refused[0]
        return made

    def fastest(self, variants: Sequence[_Variant]) -> _Variant:
        """By the geometric mean over the samples."""
        if len(variants) == 1:
            return variants[0]
        runs = [_run(v.engine) for v in variants]
        medians = [[median(s) for s in race(runs, inputs, self._clock)] for inputs in self._samples]
        logs = [mean(log(times[k]) for times in medians) for k in range(len(variants))]
        for variant, value in zip(variants, logs, strict=True):
            shown = self.cluster.name, variant.plan.name, 1e3 * exp(value)
            logger.info("%s: %s quantization takes %.3f ms", *shown)
        return variants[logs.index(min(logs))]

    def gains(self, best: _Variant) -> dict[str, tuple[Gain, str]]:
        """By layer: what it saves at the first sample, and why it is not worth it (or "")."""
        found: dict[str, tuple[Gain, str]] = {}
        whole = _run(best.engine)
        for group in groups_of(self.prepared.layers, best.found.schemes):
            if not self._is_time_for(1) or not self._samples:
                break
            names = {layer.name for layer in group}
            rest = {n: s for n, s in best.found.schemes.items() if n not in names}
            gains = measured_gain(_run(self._compiled(rest)), whole, self._samples, self._clock)
            first = Gain(gains[0].seconds / len(group), gains[0].error / len(group))
            why = "" if is_worth_it(gains) else _no_gain(gains, len(group))
            found.update(dict.fromkeys(names, (first, why)))
        return found

    def without(self, best: _Variant, slow: dict[str, str]) -> _Variant:
        """``best`` less the layers that win no time; what these cost in accuracy others may use."""
        schemes = {n: s for n, s in best.plan.schemes.items() if n not in slow}
        if not schemes:
            raise Refused(
                Code.SLOWER,
                f"None of its {len(slow)} layers is faster in int8: {next(iter(slow.values()))}.",
            )
        return self._variant(replace(best.plan, schemes=schemes))

    def chosen(self, variant: _Variant, saved: dict[str, Gain], slow: dict[str, str]) -> Chosen:
        found, against = variant.found, {**variant.plan.against, **slow}
        reverted = dict.fromkeys(
            found.reverted, f"reverted: with it {self.config.accuracy_budget} does not hold"
        )
        layers = []
        for layer in self.prepared.layers:
            scheme, gain = found.schemes.get(layer.name), saved.get(layer.name)
            alone = found.alone.get(layer.name)
            layers.append(
                LayerPrecision(
                    layer=layer.title,
                    op=layer.kind,
                    precision="fp32" if scheme is None else scheme.precision,
                    error=alone.relative if alone and isfinite(alone.relative) else None,
                    saved_ms=1e3 * gain.seconds if gain and scheme else None,
                    why="" if scheme else {**reverted, **against}.get(layer.name, ""),
                )
            )
        return Chosen(variant.engine, found.schemes, tuple(layers))

    def _variant(self, plan: Plan) -> _Variant:
        if not plan.schemes:
            why = next(iter(plan.against.values()))
            raise Refused(Code.ACCURACY, f"No layer of it can be quantized: {why}.")
        budget = self.config.accuracy_budget.scaled(MARGIN)
        found = within_budget(self.prepared.simulation, plan.schemes, budget)
        return _Variant(plan, found, self._compiled(found.schemes))

    def _compiled(self, schemes: dict[str, Scheme]) -> Any:
        start = self._clock()
        cluster = replace(self.cluster, gm=self.prepared.gm)
        made = self._compile(write(cluster, self.prepared.layers, schemes))
        self._compile_s = max(self._compile_s, self._clock() - start)
        return made

    def _is_time_for(self, compilations: int) -> bool:
        return self._clock() + compilations * self._compile_s < self._end


def _few(samples: Sequence[Inputs]) -> list[Inputs]:
    """The first, the smallest and the largest of ``samples``, each once."""
    if not samples:
        return []
    by_size = sorted(samples, key=lambda inputs: sum(t.numel() for t in inputs))
    chosen = [samples[0], by_size[0], by_size[-1]][:TIMED]
    return list({id(one): one for one in chosen}.values())


def _run(engine: Any) -> Run:
    return lambda inputs: engine.try_execute(list(inputs))


def _no_gain(gains: Sequence[Gain], count: int) -> str:
    saved = ", ".join(f"{1e3 * g.seconds:+.4f} ms (noise {1e3 * g.error:.4f})" for g in gains)
    return f"int8 saves the {count} layers of its form {saved}"
