# SPDX-License-Identifier: Apache-2.0
"""Measure the outputs of an engine at a case: against the original, and where that leaves a question, against fp64.

    answers = measure(case, got, want, truth, known)
    answers = measure_in_turn(case, got, original, truth)      # without all of ``want`` at a time

An output that is as near to the original as the original is to the fp64 reference, plus rounding, is within twice that
of the reference (the triangle inequality). This is the tolerance, so fp64 is not run.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, TypeVar

import torch

from blade.core import torchscript
from blade.core.attempt import attempt
from blade.core.reason import Reason, Stage
from blade.process.memory import freeing_unused
from blade.timing.free_cpus import on_free_cpus
from blade.verification import compare, tolerance
from blade.verification.attention_semantics import rows_with_keys
from blade.verification.cases import Case
from blade.verification.check_errors import Answer
from blade.verification.copies import copy_of
from blade.verification.fp64_reference import Fp64Reference
from blade.verification.index_guard import in_bounds
from blade.verification.output_by_output import OutputByOutput

Tensors = Sequence[torch.Tensor]
T = TypeVar("T")
PEERS = 8  # the most outputs that a small one is compared with, where all of them are near
_LET_GO = torch.empty(0)


def fp64_outputs(case: Case, truth: Fp64Reference) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the outputs in fp64 by number, as they are computed; nothing from an op on that raises."""
    if (known := truth.known(case.inputs)) is not None:
        yield from enumerate(known)
        return
    outputs = truth.each(tuple(map(copy_of, case.inputs)) if truth.writes else case.inputs)
    yield from _tried(case, outputs)


def measure(
    case: Case,
    got: list[torch.Tensor],
    want: list[torch.Tensor],
    truth: Fp64Reference,
    known: Sequence[float],
    hurry: bool = False,
    only: Sequence[int] | None = None,
    choices: Collection[int] = (),
    scale: float | None = None,
) -> list[Answer]:
    """Return the errors at ``case``, ``only`` those of these outputs; ``known`` are the original's own at the
    first case, one per output. Each tensor of ``got`` and ``want`` is let go of once it is measured.

    ``hurry``: fp64 is not run either, output by output, where the difference to the original is within
    rounding alone. ``choices``: outputs whose error is the share that differs (``saved_choices``). ``scale``: the
    largest magnitude of all outputs of the original, if it is known.
    """
    outputs = range(len(want)) if only is None else only
    near: dict[int, Answer] = {}
    for i in outputs if known or hurry else ():
        if (one := _near(case, i, got[i], want[i], known[i] if known else 0.0)) is not None:
            near[i] = one
    if len(near) == len(outputs):
        return list(near.values())
    far = _in_question(want, near, outputs) if hurry else list(outputs)
    scale = _scale(want) if scale is None else scale
    half = tolerance.narrowest(truth.graph)
    for i in set(range(len(want))).difference(far):
        got[i] = want[i] = _LET_GO

    def measured(i: int, t: torch.Tensor | None) -> Answer:
        found = _measured(case, i, got[i], want[i], t, scale, half, i in choices)
        got[i] = want[i] = _LET_GO
        return found

    for k, t in fp64_outputs(case, truth.of(far)):
        near[far[k]] = measured(far[k], t)
    near.update({i: measured(i, None) for i in far if i not in near})
    return [near[i] for i in outputs]


@dataclass(frozen=True)
class InTurn:
    """``layouts``: of the original's outputs, without their memory."""

    answers: list[Answer]
    layouts: Tensors


def measure_in_turn(
    case: Case,
    got: Tensors,
    original: OutputByOutput,
    truth: Fp64Reference,
    choices: Collection[int] = (),
    own: float = 0.0,
) -> InTurn | None:
    """``measure`` in a hurry, with one output of the original in memory at a time; in training they are all that it
    saves.

    ``own``: the original's own error, if it is known. For the outputs in question the original runs again, beside fp64.
    ``None`` where it raises, or where an output has another form: ``measure`` finds out more.
    """
    near: dict[int, Answer] = {}
    scale, count = 0.0, original.count
    seen: dict[int, torch.Tensor] = {}
    for i, w in _of_original(case, original):
        if i >= len(got) or compare.why_other_form([got[i]], [w]):
            return None
        seen[i] = layout_of(w)
        if (one := _near(case, i, got[i], w, own)) is not None:
            near[i] = one
        scale = max(scale, _scale([w]))
        del w
    if not len(seen) == len(got) == count:
        return None
    layouts = [seen[i] for i in range(count)]
    far = _in_question(layouts, near, range(count)) if len(near) < count else []
    half = tolerance.narrowest(truth.graph)

    def measured(i: int, w: torch.Tensor, t: torch.Tensor | None) -> Answer:
        return _measured(case, i, got[i], w, t, scale, half, i in choices)

    if far:
        again, exact = _of_original(case, original.of(far)), fp64_outputs(case, truth.of(far))
        for k, w, t in _paired(again, exact):
            near[far[k]] = measured(far[k], w, t)
            del w, t
    if left := [i for i in far if i not in near]:  # an op of theirs raises in fp64
        for k, w in _of_original(case, original.of(left)):
            near[left[k]] = measured(left[k], w, None)
            del w
    if len(near) < count:
        return None
    return InTurn([near[i] for i in range(count)], layouts)


