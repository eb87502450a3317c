# SPDX-License-Identifier: Apache-2.0
"""Try an engine on many inputs against the original subgraph; nothing serves that has not passed.

    verdict = verify(cluster, engine, original, "disc")     # Verdict, or the Reason against it

An engine passes if at every case it answers with the original's dtypes, shapes, layout, NaNs and
infinities, exact ints and bools, and floats about as close to an fp64 run as the original's are
(``compare.allowed``, ``judge``); of a lossy engine, values are held to a budget instead (``lossy``). It may decline a
case (its guard says no, the original serves) except the user's own samples. It must change none of its inputs but
those of ``cluster.updates``, whose new contents count as answers, and must not answer where the original raises.
"""

import copy
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from math import inf
from typing import Any

import torch
from torch.jit._fuser import optimized_execution

from blade.backends.base import Cluster
from blade.budget import AccuracyBudget
from blade.errors import Refused
from blade.fallback import compare, lossy
from blade.fallback.attempt import attempt
from blade.fallback.bounds import in_bounds
from blade.fallback.cases import Case, cases
from blade.fallback.conditioning import moves
from blade.fallback.fp64 import Fp64
from blade.fallback.generators import Generators, may_draw
from blade.fallback.judge import Answer, at, check_errors
from blade.fallback.masked import defined_rows
from blade.fallback.rounded import Rounded
from blade.reason import Code, Reason, Stage
from blade.report import Verdict

log = logging.getLogger(__name__)
Tensors = Sequence[torch.Tensor]
# Why a call went to the original; the counters of these in ``engine.stats()`` tell which it was.
_DECLINED = tuple(c for c in Code if c.value.startswith("guard_")) + (Code.ENGINE_RAISED,)
_ALIGNED = 16  # elements, at whose multiples vectors of any dtype begin
FEW = 64  # elements of what is small
PEERS = 8  # outputs that a small one is held to, at most, where all of them are near
# Ops that read and write wherever their integers say, and one that MKL ends the process in where there is a NaN: other
# contents than the user's may be the last.
_UNCHECKED = (
    *("aten.embedding_bag", "aten._embedding_bag", "aten.linalg_eigvals"),
    # as many steps as a float says, and hours of them where it is large
    *("aten.special_laguerre_polynomial_l", "aten.special_legendre_polynomial_p"),
)

# Ops that take the last axis for dense without looking: what calls them sees to it, and in another layout they answer
# with whatever lies there.
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
    truth: Fp64 | None = None,
) -> Verdict | Reason:
    """The verdict on ``engine``; ``original`` is the subgraph on the same inputs, in TorchScript or FX.

    ``budget``: the engine is lossy, and this is what it may lose. ``derived=False``: at the samples and probes
    alone, where other contents would contradict each other. ``seconds``: what inputs that were not given may take,
    and an fp64 run is made only where engine and original differ by more than may be anyway. ``truth``: ``cluster`` in
    fp64, if that is there (``truth_of_first``).
    """
    with torch.no_grad(), Generators(cluster.gm) as generators:
        drawing = generators.before(original)
        return attempt(
            Stage.VERIFY,
            backend,
            cluster.name,
            lambda: _verify(cluster, engine, drawing, budget, derived, seconds, generators, truth),
            strict,
        )


def _verify(
    cluster: Cluster,
    engine: Any,
    original: Callable[..., Any],
    budget: AccuracyBudget | None,
    derived: bool,
    seconds: float | None,
    generators: Generators,
    truth: Fp64 | None,
) -> Verdict:
    """``generators``: what ``original`` draws, the engine and an fp64 run are to draw, too."""
    answers: list[Answer] = []
    known: list[float] = []
    like: Tensors = ()
    truth = Fp64(cluster.gm, generators.again) if truth is None else truth
    tried = declined = 0
    is_checked = not _has(cluster, _UNCHECKED)
    is_dense = _has(cluster, _DENSE_ROWS)
    limit = inf if seconds is None else seconds
    for case in cases(cluster.samples, cluster.probes, derived and is_checked, limit):
        if is_dense and case.kind == "layout":
            continue
        with in_bounds(*case.inputs) as seen, defined_rows(*case.inputs):
            want = _call(case, original, cluster.updates)
        if want is None:
            if not seen.why:  # by which an engine's kernels on a GPU would stop the device
                _check_raises(case, engine, cluster.updates, generators)
            continue
        tried += 1
        before = engine.stats()
        got = _try(engine, case, cluster.updates, generators)
        if got is None:
            declined += 1
            _check_declined(case, engine, before)
            continue
        if budget is not None:
            answers += _within(budget, case, got, want, like)
            like = like or _layouts(want)
            continue
        _check_form(case, got, want, truth, like)
        like = like or _layouts(want)
        answers += _measure(case, got, want, truth, known, hurry=seconds is not None)
        known = known or _known(answers)

    def wanted(case: Case) -> Tensors | None:
        with in_bounds(*case.inputs), defined_rows(*case.inputs):
            return _call(case, original, cluster.updates) if is_checked else None

    def answers_at(case: Case, outputs: Sequence[int]) -> list[Answer] | None:
        want = wanted(case)
        got = None if want is None else _try(engine, case, cluster.updates, generators)
        if want is None or got is None:
            return None
        _check_form(case, got, want, truth, like)
        return _measure(case, got, want, truth, (), only=outputs)

    def rounded(case: Case, seed: int) -> Tensors | None:
        original = Rounded(cluster.gm, seed, generators.again)
        with in_bounds(*case.inputs), defined_rows(*case.inputs):
            return _call(case, original, cluster.updates) if is_checked else None

    check_errors(answers, answers_at, partial(moves, wanted, rounded))
    return _verdict(answers, tried - declined, declined)


