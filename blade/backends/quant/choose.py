# SPDX-License-Identifier: Apache-2.0
"""From plans to the engine that serves: within the budget, and fast where it is quantized.

    chosen = choose(cluster, prepared, plans, config, compile_)
    chosen.engine, chosen.layers                    # a LayerPrecision of each layer

Every plan that keeps the budget is compiled, and the fastest is kept. Profiles of it and of the float engine
tell what each layer saves (``worth``). The groups of equal layers that do not clearly win are put back to
float, all of them first, then one by one; what the cluster is no slower without is not quantized. What
that takes is bounded by ``SEARCH_S``, or ``UNHURRIED_S`` with ``Config(time_budget=None)``, and by what
``Config.time_budget`` has left.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import exp, isfinite, log
from statistics import mean, median
from time import perf_counter
from typing import Any

import torch

from blade.backends.base import Cluster
from blade.backends.quant.layers import Layer
from blade.backends.quant.plans import Plan, Prepared
from blade.backends.quant.search import Alone, Found, groups_of, within_budget
from blade.backends.quant.shares import layer_seconds
from blade.backends.quant.simulate import Inputs, Scheme
from blade.backends.quant.timing import Clock, Gain, Run, is_worth_it, measured_gain, race
from blade.backends.quant.worth import Profile, Worth, weigh
from blade.backends.quant.write import write
from blade.config import Config
from blade.errors import Refused
from blade.reason import Code
from blade.report import LayerPrecision
from blade.turns import TURNS

logger = logging.getLogger(__name__)
Compile = Callable[[Cluster], Any]
SEARCH_S, UNHURRIED_S = 30.0, 300.0
TIMED = 3  # samples: the first, the smallest, the largest
_FLOATS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
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
    profile: Profile = layer_seconds,
) -> Chosen:
    """Raises ``Refused``: ACCURACY if no plan keeps the budget, SLOWER if no layer wins time."""
    search = _Search(cluster, prepared, config, compile_, clock, profile)
    variants = search.variants(plans)
    if not config.timing or not search.samples or not search.is_time_for(1):
        return search.chosen(variants[0], {}, {})
    best = search.fastest(variants)
    exact = search.compiled({})
    saved = search.saved(exact, best)
    best, slow = search.pruned(best, exact, search.doubtful(best, saved))
    return search.chosen(best, {n: s[0] for n, s in saved.saved.items()}, slow)


class _Search:
    def __init__(
        self,
        cluster: Cluster,
        prepared: Prepared,
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
        self._alone: Alone = {}

    def variants(self, plans: Iterable[Plan]) -> list[_Variant]:
        """One per plan that keeps the budget; with no time left, or unmeasured, the first one only."""
        made: list[_Variant] = []
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

    def fastest(self, variants: Sequence[_Variant]) -> _Variant:
        """By the geometric mean over the samples."""
        if len(variants) == 1:
            return variants[0]
        runs = [_run(v.engine) for v in variants]
        with TURNS.timing():
            races = [race(runs, inputs, self._clock) for inputs in self.samples]
        medians = [[median(seconds) for seconds in one] for one in races]
        logs = [mean(log(times[k]) for times in medians) for k in range(len(variants))]
        for variant, value in zip(variants, logs, strict=True):
            shown = self.cluster.name, variant.plan.name, 1e3 * exp(value)
            logger.info("%s: %s quantization takes %.3f ms", *shown)
        return variants[logs.index(min(logs))]

    def saved(self, exact: Any, best: _Variant) -> Worth:
        """What each layer of ``best`` saves at each sample, by the profiles of both engines."""
        weights = {n: s.weight.values for n, s in best.found.schemes.items()}
        with TURNS.timing():
            return weigh(
                self.prepared.layers,
                weights,
                exact,
                best.engine,
                self.prepared.simulation,
                self.samples,
                self._profile,
            )

    def doubtful(self, best: _Variant, saved: Worth) -> list[tuple[Layer, ...]]:
        """The groups of equal layers whose profile does not show a clear win."""
        return saved.doubtful(groups_of(self.prepared.layers, best.found.schemes))

    def pruned(
        self, best: _Variant, exact: Any, doubtful: Sequence[tuple[Layer, ...]]
    ) -> tuple[_Variant, dict[str, str]]:
        """``best`` less what wins no time, and why by layer; faster than ``exact``.

        Of several doubtful groups that win something together each one is measured, while there is time.
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
        gains = self._gains(exact, best.engine)
        if not is_worth_it(gains):
            raise Refused(
                Code.SLOWER,
                f"With {len(best.found.schemes)} layers in 8 bits it is not faster than in float: "
                f"{_no_gain(gains)}.",
            )
        return best, slow

    def without(self, best: _Variant, slow: dict[str, str]) -> _Variant:
        """``best`` less the layers that win no time; what these cost in accuracy others may use."""
        schemes = {n: s for n, s in best.plan.schemes.items() if n not in slow}
        if not schemes:
            raise Refused(
                Code.SLOWER,
                f"None of its {len(slow)} layers is faster in 8 bits: {next(iter(slow.values()))}.",
            )
        return self._variant(replace(best.plan, schemes=schemes))

    def chosen(self, variant: _Variant, saved: dict[str, float], slow: dict[str, str]) -> Chosen:
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
        return Chosen(variant.engine, found.schemes, tuple(layers))

    def _why_not_worth(
        self, best: _Variant, exact: Any, groups: Sequence[tuple[Layer, ...]]
    ) -> dict[str, str] | None:
        """By layer of ``groups``, what they cost together; ``None`` if the cluster is slower without them."""
        names = {layer.name for group in groups for layer in group}
        rest = {n: s for n, s in best.found.schemes.items() if n not in names}
        gains = self._gains(self.compiled(rest) if rest else exact, best.engine)
        if is_worth_it(gains):
            return None
        others = f" and {len(names) - 1} layers measured with it" if len(names) > 1 else ""
        return dict.fromkeys(names, f"quantizing saves it{others} {_no_gain(gains)}")

    def _gains(self, without: Any, whole: Any) -> tuple[Gain, ...]:
        with TURNS.timing():
            return measured_gain(_run(without), _run(whole), self.samples, self._clock)

    def _variant(self, plan: Plan) -> _Variant:
        if not plan.schemes:
            why = next(iter(plan.against.values()))
            raise Refused(Code.ACCURACY, f"No layer of it can be quantized: {why}.")
        budget = self.config.accuracy_budget.scaled(MARGIN)
        found = within_budget(self.prepared.simulation, plan.schemes, budget, self._alone)
        return _Variant(plan, found, self.compiled(found.schemes))

    def compiled(self, schemes: dict[str, Scheme]) -> Any:
        start = self._clock()
        cluster = replace(self.cluster, gm=self.prepared.gm)
        made = self._compile(write(cluster, self.prepared.layers, schemes))
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


def _run(engine: Any) -> Run:
    return lambda inputs: engine.try_execute(list(inputs))


def _no_gain(gains: Sequence[Gain]) -> str:
    return ", ".join(f"{1e3 * g.seconds:+.4f} ms (noise {1e3 * g.error:.4f})" for g in gains)
