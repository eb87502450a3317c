# SPDX-License-Identifier: Apache-2.0
"""Which clusters with which engines make the whole module fastest: what is fast alone may not be together.

    confirmed = confirm(captured, propose(...), backends, config)     # a module, and what speaks for it

Compositions are put together, timed as a whole in turns with the original and each other, and compared with
what the user's model answered. One that is slower than the original does not serve.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from blade.capture.captured import Captured
from blade.capture.compare import find_differences
from blade.capture.original import State, copy_of
from blade.config import Config
from blade.errors import BackendError, Refused
from blade.fallback.attempt import attempt
from blade.fallback.candidate import Weights
from blade.fallback.lossy import is_lossy
from blade.fallback.measure import (
    MIN_ROUNDS,
    is_faster,
    measure_all,
    speed,
    why_clearly_slower,
)
from blade.fallback.propose import WHOLE, Composition
from blade.fallback.time_budget import UNLIMITED, TimeBudget
from blade.graph.leaves import tensors_in
from blade.graph.splice import clone, splice
from blade.reason import Code, Reason, Stage
from blade.report import Composed, Timing
from blade.runtime.engine import renew
from blade.turns import TURNS

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Confirmed:
    """The module to hand out; ``tried`` and ``reasons`` tell of all compositions."""

    module: torch.jit.ScriptModule
    composition: Composition
    tried: tuple[Composed, ...] = ()
    reasons: tuple[Reason, ...] = ()


def confirm(
    captured: Captured,
    compositions: Sequence[Composition],
    backends: Sequence[str],
    config: Config,
    budget: TimeBudget = UNLIMITED,
    seed: bool = True,
) -> Confirmed:
    """The fastest composition as a module that was seen to answer as the user's model does.

    The original if none of ``compositions`` is right and no slower. Of those as fast as the fastest
    the one of fewest engines, then of the earliest ``backends``. Out of time, only the first is measured.
    ``seed`` as in ``find_differences``.
    """
    first = compositions[0]
    ranks = {name: i for i, name in enumerate(backends)}
    if not first.engines:
        return Confirmed(captured.module, first)
    timings: list[tuple[Timing, ...]] = [()] * len(compositions)
    reasons: list[Reason] = []
    if config.timing:
        if budget.is_cancelled:
            return Confirmed(captured.module, first.without_engines())
        compositions = compositions if budget.left() else _first_and_simplest(compositions)
        found = _known(captured, compositions) or _time(captured, compositions, config)
        if isinstance(found, Reason):
            return Confirmed(captured.module, first.without_engines(), (), (found,))
        timings = found
    order = _rank(compositions, timings, ranks, config.sample_weights)
    for i in order:
        module = put_together(captured, compositions[i], config, seed)
        if isinstance(module, Reason):
            log.warning("the optimized module is not used: %s", module.detail)
            reasons.append(module)
            continue
        reasons += _against(compositions, timings, i, config.sample_weights)
        return Confirmed(module, compositions[i], _tried(compositions, timings, i), tuple(reasons))
    reasons += _against(compositions, timings, None, config.sample_weights)
    tried = _tried(compositions, timings, None)
    return Confirmed(captured.module, first.without_engines(), tried, tuple(reasons))


def _first_and_simplest(compositions: Sequence[Composition]) -> Sequence[Composition]:
    """What many clusters save by their own timings, one by one, is often lost between them."""
    simplest = min(range(len(compositions)), key=lambda i: (len(compositions[i].engines), i))
    return [compositions[i] for i in sorted({0, simplest})]


def _splice(captured: Captured, composition: Composition) -> torch.jit.ScriptModule:
    placed = [
        (choice.built.extracted, choice.module())
        for choice in composition.choices
        if choice.built.extracted is not None and choice.served is not None
    ]
    return splice(captured, placed)


def _known(
    captured: Captured, compositions: Sequence[Composition]
) -> list[tuple[Timing, ...]] | None:
    """Of the one cluster that is all of the module: together with nothing it takes what it took alone."""
    if len(compositions) != 1 or len(compositions[0].choices) != 1:
        return None
    [choice] = compositions[0].choices
    cut, one = choice.built.extracted, choice.chosen
    if cut is None or one is None or one.stored or choice.table is not None:
        return None  # stored timings are another process's
    samples = tuple(range(len(captured.samples)))
    if len(cut.nodes) != len(cut.view.nodes) or cut.origins != samples or not one.timings:
        return None
    shapes = [tuple(tuple(t.shape) for t in tensors_in(sample)) for sample in captured.samples]
    return [tuple(replace(t, shapes=s) for t, s in zip(one.timings, shapes, strict=True))]


def _time(
    captured: Captured, compositions: Sequence[Composition], config: Config
) -> list[tuple[Timing, ...]] | Reason:
    """Of each composition at each sample. What is measured is thrown away: it would keep the sizes
    that it was specialized for."""

    def timed() -> list[tuple[Timing, ...]]:
        original = clone(captured.module)
        modules = [_splice(captured, one) for one in compositions]
        # One composition of measured engines only has to be confirmed.
        rounds = config.timing_repeats if len(modules) > 1 else MIN_ROUNDS
        state = State(captured.module)
        per_sample = []
        with TURNS.timing():
            for sample in captured.samples:
                inputs: list[Any] = [copy_of(sample) for _ in range(len(modules) + 1)]
                per_sample.append(measure_all(modules, original, inputs, rounds))
        state.restore()
        return [tuple(timings) for timings in zip(*per_sample, strict=True)]

    return attempt(Stage.SELECT, None, WHOLE, timed, config.strict, Code.ENGINE_RAISED)


def _rank(
    compositions: Sequence[Composition],
    timings: Sequence[tuple[Timing, ...]],
    ranks: Mapping[str, int],
    weights: Weights,
) -> list[int]:
    """Those that may serve, best first."""
    left = [i for i, one in enumerate(compositions) if _why_not(timings[i], weights) is None]
    if not timings[0]:
        return left
    speeds = [speed(one, weights) for one in timings]

    def simplicity(i: int) -> tuple[int, int, int]:
        used = [name for one in compositions[i].engines.values() for name in one.split("+")]
        return len(used), sum(ranks.get(name, 0) for name in used), i

    order = []
    while left:
        top = max(speeds[i] for i in left)
        best = min((i for i in left if not is_faster(top, speeds[i])), key=simplicity)
        order.append(best)
        left.remove(best)
    return order


def _why_not(timings: Sequence[Timing], weights: Weights) -> str | None:
    """Its clusters won by more than noise; here they only must not lose that again."""
    if not timings:
        return None
    if (sentence := why_clearly_slower(timings)) is not None:
        return sentence
    mean, noise = speed(timings, weights)
    if mean * (1 + noise) < 1:
        return f"its speed is {mean:.2f}x the original's on the geometric mean (noise {noise:.1%})."
    return None


def put_together(
    captured: Captured, composition: Composition, config: Config, seed: bool = True
) -> torch.jit.ScriptModule | Reason:
    """Put together for good, if it answers as the user's model does."""

    def made() -> torch.jit.ScriptModule:
        module = _splice(captured, composition)
        # The clusters were verified one by one; this is about how they were put together.
        lossy = any(is_lossy(name, config) for name in composition.engines.values())
        budget = config.accuracy_budget if lossy else None
        references, original = captured.references, captured.original
        for one, why in find_differences(module, references, budget, seed, original):
            sentence = f"put together, at {one.what} the module differs from the original: {why}"
            raise Refused(Code.ACCURACY, sentence) if lossy else BackendError(sentence)
        for choice in composition.choices:
            for engine in choice.served.engines if choice.served is not None else ():
                renew(engine)
        return module

    return attempt(Stage.VERIFY, None, WHOLE, made, config.strict, Code.WRONG_VALUES)


