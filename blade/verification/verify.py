# SPDX-License-Identifier: Apache-2.0
"""Try an engine on many inputs against the original subgraph; an engine that fails is never used.

    verdict = verify(cluster, engine, original, "disc")     # Verdict, or the Reason against it

An engine passes if at every case it answers with the original's dtypes, shapes, layout, NaNs and infinities,
exact ints and bools, and floats about as close to an fp64 run as the original's are (``tolerance``,
``check_errors``). Values of a reduced-precision engine are held to a budget instead (``reduced_precision``).
An engine may decline a case (its guard fails, the original serves) except the user's own samples. It must
change none of its inputs but those of ``cluster.updates``, whose new contents count as outputs, must not
answer where the original raises, and must return memory that no later call writes to (``output_ownership``).
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from sys import float_info
from typing import Any

import torch

from blade.config.accuracy import AccuracyBudget
from blade.core.attempt import attempt
from blade.core.cluster import Cluster, has_late_sizes
from blade.core.reason import Code, Reason, Stage
from blade.errors import EngineError, Refused
from blade.process.memory import free_unused
from blade.report import Verdict
from blade.verification import compare, tolerance
from blade.verification import reduced_precision as lossy
from blade.verification.allowed_layouts import AllowedLayouts, Layouts
from blade.verification.attention_semantics import rows_with_keys
from blade.verification.cases import Case, verification_cases
from blade.verification.check_errors import Answer, check_errors, describe_case
from blade.verification.conditioning import perturbation_sensitivity
from blade.verification.copies import copied, layout_of
from blade.verification.derived_inputs import GIVEN, answer, begin, survives
from blade.verification.fingerprint import fingerprint, has
from blade.verification.fp64_reference import Fp64Reference
from blade.verification.generators import Generators
from blade.verification.index_guard import in_bounds
from blade.verification.measure import fp64_reference, known_errors, measure
from blade.verification.original import Held, InTurn, call, outputs_at
from blade.verification.output_ownership import check_fresh
from blade.verification.rng_replay import RngReplay, draws
from blade.verification.rounding_noise import RoundingNoise, perturb_by_ulp
from blade.verification.saved_choices import saved_choices

log = logging.getLogger(__name__)
Tensors = Sequence[torch.Tensor]
# Reasons why a call goes to the original; counters of ``engine.stats()`` have the same names.
_DECLINED = tuple(c for c in Code if c.value.startswith("guard_")) + (Code.ENGINE_RAISED,)
MANY_BYTES = 256 << 20
"""Of a sample on a CPU: with more, and in a hurry, no inputs are derived from it."""
_LENT = 64 << 20  # bytes of inputs on a GPU from which on they are not copied for an engine
_NUDGES = 4  # runs of the original on inputs that are off by some units in the last place,
_NUDGE_ULPS = 4.0  # by so many
# Ops that read and write at unchecked indices, and one that makes MKL end the process at a NaN: contents
# other than the user's may crash.
_UNCHECKED = (
    *("aten.embedding_bag", "aten._embedding_bag", "aten.linalg_eigvals"),
    # a region's image
    *("torchvision.roi_align", "torchvision.roi_pool", "torchvision.ps_roi_"),
    # the number of steps is the value of a float: hours if it is large
    *("aten.special_laguerre_polynomial_l", "aten.special_legendre_polynomial_p"),
)

# Ops that assume a dense last axis without a check: their callers ensure it, and in another layout they read
# the wrong memory.
_DENSE_ROWS = ("aten._scaled_dot_product_flash_attention_for_cpu",)


def verify(
    cluster: Cluster,
    engine: torch.ScriptObject,
    original: Callable[..., Any],
    backend: str,
    strict: bool = False,
    budget: AccuracyBudget | None = None,
    derived: bool = True,
    seconds: float | None = None,
    truth: Fp64Reference | None = None,
    left_out: Collection[str] | None = None,
    own_error: float | None = None,
    saved: Collection[int] = (),
    answers: Sequence[Tensors] = (),
    each: InTurn | None = None,
) -> Verdict | Reason:
    """Return the verdict on ``engine``; ``original`` is the subgraph, in TorchScript or FX.

    ``budget``: the engine has reduced precision, and this bounds its error. ``derived=False``: only the
    samples and probes are tried, where other contents would contradict each other. ``seconds``: the time that
    derived inputs may take; an fp64 run is then made only where engine and original differ by more than
    rounding. ``truth``: the fp64 reference of ``cluster``, if there is one (``reference_of_first``).
    ``left_out``: names of cases at which the original ends the process; by default a forked process finds
    them (``derived_inputs``). ``own_error``: the original's error against fp64, where it is known from an earlier
    verification of the same engine. ``saved``: outputs that forward saves for backward. ``answers``: of
    ``original`` at each sample and probe, where they are known. ``each``: ``original``, whose outputs come as they are
    computed.
    """
    with torch.no_grad(), RngReplay(cluster.gm) as generators:
        drawing = generators.before(original)
        return attempt(
            Stage.VERIFY,
            backend,
            cluster.name,
            lambda: _verify(
                cluster,
                engine,
                drawing,
                budget,
                derived,
                seconds,
                generators,
                truth,
                left_out,
                own_error,
                saved,
                () if draws(cluster.gm) else answers,
                None if each is None else generators.before(each),
            ),
            strict,
        )


def _verify(
    cluster: Cluster,
    engine: Any,
    original: Callable[..., Any],
    budget: AccuracyBudget | None,
    derived: bool,
    seconds: float | None,
    generators: RngReplay,
    truth: Fp64Reference | None,
    left_out: Collection[str] | None,
    own_error: float | None,
    saved: Collection[int],
    given: Sequence[Tensors],
    each: InTurn | None,
) -> Verdict:
    """``generators``: the engine and the fp64 run draw the same random numbers as ``original``. ``given``: its known
    answers."""
    answers: list[Answer] = []
    known: list[float] = []
    allowed = AllowedLayouts(cluster)
    truth = Fp64Reference(cluster.gm, generators.reset) if truth is None else truth
    tried = declined = 0
    is_checked = not _has(cluster, _UNCHECKED)
    choices = saved_choices(cluster.gm, saved)
    kinds = _kinds(cluster)
    if seconds is not None and _bytes_on_cpu(cluster.samples) > MANY_BYTES:
        derived = False  # none would fit in the time: the sample alone is copied for each run
    if derived and left_out is None:
        try_forked(cluster, original)
    limit = inf if seconds is None else seconds
    selects = has_late_sizes(cluster)
    writes = truth.writes or bool(cluster.updates)
    in_turn = None if selects or budget is not None else each
    original_at = partial(
        outputs_at,
        fn=original,
        updates=cluster.updates,
        written=writes,
        each=in_turn,
        draws=draws(cluster.gm),
    )

    def rounded(case: Case, seed: int) -> Tensors | None:
        noisy = RoundingNoise(cluster.gm, seed, generators.reset)
        with in_bounds(*case.inputs), rows_with_keys(*case.inputs):
            return call(case, noisy, cluster.updates, writes) if is_checked else None

    for case in verification_cases(
        cluster.samples, cluster.probes, derived and is_checked, limit, selects
    ):
        if case.kind not in (*GIVEN, *kinds):
            continue
        if not survives(cluster, case) if left_out is None else case.name in left_out:
            continue
        with in_bounds(*case.inputs) as seen, rows_with_keys(*case.inputs):
            early = _given_answer(cluster, case, given)
            if early is None and left_out is None:
                early = answer(cluster, case)
            want = original_at(case) if early is None else Held(early)
        free_unused(case.inputs)
        if want is None:
            if not seen.why:  # otherwise the kernels of an engine would stop the GPU
                _check_raises(case, engine, cluster.updates, generators)
            continue
        tried += 1
        before = engine.stats()
        got = _try(engine, case, cluster.updates, generators)
        if got is None:
            declined += 1
            _check_declined(case, engine, before)
            continue
        like = allowed.of(got)
        if selects or budget is not None:
            assert isinstance(want, Held)
            theirs = want.tensors
            if (
                selects
                and _have_other_sizes(got, theirs)
                and sizes_are_rounded(case, theirs, original)
            ):
                tried -= 1
                continue
        if budget is not None:
            answers += _within(budget, case, got, theirs, like)
            allowed.learn(list(map(layout_of, theirs)))
            continue
        count, hurry = len(got), seconds is not None
        first = [own_error] * count if own_error is not None else known
        first = known or first
        found = measure(case, got, want, truth, first, hurry, None, choices, like, hurry, rounded)
        del want, got  # at the next case, and in a check of conditioning, there are others
        if tried == 1:
            check_fresh(engine, case, cluster.updates)
        answers += found.answers
        allowed.learn(found.layouts)
        truth.forget()
        free_unused(case.inputs)
        known = known or known_errors(found.answers)

    def wanted(case: Case) -> list[torch.Tensor] | None:
        with in_bounds(*case.inputs), rows_with_keys(*case.inputs):
            return call(case, original, cluster.updates, writes) if is_checked else None

    def answers_at(case: Case, outputs: Sequence[int], finite: bool) -> list[Answer] | None:
        if not is_checked:
            return None
        with in_bounds(*case.inputs), rows_with_keys(*case.inputs):
            want = original_at(case, finite=finite)
        got = None if want is None else _try(engine, case, cluster.updates, generators)
        if want is None or got is None:
            return None
        hurry = seconds is not None
        like = allowed.of(got)
        return measure(case, got, want, truth, only=outputs, like=like, float32_first=hurry).answers

    def moves_at(case: Case, outputs: Sequence[int], enough: Sequence[float]) -> Sequence[float]:
        engine.trim()  # it may keep as much memory as the original takes here
        free_unused(case.inputs)
        return perturbation_sensitivity(wanted, rounded, case, outputs, enough)

    check_errors(answers, answers_at, moves_at)
    return _verdict(answers, tried - declined, declined)


def _bytes_on_cpu(samples: Sequence[Tensors]) -> int:
    """Bytes of the largest sample."""
    of_each = (sum(t.nbytes for t in one if t.device.type == "cpu") for one in samples)
    return max(of_each, default=0)


def _given_answer(cluster: Cluster, case: Case, given: Sequence[Tensors]) -> Tensors | None:
    """The one of ``given``, by sample and probe, that is the answer at ``case``."""
    pairs = zip((*cluster.samples, *cluster.probes), given, strict=False)
    return next((found for inputs, found in pairs if inputs is case.inputs), None)


def try_forked(cluster: Cluster, original: Callable[..., Any]) -> None:
    """Start a forked process in which ``original`` runs the derived inputs; return at once."""
    if kinds := _kinds(cluster):
        begin(cluster, lambda case: call(case, original, cluster.updates), kinds)


def _kinds(cluster: Cluster) -> frozenset[str]:
    """Kinds of the cases that are derived for ``cluster``."""
    if _has(cluster, _UNCHECKED):
        return frozenset()
    kinds = frozenset({"size", "contents", "layout"})
    return kinds - {"layout"} if _has(cluster, _DENSE_ROWS) else kinds


def reference_of_first(cluster: Cluster) -> Fp64Reference | None:
    """Return the fp64 reference of ``cluster`` at the first sample; ``None`` if it draws or has none."""
    if draws(cluster.gm) or not cluster.samples:
        return None
    [first, *_] = verification_cases(cluster.samples[:1], (), derived=False)
    truth = Fp64Reference(cluster.gm)
    with torch.no_grad():
        found = fp64_reference(first, truth)
    if found is None:
        return None
    truth.remember(first.inputs, found)
    return truth


def _have_other_sizes(got: Tensors, want: Tensors) -> bool:
    return [t.shape for t in got] != [t.shape for t in want]


def sizes_are_rounded(case: Case, want: Tensors, original: Callable[..., Any]) -> bool:
    """Whether sizes of the original's own results follow the last digits of its inputs.

    A comparison of floats near its threshold selects one element more or less in any other order of
    summation; such a case says nothing about an engine.
    """
    generators = Generators(0)
    for _ in range(_NUDGES):
        nudged = perturb_by_ulp(case.inputs, generators, _NUDGE_ULPS)
        with in_bounds(*nudged), rows_with_keys(*nudged):
            again = call(replace(case, inputs=nudged), original)
        if again is not None and _have_other_sizes(again, want):
            return True
    return False


def _has(cluster: Cluster, names: Sequence[str]) -> bool:
    return any(name in op for op in cluster.ops for name in names)


def _try(
    engine: Any, case: Case, updates: Sequence[int], generators: RngReplay
) -> list[torch.Tensor] | None:
    """Return the engine's outputs and updates; ``None`` if it declines, and then it has changed nothing.

    It gets copies of its inputs, but for large ones on a GPU that it must only read.
    """
    prints = {i: fingerprint(case.inputs[i]) for i in _lent(case.inputs, updates)}
    given = [t.detach() if i in prints else copied(t) for i, t in enumerate(case.inputs)]
    engine.rearm()
    generators.reset()
    got: Tensors | None = engine.try_execute(given)
    for i, (before, after) in enumerate(zip(case.inputs, given, strict=True)):
        if got is not None and i in updates:
            continue
        if i in prints:
            if not has(before, prints[i]):
                raise EngineError(
                    f"An engine wrote to its input {i} while it was verified at {describe_case(case)}: to memory that "
                    f"may be yours, whose contents are lost. Please report this. Until it is mended, name other "
                    f"backends with Config(optimization_pipeline=...)."
                )
        elif compare.why_other_form([after], [before]) or not compare.is_same(after, before):
            raise Refused(Code.WRONG_VALUES, f"at {describe_case(case)} it changed its input {i}.")
    return None if got is None else [*got, *(given[i] for i in updates)]


def _lent(inputs: Tensors, updates: Sequence[int]) -> frozenset[int]:
    """Numbers of the inputs that an engine gets as they are: those of a backward graph are all that forward saved."""
    large = [i for i, t in enumerate(inputs) if t.is_cuda and i not in updates]
    whole = sum(inputs[i].numel() * inputs[i].element_size() for i in large)
    return frozenset(large if whole >= _LENT else ())


def _check_raises(case: Case, engine: Any, updates: Sequence[int], generators: RngReplay) -> None:
    """Where sizes make the original raise, the engine must decline, so that the user sees the exception.

    This is not tried with other contents, as an index out of range is unsafe in an unverified engine, nor in
    another layout, where only ``view`` raises and an answer would not be wrong.
    """
    is_tried = case.kind not in ("contents", "layout")
    if is_tried and _try(engine, case, updates, generators) is not None:
        raise Refused(
            Code.WRONG_VALUES,
            f"at {describe_case(case)} it gave an answer where the original raises.",
        )


def _check_declined(case: Case, engine: Any, before: dict[str, int]) -> None:
    """Raise if the engine declined a sample, or declined for another reason than a guard."""
    after = engine.stats()
    codes = [c for c in _DECLINED if after.get(c.value, 0) > before.get(c.value, 0)]
    if Code.ENGINE_RAISED in codes:
        raise Refused(
            Code.ENGINE_RAISED, f"at {describe_case(case)} it raised: {engine.last_error()}"
        )
    if case.kind == "sample":
        why = ", ".join(code.value for code in codes) or engine.why_unavailable() or "no reason"
        code = codes[0] if codes else Code.DISABLED
        raise Refused(
            code, f"it does not serve {describe_case(case)}, which is the user's own: {why}."
        )


def _within(
    budget: AccuracyBudget, case: Case, got: Tensors, want: Tensors, like: Layouts
) -> Iterator[Answer]:
    """Yield the errors of a reduced-precision engine at ``case``; raise where they exceed the budget."""
    if sentence := lossy.why_not(budget, case, got, want, like):
        raise Refused(lossy.code_of(case, got, want, like), f"at {describe_case(case)} {sentence}.")
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        if lossy.is_value_checked(case):
            yield Answer(case, i, b.dtype, tolerance.errors(a, b, None), is_near=True)


def _verdict(answers: Sequence[Answer], checked: int, refused: int) -> Verdict:
    def largest(values: Iterable[float | None]) -> float | None:
        """A number, which JSON can hold: an error relative to zeros is infinite, and rounding may excuse it."""
        return max((min(v, float_info.max) for v in values if v is not None), default=None)

    return Verdict(
        checked=checked,
        refused=refused,
        error=largest(a.errors.error for a in answers) or 0.0,
        error_fp64=largest(a.errors.error_fp64 for a in answers),
        original_error_fp64=largest(a.errors.original_fp64 for a in answers),
    )
