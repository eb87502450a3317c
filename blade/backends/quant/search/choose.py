# SPDX-License-Identifier: Apache-2.0
"""From plans to the engine: within the accuracy budget, and quantized only where that is faster.

    chosen = choose(cluster, prepared, plans, config, compile_)
    chosen.engine, chosen.layers                    # a LayerPrecision per layer

Every plan that keeps the budget is compiled, and the fastest is kept. Its profile and that of the float
engine show each layer's savings (layer_savings.py). Groups of equal layers without a clear win are reverted
to float, first all, then one by one; a group stays reverted if the cluster is not slower without it.
``SEARCH_S``, or ``UNHURRIED_S`` with ``Config(time_budget=None)``, and the rest of ``Config.time_budget``
bound the search.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from time import perf_counter
from typing import Any

import torch

from blade.backends.quant.analysis.layers import Layer
from blade.backends.quant.analysis.simulate import Inputs, Scheme
from blade.backends.quant.search.cpu_plans import PreparedCluster, QuantPlan
from blade.backends.quant.search.layer_profile import profile_layers
from blade.backends.quant.search.layer_savings import LayerSavings, Profile, measure_savings
from blade.backends.quant.search.within_budget import (
    ErrorsAlone,
    LayerSelection,
    groups_of,
    within_budget,
)
from blade.backends.quant.transforms.insert_qdq import insert_qdq
from blade.config import Config
from blade.core.cluster import Cluster
from blade.core.reason import Code
from blade.errors import Refused
from blade.process.timing_lock import TIMING_LOCK
from blade.report import LayerPrecision, Timing
from blade.report.interval import speed
from blade.timing.interleaved import Clock, Fn, measure, measure_all

logger = logging.getLogger(__name__)
Compile = Callable[[Cluster], Any]
SEARCH_S, UNHURRIED_S = 30.0, 300.0
TIMED = 3  # samples: the first, the smallest, the largest
_FLOATS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
MARGIN = 0.95  # of the budget: rounding differs a little between engines and the simulation


@dataclass(frozen=True)
class ChosenEngine:
    """``engine`` computes the cluster with some layers quantized."""

    engine: Any
    schemes: dict[str, Scheme]
    layers: tuple[LayerPrecision, ...]


@dataclass(frozen=True)
class _CompiledPlan:
    """A compiled plan within the budget."""

    plan: QuantPlan
    found: LayerSelection
    engine: Any


def choose(
    cluster: Cluster,
    prepared: PreparedCluster,
    plans: Iterable[QuantPlan],
    config: Config,
    compile_: Compile,
    clock: Clock = perf_counter,
    profile: Profile = profile_layers,
) -> ChosenEngine:
    """The engine. Raises ``Refused``: ACCURACY if no plan keeps the budget, SLOWER if no layer saves time."""
    search = _PlanSearch(cluster, prepared, config, compile_, clock, profile)
    variants = search.variants(plans)
    if not config.timing or not search.samples or not search.is_time_for(1):
        return search.chosen(variants[0], {}, {})
    best = search.fastest(variants)
    exact = search.compiled({})
    saved = search.saved(exact, best)
    best, slow = search.pruned(best, exact, search.doubtful(best, saved))
    return search.chosen(best, {n: s[0] for n, s in saved.saved.items()}, slow)


class _PlanSearch:
    def __init__(
        self,
        cluster: Cluster,
        prepared: PreparedCluster,
        config: Config,
        compile_: Compile,
        clock: Clock,
        profile: Profile,
    ) -> None:
        self.cluster, self.prepared, self.config = cluster, prepared, config
        self._compile, self._clock, self._profile = compile_, clock, profile
        self.samples = _few(cluster.samples)
        limit = UNHURRIED_S if config.time_budget is None else SEARCH_S
        self._end = clock() + min(limit, config.conversion_deadline_s)
        self._compile_s = 0.0
        self._alone: ErrorsAlone = {}

    def variants(self, plans: Iterable[QuantPlan]) -> list[_CompiledPlan]:
        """One per plan that keeps the budget; only the first without time left or without timing."""
        made: list[_CompiledPlan] = []
        refused: list[Refused] = []
        for plan in plans:
            if made and (not self.config.timing or not self.is_time_for(1)):
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

    def fastest(self, variants: Sequence[_CompiledPlan]) -> _CompiledPlan:
        """By the geometric mean over the samples, against the first one."""
        first, *others = variants
        if not others:
            return first
        runs, rounds = [_run(v.engine) for v in others], self.config.timing_repeats
        with TIMING_LOCK.timing():
            by_sample = [
                measure_all(runs, _run(first.engine), [x] * len(variants), rounds, self._clock)
                for x in self.samples
            ]
        speeds = [1.0, *(speed(timings)[0] for timings in zip(*by_sample, strict=True))]
        for variant, value in zip(variants, speeds, strict=True):
            shown = self.cluster.name, variant.plan.name, value, first.plan.name
            logger.info("%s: %s quantization has %.3f times the speed of %s", *shown)
        return variants[speeds.index(max(speeds))]

    def saved(self, exact: Any, best: _CompiledPlan) -> LayerSavings:
        """The savings of each layer of ``best`` at each sample, from the profiles of both engines."""
        weights = {n: s.weight.values for n, s in best.found.schemes.items()}
        with TIMING_LOCK.timing():
            return measure_savings(
                self.prepared.layers,
                weights,
                exact,
                best.engine,
                self.prepared.simulation,
                self.samples,
                self._profile,
            )

    def doubtful(self, best: _CompiledPlan, saved: LayerSavings) -> list[tuple[Layer, ...]]:
        """The groups of equal layers whose profile does not show a clear win."""
        return saved.doubtful(groups_of(self.prepared.layers, best.found.schemes))

    def pruned(
        self, best: _CompiledPlan, exact: Any, doubtful: Sequence[tuple[Layer, ...]]
    ) -> tuple[_CompiledPlan, dict[str, str]]:
        """``best`` without the layers that save no time, and the reason per layer; faster than ``exact``.

        If several doubtful groups save time together, each one is timed, while there is time.
        """
        slow: dict[str, str] = {}
        if doubtful and (why := self._why_not_worth(best, exact, doubtful)) is not None:
            slow = why
        elif len(doubtful) > 1:
            for group in doubtful:
                if not self.is_time_for(1):
                    break
                slow |= self._why_not_worth(best, exact, [group]) or {}
        if slow:
            best = self.without(best, slow)
        timings = self._timed(exact, best.engine)
        if not is_worth_it(timings):
            raise Refused(
                Code.SLOWER,
                f"With {len(best.found.schemes)} layers in 8 bits it is not faster than in float: "
                f"{_saved_text(timings)}.",
            )
        return best, slow

    def without(self, best: _CompiledPlan, slow: dict[str, str]) -> _CompiledPlan:
        """``best`` without the layers that save no time; others may use their share of the budget."""
        schemes = {n: s for n, s in best.plan.schemes.items() if n not in slow}
        if not schemes:
            raise Refused(
                Code.SLOWER,
                f"None of its {len(slow)} layers is faster in 8 bits: {next(iter(slow.values()))}.",
            )
        return self._variant(replace(best.plan, schemes=schemes))

    def chosen(
        self, variant: _CompiledPlan, saved: dict[str, float], slow: dict[str, str]
    ) -> ChosenEngine:
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
                    precision=_FLOATS[layer.weight.dtype] if scheme is None else scheme.precision,
                    error=alone.relative if alone and isfinite(alone.relative) else None,
                    saved_ms=1e3 * gain if gain is not None and scheme else None,
                    why="" if scheme else {**reverted, **against}.get(layer.name, ""),
                )
            )
        return ChosenEngine(variant.engine, found.schemes, tuple(layers))

    def _why_not_worth(
        self, best: _CompiledPlan, exact: Any, groups: Sequence[tuple[Layer, ...]]
    ) -> dict[str, str] | None:
        """Reasons to revert ``groups``, by layer; ``None`` if the cluster is slower without them."""
        names = {layer.name for group in groups for layer in group}
        rest = {n: s for n, s in best.found.schemes.items() if n not in names}
        timings = self._timed(self.compiled(rest) if rest else exact, best.engine)
        if is_worth_it(timings):
            return None
        others = f" and {len(names) - 1} layers measured with it" if len(names) > 1 else ""
        return dict.fromkeys(names, f"quantizing saves it{others} {_saved_text(timings)}")

    def _timed(self, without: Any, whole: Any) -> tuple[Timing, ...]:
        """``whole`` against ``without`` at each sample."""
        sides, rounds = (_run(whole), _run(without)), self.config.timing_repeats
        with TIMING_LOCK.timing():
            return tuple(measure(*sides, inputs, rounds, self._clock) for inputs in self.samples)

    def _variant(self, plan: QuantPlan) -> _CompiledPlan:
        if not plan.schemes:
            why = next(iter(plan.against.values()))
            raise Refused(Code.ACCURACY, f"No layer of it can be quantized: {why}.")
        budget = self.config.accuracy_budget.scaled(MARGIN)
        found = within_budget(self.prepared.simulation, plan.schemes, budget, self._alone)
        return _CompiledPlan(plan, found, self.compiled(found.schemes))

    def compiled(self, schemes: dict[str, Scheme]) -> Any:
        start = self._clock()
        cluster = replace(self.cluster, gm=self.prepared.gm)
        made = self._compile(insert_qdq(cluster, self.prepared.layers, schemes))
        self._compile_s = max(self._compile_s, self._clock() - start)
        return made

    def is_time_for(self, compilations: int) -> bool:
        return self._clock() + compilations * self._compile_s < self._end


def _few(samples: Sequence[Inputs]) -> list[Inputs]:
    """The first, the smallest and the largest of ``samples``, each once."""
    if not samples:
        return []
    by_size = sorted(samples, key=lambda inputs: sum(t.numel() for t in inputs))
    chosen = [samples[0], by_size[0], by_size[-1]][:TIMED]
    return list({id(one): one for one in chosen}.values())


def is_worth_it(timings: Sequence[Timing]) -> bool:
    """Whether time is won at some sample and lost at none, by more than noise."""
    lost = any(t.speedup * (1 + t.spread) < 1 for t in timings)
    return any(t.speedup > 1 + t.shortfall for t in timings) and not lost


def _run(engine: Any) -> Fn:
    return lambda *inputs: engine.try_execute(list(inputs))


def _saved_text(timings: Sequence[Timing]) -> str:
    """What is saved at each sample, and by how much less that may be; a gain exceeds that."""
    saved = [(t.original_ms, t.engine_ms, t.original_ms / (1 + t.shortfall)) for t in timings]
    return ", ".join(f"{o - e:+.4f} ms (noise {o - low:.4f})" for o, e, low in saved)