@dataclass(frozen=True)
class Chosen:
    """``outputs`` of the original, in their places; ``scale``: the largest magnitude of all of them."""

    outputs: list[torch.Tensor]
    scale: float
    are_finite: bool


def chosen_in_turn(case: Case, original: OutputByOutput, outputs: Collection[int]) -> Chosen | None:
    """The original's ``outputs``, with one of the others in memory at a time; ``None`` where it raises."""
    want = [_LET_GO] * original.count
    scale, finite, seen = 0.0, True, 0
    for i, w in _of_original(case, original):
        seen += 1
        scale = max(scale, _scale([w]))
        finite &= not w.is_floating_point() or isfinite(tolerance.largest_of(w))
        if i in outputs:
            want[i] = w
        del w
    return Chosen(want, scale, finite) if seen == original.count else None


def layout_of(tensor: torch.Tensor) -> torch.Tensor:
    """Size, strides and dtype of ``tensor``, without its memory."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _of_original(case: Case, original: OutputByOutput) -> Iterator[tuple[int, torch.Tensor]]:
    return _tried(case, original.each(case.inputs), rows_with_keys)


def _paired(
    one: Iterator[tuple[int, torch.Tensor]], other: Iterator[tuple[int, torch.Tensor]]
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield what both have of a number, as soon as they do; their orders are nearly the same."""
    left: dict[int, torch.Tensor] = {}
    right: dict[int, torch.Tensor] = {}
    for (i, a), (k, b) in zip(one, other, strict=False):
        left[i], right[k] = a, b
        del a, b
        for number in {i, k}:
            if number in left and number in right:
                yield number, left.pop(number), right.pop(number)


def _no_mode(*inputs: torch.Tensor) -> AbstractContextManager[None]:
    return nullcontext()


def _tried(
    case: Case, outputs: Iterator[T], mode: Callable[..., AbstractContextManager[Any]] = _no_mode
) -> Iterator[T]:
    """Yield ``outputs``, each computed as verification does; no more once an op raises."""
    inputs = case.inputs

    def compute() -> T | None:
        with torchscript.unoptimized(), on_free_cpus(), freeing_unused(inputs):
            return next(outputs, None)

    def computed() -> T | None:
        with in_bounds(*inputs), mode(*inputs):
            return compute()

    while True:
        found = attempt(Stage.VERIFY, None, case.name, computed)
        if found is None or isinstance(found, Reason):
            return
        yield found
        del found


def _measured(
    case: Case,
    i: int,
    got: torch.Tensor,
    want: torch.Tensor,
    truth: torch.Tensor | None,
    scale: float,
    half: torch.dtype | None,
    is_choice: bool,
) -> Answer:
    errors = tolerance.errors(got, want, truth, scale, half)
    found = Answer(case, i, want.dtype, errors, half=half, **_smallness(want))
    if is_choice and errors.error:
        share = tolerance.share_apart(got, want)
        found = replace(found, errors=replace(errors, error=share), is_choice=True)
    return found


def _near(case: Case, i: int, got: torch.Tensor, want: torch.Tensor, own: float) -> Answer | None:
    """Return the answer if it is so near to the original that the original's own error proves it right."""
    errors = tolerance.errors(got, want, None)
    if not errors.error <= tolerance.allowed(want.dtype, own) - own:
        return None
    return Answer(case, i, want.dtype, errors, is_near=True, **_smallness(want))


def _smallness(want: torch.Tensor) -> dict[str, Any]:
    """Whether an output is of few elements, and then its magnitude."""
    if want.numel() > tolerance.FEW or not want.is_floating_point():
        return {}
    return {"is_small": True, "magnitude": tolerance.magnitude(want)}


def _scale(want: Tensors) -> float:
    return max((tolerance.magnitude(b) for b in want if b.is_floating_point()), default=0.0)


def _in_question(want: Tensors, near: Collection[int], outputs: Sequence[int]) -> list[int]:
    """Return the outputs that are not near, and, for small ones among them, some others to compare with."""
    far = [i for i in outputs if i not in near]
    if all(want[i].numel() > tolerance.FEW for i in far):
        return far
    others = sorted((i for i in near if want[i].is_floating_point()), key=lambda i: want[i].numel())
    return sorted([*far, *others[:PEERS]])