def truth_of_first(cluster: Cluster) -> Fp64 | None:
    """``cluster`` in fp64, which is known at the first sample; ``None`` where it draws numbers, or cannot be had."""
    if any(map(may_draw, cluster.gm.graph.nodes)) or not cluster.samples:
        return None
    [first, *_] = cases(cluster.samples[:1], (), derived=False)
    truth = Fp64(cluster.gm)
    with torch.no_grad():
        found = _truth(first, truth)
    if found is None:
        return None
    truth.remember(first.inputs, found)
    return truth


def _layouts(tensors: Tensors) -> Tensors:
    """Sizes and strides of ``tensors``, without their memory."""
    return [torch.empty_strided(t.shape, t.stride(), device="meta") for t in tensors]


def _check_form(case: Case, got: Tensors, want: Tensors, truth: Fp64, like: Tensors) -> None:
    """``like``: the layouts at the first sample, which outputs may have at sizes that are not the user's too.

    Torch may choose others there, by the meaningless stride of an axis of size 1 or by how large a convolution is.
    What views the sample's result without raising views one that lies as it does.
    """
    # Engines read inputs as if contiguous, and their outputs' strides follow: fine for a layout
    # the model was not sampled with.
    strides = case.kind != "layout"
    like = () if case.kind == "sample" else like
    if compare.form(got, want, strides=strides, like=like):
        truths = _truth(case, truth)
        if sentence := compare.form(got, want, strides=strides, truths=truths, like=like):
            raise Refused(Code.WRONG_VALUES, f"at {at(case)} {sentence}.")


def _has(cluster: Cluster, names: Sequence[str]) -> bool:
    return any(name in op for op in cluster.ops for name in names)


def _call(case: Case, fn: Callable[..., Any], updates: Sequence[int] = ()) -> Tensors | None:
    """What ``fn`` answers on a copy of the inputs, then its ``updates`` of them; ``None`` if it raises."""
    copies = tuple(map(_copy, case.inputs))  # some ops answer by how their inputs lie in memory
    # not the profiling executor, which would specialize anew at the sizes of every case
    with optimized_execution(False):
        result = attempt(
            Stage.VERIFY,
            None,
            case.name,
            lambda: fn(copies) if isinstance(fn, Fp64) else fn(*copies),
        )
    if isinstance(result, Reason):
        return None
    answer = (result,) if isinstance(result, torch.Tensor) else tuple(result)
    return *answer, *(copies[i] for i in updates)


def _truth(case: Case, truth: Fp64) -> Tensors | None:
    """In fp64, where indices computed from floats may be others."""
    if (known := truth.known(case.inputs)) is not None:
        return known
    with in_bounds(*case.inputs):
        return _call(case, truth)


def _try(engine: Any, case: Case, updates: Sequence[int], generators: Generators) -> Tensors | None:
    """The same of the engine; ``None`` if it declines, and then it has changed nothing."""
    given = [_copy(t) for t in case.inputs]
    engine.rearm()
    generators.again()
    got: Tensors | None = engine.try_execute(given)
    for i, (before, after) in enumerate(zip(case.inputs, given, strict=True)):
        if got is not None and i in updates:
            continue
        if compare.form([after], [before]) or not _same(after, before):
            raise Refused(Code.WRONG_VALUES, f"at {at(case)} it changed its input {i}.")
    return None if got is None else (*got, *(given[i] for i in updates))


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """With the very strides, those of a slice or an expanded tensor too (``clone`` makes them dense).

    Of a small part of something large, as what a graph saved for backward is, no more than the part is copied.
    """
    tensor = tensor.detach()
    if tensor.is_conj():  # a copy of what is conjugated or negated when it is read would be dense
        return _copy(tensor.conj()).conj()
    if tensor.is_neg():
        return torch._neg_view(_copy(torch._neg_view(tensor)))
    if tensor.untyped_storage().nbytes() <= 2 * tensor.numel() * tensor.element_size():
        return copy.deepcopy(tensor)
    shape, strides = tensor.shape, tensor.stride()
    last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if tensor.numel() else -1
    first = tensor.storage_offset() % _ALIGNED  # as near to a boundary as it is
    start = tensor.storage_offset() - first
    memory = tensor.as_strided((first + last + 1,), (1,), start).clone()
    return memory.as_strided(shape, strides, first)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def _check_raises(case: Case, engine: Any, updates: Sequence[int], generators: Generators) -> None:
    """Where sizes make the original raise, the engine must decline, so that the user sees it raise.

    Not tried with other contents: an index out of range is nothing to give to an untested engine. Nor
    in another layout: there it is ``view`` that raises, and what it would have shown is no wrong answer.
    """
    is_tried = case.kind not in ("contents", "layout")
    if is_tried and _try(engine, case, updates, generators) is not None:
        raise Refused(
            Code.WRONG_VALUES, f"at {at(case)} it gave an answer where the original raises."
        )