def _against(
    compositions: Sequence[Composition],
    timings: Sequence[tuple[Timing, ...]],
    chosen: int | None,
    weights: Weights,
) -> list[Reason]:
    """Why not the compositions that are slower than the original, or than the one that was ``chosen``."""
    reasons = []
    for i, (one, mine) in enumerate(zip(compositions, timings, strict=False)):
        sentence = _why_not(mine, weights)
        if sentence is None and (i == chosen or chosen is None or not mine):
            continue
        if sentence is None:
            assert chosen is not None
            (this, _), (best, _) = speed(mine, weights), speed(timings[chosen], weights)
            sentence = f"it is {this:.2f}x the original's speed, {compositions[chosen].name} is {best:.2f}x."
        detail = f"Put together as {one.name!r} ({_served(one)}), {sentence}"
        reasons.append(Reason(Stage.SELECT, Code.SLOWER, None, WHOLE, detail))
    return reasons


def _served(one: Composition) -> str:
    return ", ".join(f"{cluster}: {backend}" for cluster, backend in one.engines.items())


def _tried(
    compositions: Sequence[Composition], timings: Sequence[tuple[Timing, ...]], chosen: int | None
) -> tuple[Composed, ...]:
    return tuple(
        Composed(one.name, one.engines, timings[i], i == chosen)
        for i, one in enumerate(compositions)
    )
