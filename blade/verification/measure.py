# SPDX-License-Identifier: Apache-2.0
"""Measure the outputs of an engine at one case, one by one: their form first, then their errors.

    found = measure(case, got, outputs_at(case, original), truth, known)
    found.answers, found.layouts

In training the outputs are all that forward saves, in each of two answers. So the original's may come as they are
computed, and both are let go of where they are near.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from blade.core.dtypes import HALVES
from blade.core.reason import Code
from blade.errors import Refused
from blade.timing.free_cpus import on_free_cpus
from blade.verification import compare, tolerance
from blade.verification.allowed_layouts import Layouts
from blade.verification.cases import Case
from blade.verification.check_errors import Answer, describe_case
from blade.verification.conditioning import DRAWS, may_be_ill_conditioned
from blade.verification.copies import copied, layout_of
from blade.verification.each_guarded import each_guarded
from blade.verification.fp64_reference import Fp64Reference
from blade.verification.index_guard import in_bounds
from blade.verification.original import Outputs, are_finite
from blade.verification.tolerance import RelativeErrors

Tensors = Sequence[torch.Tensor]
PEERS = 8  # the most outputs that a small one is compared with, where all of them are near
_LET_GO = torch.empty(0)
_BY_FLOAT32 = (*HALVES, torch.float32)
_COARSE = 1e-4  # an error of a float32 result that stems from 16 bits: 100 roundings and more
_LARGE = 1 << 20  # bytes of an output that is let go of as soon as it is found near

Rounded = Callable[[Case, int], Tensors | None]


@dataclass(frozen=True)
class Measured:
    """``layouts``: sizes and strides of the original's outputs, without their memory."""

    answers: list[Answer]
    layouts: list[torch.Tensor]


def measure(
    case: Case,
    got: list[torch.Tensor],
    wants: Outputs,
    truth: Fp64Reference,
    known: Sequence[float] = (),
    hurry: bool = False,
    only: Sequence[int] | None = None,
    choices: Collection[int] = (),
    like: Layouts = (),
    float32_first: bool = False,
    rounded: Rounded | None = None,
) -> Measured:
    """Return the errors at ``case``, ``only`` those of these outputs; raise where an output has another form.

    ``got`` lets go of what is measured. ``wants``: the original's outputs. ``known``: the original's own errors at
    the first case, one per output.

    An output that is as near to the original as the original is to the fp64 reference, plus rounding, is
    within twice that of the reference (the triangle inequality). This is the tolerance, so fp64 is not run.
    ``hurry``: fp64 is not run either, output by output, where the difference to the original is within
    rounding alone. ``choices``: outputs whose error is the share that differs (``saved_choices``). ``like``: as in
    ``compare.why_other_form``. ``float32_first``: where 16 bits make the original's error, the reference is in
    float32, which takes half the memory, unless an output is so far from it that rounding is amplified. ``rounded``:
    the original with roundings that a seed determines.
    """
    if len(got) != len(wants):
        raise _refused(case, f"it returned {len(got)} tensors and the original {len(wants)}")
    outputs = range(len(got)) if only is None else only
    may_be_near = known or [0.0] * len(got) if known or hurry else ()
    one = _Comparison(case, got, wants, truth, choices, like, rounded)
    # what backward computes of all that forward saved is less than what it computes on the way
    repeats = wants.is_repeatable and _bytes(got) >= _bytes(case.inputs)
    for i, tensor in wants:
        one.take(i, tensor, may_be_near[i] if may_be_near and i in outputs else None)
        is_large = tensor.nbytes >= _LARGE
        del tensor  # the next one is computed meanwhile
        if i not in outputs or (hurry and i in one.answers and is_large):
            one.let_go(i)
        elif repeats and is_large:
            one.put_off(i)
    one.check_unlike()
    if len(one.answers) < len(outputs):
        one.measure(one.in_question(outputs) if hurry else outputs, float32_first)
    return Measured([one.answers[i] for i in outputs], [one.layouts[i] for i in range(len(got))])


