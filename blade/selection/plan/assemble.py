# SPDX-License-Identifier: Apache-2.0
"""Choose the fastest engine plan for the whole module: engines that are fast alone may be slow together.

    confirmed = fastest_valid_plan(captured, candidate_plans(...), backends, config)     # a ValidatedPlan

Plans are assembled, timed as a whole in turns with the original and each other, and compared with the
recorded answers of the user's model. A plan that is slower than the original is not used.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from blade.capture.equivalence import find_differences
from blade.capture.inputs import Sample
from blade.capture.reference_model import CopiedSample, ModelState, ReferenceModel
from blade.config import Config
from blade.core.attempt import attempt
from blade.core.captured import Captured
from blade.core.pytree import tensors_in
from blade.core.reason import Code, Reason, Stage
from blade.errors import BackendError, Refused, warn_user
from blade.graph.torchscript.listing import check_nodes
from blade.graph.torchscript.splice import clone, splice
from blade.process.timing_lock import TIMING_LOCK
from blade.report import Composed, Timing
from blade.report.interval import speed
from blade.runtime.engine import renew
from blade.selection.plan.candidate import Weights
from blade.selection.plan.compositions import WHOLE, EnginePlan
from blade.selection.plan.labels import add_labels
from blade.timing.decision import MIN_ROUNDS, Outcome, decide_plan, is_faster
from blade.timing.interleaved import Restore, measure, measure_all
from blade.timing.time_budget import UNLIMITED, TimeBudget
from blade.verification.reduced_precision import has_reduced_precision

EAGER_MS = 250.0  # ms per sample, about; eager mode is timed for information only
STALLED = 3.0  # factor to TorchScript's time that eager mode exceeds in disturbed rounds only
UNCLEAR = 0.5  # noise of the ratio of eager to engines beyond which eager's time is not reported
WITHOUT_CHECKS_MS = 1.0  # of an engine, beside which the checks of a path's conditions take no time


@dataclass(frozen=True)
class ValidatedPlan:
    """The module to return; ``tried`` and ``reasons`` cover all plans."""

    module: torch.jit.ScriptModule
    composition: EnginePlan
    tried: tuple[Composed, ...] = ()
    reasons: tuple[Reason, ...] = ()


def fastest_valid_plan(
    captured: Captured,
    compositions: Sequence[EnginePlan],
    backends: Sequence[str],
    config: Config,
    budget: TimeBudget = UNLIMITED,
    seed: bool = True,
) -> ValidatedPlan:
    """Return the fastest plan whose module answers as the user's model does.

    Return the original if none of ``compositions`` is both right and no slower. Among plans as fast as the
    fastest, prefer fewer engines, then the earliest of ``backends``. Out of time, only the first plan is
    measured. ``seed`` as in ``find_differences``.
    """
    first = compositions[0]
    ranks = {name: i for i, name in enumerate(backends)}
    if not first.engines:
        return ValidatedPlan(captured.without_engines, first)
    if not captured.samples:  # no path answers them
        return ValidatedPlan(captured.without_engines, first.without_engines())
    timings: list[tuple[Timing, ...]] = [()] * len(compositions)
    reasons: list[Reason] = []
    if config.timing:
        if budget.is_cancelled:
            return ValidatedPlan(captured.without_engines, first.without_engines())
        compositions = compositions if budget.left() else _first_and_simplest(compositions)
        found = _known(captured, compositions) or _time(captured, compositions, config)
        if isinstance(found, Reason):
            return ValidatedPlan(captured.without_engines, first.without_engines(), (), (found,))
        timings = found
    order = _ranked(compositions, timings, ranks, config.sample_weights)
    for i in order:
        if budget.left():
            timings[i] = _with_eager(captured, compositions[i], timings[i])
        module = assemble(captured, compositions[i], config, seed)
        if isinstance(module, Reason):
            warn_user(f"The optimized module is not used: {module.detail}")
            reasons.append(module)
            continue
        reasons += _against(compositions, timings, i, config.sample_weights)
        return ValidatedPlan(
            module, compositions[i], _tried(compositions, timings, i), tuple(reasons)
        )
    reasons += _against(compositions, timings, None, config.sample_weights)
    tried = _tried(compositions, timings, None)
    return ValidatedPlan(captured.without_engines, first.without_engines(), tried, tuple(reasons))


def _first_and_simplest(compositions: Sequence[EnginePlan]) -> Sequence[EnginePlan]:
    """The first plan, and the one of fewest engines: gains of many clusters are often lost between them."""
    simplest = min(range(len(compositions)), key=lambda i: (len(compositions[i].engines), i))
    return [compositions[i] for i in sorted({0, simplest})]


def _splice(captured: Captured, composition: EnginePlan) -> torch.jit.ScriptModule:
    placed = [
        (choice.built.extracted, choice.module())
        for choice in composition.choices
        if choice.built.extracted is not None and choice.served is not None
    ]
    return splice(captured, placed)


def _known(
    captured: Captured, compositions: Sequence[EnginePlan]
) -> list[tuple[Timing, ...]] | None:
    """Timings of a plan whose one cluster is the whole module, but for checks that take no time beside it: the module
    takes what the cluster takes. Not if the original writes in place what the cluster's copies."""
    if captured.in_place is not None or len(compositions) != 1 or len(compositions[0].choices) != 1:
        return None
    [choice] = compositions[0].choices
    cut, one = choice.built.extracted, choice.chosen
    if cut is None or one is None or one.stored or choice.table is not None:
        return None  # stored timings come from another process
    samples = tuple(range(len(captured.samples)))
    if cut.origins != samples or not one.timings:
        return None
    outside = set(range(len(cut.view.nodes))).difference(cut.nodes)
    if outside and min(t.engine_ms for t in one.timings) < WITHOUT_CHECKS_MS:
        return None
    if not outside <= check_nodes(cut.view):
        return None
    shapes = [tuple(tuple(t.shape) for t in tensors_in(sample)) for sample in captured.samples]
    return [tuple(replace(t, shapes=s) for t, s in zip(one.timings, shapes, strict=True))]