def _check_declined(case: Case, engine: Any, before: dict[str, int]) -> None:
    """Declining is right for a guard; not at the user's own samples, and an accident never is."""
    after = engine.stats()
    codes = [c for c in _DECLINED if after.get(c.value, 0) > before.get(c.value, 0)]
    if Code.ENGINE_RAISED in codes:
        raise Refused(Code.ENGINE_RAISED, f"at {at(case)} it raised: {engine.last_error()}")
    if case.kind == "sample":
        why = ", ".join(code.value for code in codes) or engine.why_unavailable() or "no reason"
        code = codes[0] if codes else Code.DISABLED
        raise Refused(code, f"it does not serve {at(case)}, which is the user's own: {why}.")


def _measure(
    case: Case,
    got: Tensors,
    want: Tensors,
    truth: Fp64,
    known: Sequence[float],
    hurry: bool = False,
    only: Sequence[int] | None = None,
) -> list[Answer]:
    """The errors at ``case``, ``only`` those of these outputs; ``known`` are the original's own at the first
    case, one per output.

    What is as near to the original as the original is to the truth, and rounding, is within twice that
    of the truth (the triangle inequality), which is what is allowed: then fp64 is not run. ``hurry``: nor is it
    for what is within rounding alone of the original, however exact that is, output by output.
    """
    outputs = range(len(want)) if only is None else only
    near = _near(case, got, want, known or [0.0] * len(want), outputs) if known or hurry else {}
    if len(near) == len(outputs):
        return list(near.values())
    far = _in_question(want, near, outputs) if hurry else list(outputs)
    truths: Sequence[torch.Tensor | None] = _truth(case, truth.of(far)) or [None] * len(far)
    scale = max((compare.magnitude(b) for b in want if b.is_floating_point()), default=0.0)
    half = compare.narrowest(truth.graph)
    for i, t in zip(far, truths, strict=True):
        errors = compare.errors(got[i], want[i], t, scale, half)
        is_small = want[i].numel() <= FEW
        near[i] = Answer(case, i, want[i].dtype, errors, is_small=is_small, half=half)
    return [near[i] for i in outputs]


def _near(
    case: Case, got: Tensors, want: Tensors, known: Sequence[float], outputs: Sequence[int]
) -> dict[int, Answer]:
    """The outputs that are so near to the original that its own error alone tells that they are right."""
    found: dict[int, Answer] = {}
    for i in outputs:
        errors, own = compare.errors(got[i], want[i], None), known[i]
        if errors.error <= compare.allowed(want[i].dtype, own) - own:
            found[i] = Answer(case, i, want[i].dtype, errors, is_near=True)
    return found


def _in_question(want: Tensors, near: Collection[int], outputs: Sequence[int]) -> list[int]:
    """The outputs that are not near; where a small one is among them, some of the others to hold it to."""
    far = [i for i in outputs if i not in near]
    if all(want[i].numel() > FEW for i in far):
        return far
    others = sorted((i for i in near if want[i].is_floating_point()), key=lambda i: want[i].numel())
    return sorted([*far, *others[:PEERS]])


def _within(
    budget: AccuracyBudget, case: Case, got: Tensors, want: Tensors, like: Tensors
) -> Iterator[Answer]:
    """The errors of a lossy engine at ``case``; raises where they exceed what may be lost there."""
    like = () if case.kind == "sample" else like
    if sentence := lossy.why_not(budget, case, got, want, like):
        raise Refused(lossy.code_of(case, got, want, like), f"at {at(case)} {sentence}.")
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        if lossy.is_judged(case):
            yield Answer(case, i, b.dtype, compare.errors(a, b, None), is_near=True)


def _known(answers: Sequence[Answer]) -> list[float]:
    """The original's own errors at the one case of ``answers``; empty if fp64 does not tell."""
    own = [a.errors.original_fp64 for a in answers]
    exact = [not (a.dtype.is_floating_point or a.dtype.is_complex) for a in answers]
    if any(e is None and not whole for e, whole in zip(own, exact, strict=True)):
        return []
    return [e or 0.0 for e in own]


def _verdict(answers: Sequence[Answer], checked: int, refused: int) -> Verdict:
    def largest(values: Iterable[float | None]) -> float | None:
        return max((v for v in values if v is not None), default=None)

    return Verdict(
        checked=checked,
        refused=refused,
        error=max((a.errors.error for a in answers), default=0.0),
        error_fp64=largest(a.errors.error_fp64 for a in answers),
        original_error_fp64=largest(a.errors.original_fp64 for a in answers),
    )