class _Comparison:
    """Of the outputs ``got`` with the original's, as far as they are held."""

    def __init__(
        self,
        case: Case,
        got: list[torch.Tensor],
        wants: Outputs,
        truth: Fp64Reference,
        choices: Collection[int],
        like: Layouts,
        rounded: Rounded | None,
    ) -> None:
        self._case, self._got, self._wants, self._truth = case, got, wants, truth
        self._rounded = rounded
        self._choices, self._like = choices, like
        self._half = tolerance.narrowest(truth.graph)
        self._scale = 0.0
        self._unlike: list[int] = []
        self._want: dict[int, torch.Tensor] = {}
        self.layouts: dict[int, torch.Tensor] = {}
        self.answers: dict[int, Answer] = {}

    def take(self, i: int, want: torch.Tensor, own: float | None) -> None:
        """Compare the form of output ``i``, and its values: with the original's ``own`` error, they may be near."""
        self.layouts[i] = layout_of(want)
        self._want[i] = want
        with on_free_cpus():  # another process may be trying the original at other cases
            is_unlike = self._why_other_form(i) is not None
            near = own is not None and not is_unlike
            errors = tolerance.errors(self._got[i], want, None) if near else None
        if is_unlike:
            self._unlike.append(i)
            return
        limit = tolerance.allowed(want.dtype, own) - (own or 0.0)
        if errors is not None and errors.error <= limit:
            small = _smallness(want)
            self.answers[i] = Answer(self._case, i, want.dtype, errors, is_near=True, **small)

    def let_go(self, i: int) -> None:
        """Hold output ``i`` no longer, unless its form is in question."""
        if i not in self._unlike:
            self._forget(i)
            self._got[i] = _LET_GO

    def put_off(self, i: int) -> None:
        """Hold the original's output ``i`` no longer: it is computed again when it is wanted."""
        if i not in self._unlike:
            self._forget(i)

    def _forget(self, i: int) -> None:
        if i in self._want:
            self._scale = max(self._scale, _magnitude(self._want.pop(i)))

    def in_question(self, outputs: Sequence[int]) -> list[int]:
        """Return the outputs that are not near, and, for small ones among them, some others to compare with."""
        far = [i for i in outputs if i not in self.answers]
        if all(self.layouts[i].numel() > tolerance.FEW for i in far):
            return far
        held = (i for i in self.answers if i in self._want and self.layouts[i].is_floating_point())
        others = sorted(held, key=lambda i: self.layouts[i].numel())
        return sorted([*far, *others[:PEERS]])

    def check_unlike(self) -> None:
        """Raise unless the fp64 reference has the form of each output that is unlike the original's."""
        if not self._unlike:
            return
        unlike = sorted(self._unlike)
        found = dict(fp64_outputs(self._case, self._truth.of(unlike)))
        finite = are_finite(self._case.inputs)
        for k, i in enumerate(unlike):
            there = found[k] if len(found) == len(unlike) else None
            sentence = self._why_other_form(i, truth=there, overflows=finite)
            if sentence and not self._are_places_rounded(i):
                raise _refused(self._case, sentence)

    def _are_places_rounded(self, i: int) -> bool:
        """Whether a rounding of the original moves NaN and infinity to or from as many places as the engine does.

        In fp64 no run is more exact: a difference of two products is 0 or a last digit, by how they are rounded, and
        what is divided by it is infinite or not.
        """
        want = self._want[i]
        if not self._is_open(want) or self._why_other_form(i, places=False):
            return False
        count = int(compare.misplaced(self._got[i], want).sum())
        return any(int(compare.misplaced(d, want).sum()) >= count for d in self._draws(i))

    def _is_open(self, want: torch.Tensor) -> bool:
        """Whether the case is derived, and ``want`` computed in fp64."""
        is_wide = any(t.dtype is torch.float64 for t in (want, *self._case.inputs))
        return is_wide and may_be_ill_conditioned(self._case)

    def _draws(self, i: int) -> Iterator[torch.Tensor]:
        """Yield output ``i`` of the original under different roundings."""
        if self._rounded is not None:
            found = (self._rounded(self._case, seed) for seed in range(DRAWS))
            yield from (outputs[i] for outputs in found if outputs is not None)

    def _without_rounded(self, i: int, errors: RelativeErrors) -> RelativeErrors | None:
        """Errors without the values that are far from the original's; ``None`` unless rounding moves as many.

        What is divided by a rounding error is as large as that is small: where a rounding makes some of an output
        infinite, nothing bounds the others of that kind.
        """
        got, want = self._got[i], self._want[i]
        if not want.is_floating_point() or not self._is_open(want):
            return None
        own = errors.original_fp64
        limit = tolerance.allowed(want.dtype, own)
        seen = errors.error if own is None else errors.error_fp64
        if seen is None or seen <= limit:
            return None
        far = compare.far_apart(got, want, limit)
        for drawn in self._draws(i):
            moved = compare.far_apart(drawn, want, limit)
            if bool(compare.misplaced(drawn, want).any()) and int(moved.sum()) >= int(far.sum()):
                return tolerance.errors(torch.where(far, want, got), want, None)
        return None

    def measure(self, outputs: Sequence[int], float32_first: bool) -> None:
        """Compare ``outputs`` with the reference; no other is held any longer."""
        for i in set(range(len(self._got))).difference(outputs):
            self.let_go(i)
        self._scale = max(self._scale, *map(_magnitude, self._want.values()), 0.0)
        theirs = self._theirs(outputs)
        left = list(outputs)
        if float32_first and self._half is not None:
            floats = [i for i in outputs if self.layouts[i].dtype in _BY_FLOAT32]
            for k, found in fp64_outputs(self._case, self._truth.in_float32().of(floats)):
                answer = self._measured(floats[k], theirs, found)
                if _is_certain(answer):
                    self._answer(replace(answer, in_float32=True))
                    left.remove(floats[k])
        for k, found in fp64_outputs(self._case, self._truth.of(left)):
            self._answer(self._measured(left[k], theirs, found))
        for i in left:  # those behind an op that has no fp64 kernel
            if self._got[i] is not _LET_GO:
                self._answer(self._measured(i, theirs, None))

    def _theirs(self, outputs: Collection[int]) -> Iterator[None]:
        """Compute outputs that were put off; each step makes ``_want`` hold one more of them."""
        pending = set(outputs).difference(self._want)
        for i, tensor in self._wants if pending else ():
            if i in pending:
                self._want[i] = tensor
                del tensor
                yield

    def _measured(self, i: int, theirs: Iterator[None], truth: torch.Tensor | None) -> Answer:
        while i not in self._want:
            next(theirs)
        got, want = self._got[i], self._want[i]
        errors = tolerance.errors(got, want, truth, self._scale, self._half)
        found = Answer(self._case, i, want.dtype, errors, half=self._half, **_smallness(want))
        if (rest := self._without_rounded(i, errors)) is not None:
            return replace(found, errors=rest, is_near=True)
        if i in self._choices and errors.error:
            share = tolerance.share_apart(got, want)
            found = replace(found, errors=replace(errors, error=share), is_choice=True)
        return found

    def _answer(self, answer: Answer) -> None:
        self.answers[answer.output] = answer
        del self._want[answer.output]
        self._got[answer.output] = _LET_GO

    def _why_other_form(self, i: int, **how: Any) -> str | None:
        """A sentence on how output ``i`` differs in form, if it does.

        Torch may choose other layouts at other sizes than at the first sample (``like``), by the meaningless stride of
        an axis of size 1 or by the size of a convolution. A view that works on the first sample's result works on one
        with the same layout.
        """
        # Engines read inputs as if contiguous, and their outputs' strides follow: this is right for a layout
        # that the model was not sampled with.
        strides = self._case.kind != "layout"
        like = self._like[i] if self._like else None
        return compare.why_other_output(i, self._got[i], self._want[i], strides, like=like, **how)