def _time(
    captured: Captured, compositions: Sequence[EnginePlan], config: Config
) -> list[tuple[Timing, ...]] | Reason:
    """Time each plan at each sample. Then discard the modules, which are specialized for the samples."""

    def timed() -> list[tuple[Timing, ...]]:
        original = clone(captured.without_engines)
        modules = [_splice(captured, one) for one in compositions]
        # A single plan of timed engines only has to be confirmed.
        rounds = config.timing_repeats if len(modules) > 1 else MIN_ROUNDS
        state = ModelState(captured.module, original, *modules)
        per_sample = []
        with TIMING_LOCK.timing():
            for sample in captured.samples:
                copies = [CopiedSample(sample) for _ in range(len(modules) + 1)]
                inputs, restore = [one.entries for one in copies], _restorer(state, *copies)
                try:
                    per_sample.append(
                        measure_all(modules, original, inputs, rounds, restore=restore)
                    )
                finally:
                    restore()
        return [tuple(timings) for timings in zip(*per_sample, strict=True)]

    return attempt(Stage.SELECT, None, WHOLE, timed, config.strict, Code.ENGINE_RAISED)


def _restorer(*states: ModelState | CopiedSample) -> Restore:
    """Restore all of ``states``; return whether any had changed."""

    def restore() -> bool:
        changed = [one.restore() for one in states]
        return any(changed)

    return restore