def _is_certain(answer: Answer) -> bool:
    """Whether a reference in float32, whose own rounding counts for nothing then, decides."""
    own = answer.errors.original_fp64
    if own is None:
        is_rounding = answer.errors.error == 0.0 and not answer.errors.is_amplified
        return is_rounding and not answer.is_choice
    return not answer.is_choice and (answer.dtype in HALVES or own >= _COARSE)


def known_errors(answers: Sequence[Answer]) -> list[float]:
    """Return the original's own errors at the one case of ``answers``; empty without an fp64 reference."""
    own = [a.errors.original_fp64 for a in answers]
    exact = [not (a.dtype.is_floating_point or a.dtype.is_complex) for a in answers]
    if any(e is None and not whole for e, whole in zip(own, exact, strict=True)):
        return []
    return [e or 0.0 for e in own]


def fp64_reference(case: Case, truth: Fp64Reference) -> Tensors | None:
    """Return the outputs in fp64, where indices computed from floats may differ; ``None`` where an op raises."""
    found = dict(fp64_outputs(case, truth))
    return [found[k] for k in range(len(found))] if len(found) == truth.count else None


def fp64_outputs(case: Case, truth: Fp64Reference) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the outputs in fp64 by number, as they are computed; nothing from an op on that raises."""
    if not truth.count:
        return
    if (known := truth.known(case.inputs)) is not None:
        yield from enumerate(known)
        return
    inputs = tuple(map(copied, case.inputs)) if truth.writes else case.inputs
    yield from each_guarded(case, truth.each(inputs), in_bounds)


def _refused(case: Case, sentence: str) -> Refused:
    return Refused(Code.WRONG_VALUES, f"at {describe_case(case)} {sentence}.")


def _bytes(tensors: Tensors) -> int:
    return sum(t.nbytes for t in tensors)


def _magnitude(want: torch.Tensor) -> float:
    return tolerance.magnitude(want) if want.is_floating_point() else 0.0


def _smallness(want: torch.Tensor) -> dict[str, Any]:
    """Whether an output is of few elements, and then its magnitude."""
    if want.numel() > tolerance.FEW or not want.is_floating_point():
        return {}
    return {"is_small": True, "magnitude": tolerance.magnitude(want)}