def _with_eager(
    captured: Captured, composition: EnginePlan, timings: tuple[Timing, ...]
) -> tuple[Timing, ...]:
    """Add to ``timings`` the eager time of the user's module, measured in turns with the plan."""
    original = captured.original
    if not timings or not isinstance(original, ReferenceModel):
        return timings

    def timed() -> tuple[Timing, ...]:
        module = _splice(captured, composition)
        state = ModelState(captured.module, module)
        found = []
        with TIMING_LOCK.timing(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for sample, known in zip(captured.samples, timings, strict=True):
                taken = _eager_ms(original, module, state, sample, known)
                found.append(replace(known, eager_ms=taken))
        return tuple(found)

    measured = attempt(Stage.SELECT, None, WHOLE, timed)
    return timings if isinstance(measured, Reason) else measured


def _eager_ms(
    original: ReferenceModel,
    module: torch.jit.ScriptModule,
    state: ModelState,
    sample: Sample,
    known: Timing,
) -> float | None:
    inputs, theirs = CopiedSample(sample), CopiedSample(sample)
    eager = original.eager(tuple(theirs.entries))
    if eager is None:
        return None
    undo = _restorer(state, inputs)

    def restore() -> bool:
        nonlocal eager
        changed = [undo(), original.reset()]
        if theirs.restore():
            eager, changed = original.eager(tuple(theirs.entries)), [True]
        return any(changed)

    def run(*_: Any) -> Any:
        assert eager is not None
        return eager()

    rounds = min(MIN_ROUNDS, max(1, int(EAGER_MS / known.original_ms)))
    limit = 1e-3 * EAGER_MS if rounds > 1 else 0.0  # both have run: of long calls one is enough
    try:
        timing = measure(module, run, inputs.entries, rounds, early_exit_s=limit, restore=restore)
    finally:
        restore()
    return known.engine_ms * timing.speedup if _is_plausible(timing, known) else None


def _is_plausible(eager: Timing, known: Timing) -> bool:
    """Whether the time of eager mode is known: calls that neighbours stall, all alike, show none."""
    if eager.spread >= UNCLEAR:
        return False
    stalled = 2 * eager.disturbed > eager.rounds
    return not stalled or eager.speedup < STALLED * known.speedup


def _ranked(
    compositions: Sequence[EnginePlan],
    timings: Sequence[tuple[Timing, ...]],
    ranks: Mapping[str, int],
    weights: Weights,
) -> list[int]:
    """Indices of the valid plans, best first."""
    left = [i for i, known in enumerate(timings) if not known or decide_plan(known, weights).serves]
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


def assemble(
    captured: Captured, composition: EnginePlan, config: Config, seed: bool = True
) -> torch.jit.ScriptModule | Reason:
    """Assemble the plan for good, if it answers as the user's model does."""

    def made() -> torch.jit.ScriptModule:
        module = _splice(captured, composition)
        add_labels(module, captured)
        # The clusters were verified one by one; this verifies the assembled module.
        lossy = any(has_reduced_precision(name, config) for name in composition.engines.values())
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
    compositions: Sequence[EnginePlan],
    timings: Sequence[tuple[Timing, ...]],
    chosen: int | None,
    weights: Weights,
) -> list[Reason]:
    """Reasons against the plans that are slower than the original, or than the ``chosen`` one."""
    reasons = []
    for i, (one, mine) in enumerate(zip(compositions, timings, strict=False)):
        if not mine:
            continue
        found = decide_plan(mine, weights)
        code, sentence = _CODES.get(found.outcome, Code.NOT_FASTEST), found.sentence
        if found.serves and i == chosen and sentence:
            sentence += " It is kept."
        elif found.serves:
            if i == chosen or chosen is None:
                continue
            (this, _), (best, _) = speed(mine, weights), speed(timings[chosen], weights)
            sentence = f"it is {this:.2f}x the original's speed, {compositions[chosen].name} is {best:.2f}x."
            code = Code.NOT_FASTEST
        detail = f"Put together as {one.name!r} ({_served(one)}), {sentence}"
        reasons.append(Reason(Stage.SELECT, code, None, WHOLE, detail))
    return reasons


_CODES = {Outcome.SLOWER: Code.SLOWER, Outcome.UNCLEAR: Code.TOO_NOISY}


def _served(one: EnginePlan) -> str:
    return ", ".join(f"{cluster}: {backend}" for cluster, backend in one.engines.items())


def _tried(
    compositions: Sequence[EnginePlan], timings: Sequence[tuple[Timing, ...]], chosen: int | None
) -> tuple[Composed, ...]:
    return tuple(
        Composed(one.name, one.engines, timings[i], i == chosen)
        for i, one in enumerate(compositions)
    )
