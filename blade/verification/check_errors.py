# SPDX-License-Identifier: Apache-2.0
"""Check the measured errors of an engine at all cases against the allowed ones.

    check_errors(answers, answers_at, moves_at)      # raises Refused(WRONG_VALUES) where one is too large

The original's own error at one case may be small by chance (few elements). If it is below the median over all
cases, the tolerance is twice that median, and a larger error is checked with other contents before it counts.
A small output is also compared with the median over the other outputs of its case: training has no other
cases. And it may be small by chance itself, a sum that nearly cancels out at one row: its errors are taken relative to
its usual magnitude at contents like the sample's, if that is more.

Each draw runs engine, original and fp64 once, for all outputs in doubt. At derived contents an error is also right if a
rounding of the inputs causes as large a change in the original. So it is at the user's own where 16-bit arithmetic
amplifies rounding beyond what fp64 could be a reference for, in fp64 itself, for which there is no reference but the
original, and for choices that forward saves for backward. Elsewhere
in 16-bit arithmetic the original itself must move by as much: of hundreds of gradients some are sums that nearly
cancel out, whose own error says little.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from sys import float_info

import torch

from blade.core.reason import Code
from blade.errors import Refused
from blade.report import shape_text
from blade.verification.cases import Case
from blade.verification.conditioning import may_be_ill_conditioned
from blade.verification.resample import (
    MAX_CHANCE_RATIO,
    changed_inputs,
    passes_on_other_inputs,
    resampled,
)
from blade.verification.tolerance import RelativeErrors, allowed, usual_error

_WIDEST = (torch.float64, torch.complex128)


@dataclass(frozen=True)
class Answer:
    """One output of the engine at one case, measured."""

    case: Case
    output: int
    dtype: torch.dtype
    errors: RelativeErrors
    is_near: bool = False  # so near to the original that fp64 was not run
    is_small: bool = False  # of so few elements that all of them may be exact by chance
    half: torch.dtype | None = None  # 16-bit dtype of part of the computation
    magnitude: float = 0.0  # of a small output: the original's largest value
    in_float32: bool = False  # so is the reference
    is_choice: bool = (
        False  # saved for backward: its error is the share that differs (saved_choices)
    )


@dataclass(frozen=True)
class _Suspect:
    """An answer whose error is ``ratio`` > 1 times the allowed one; ``usual`` is the original's own error."""

    answer: Answer
    usual: float
    ratio: float
    size: float  # its usual magnitude

    def may_be_chance(self) -> bool:
        return self.answer.errors.original_fp64 is not None and self.ratio <= MAX_CHANCE_RATIO

    def may_be_ill_conditioned(self) -> bool:
        """Whether a rounding of what the original computes with may cause as large a change."""
        return self.known_as_ill_conditioned() or (
            self.answer.half is not None and self.may_be_chance()
        )

    def known_as_ill_conditioned(self) -> bool:
        one = self.answer
        amplifies = one.half is not None and one.errors.is_amplified
        has_no_reference = one.dtype in _WIDEST and one.errors.original_fp64 == 0.0
        is_open = amplifies or has_no_reference or one.is_choice
        return is_open or may_be_ill_conditioned(one.case)

    def excused_by(self) -> float:
        """The original's change by one rounding that excuses the error; any change where it is infinite."""
        error = _bound(self.answer, self.usual, 0.0)[0]
        if error == float("inf"):
            return float_info.min
        return error / 2 if self.known_as_ill_conditioned() else error

    def refusal(self) -> Refused:
        return Refused(
            Code.WRONG_VALUES,
            f"at {describe_case(self.answer.case)} {_sentence(self.answer, self.usual, self.size)}",
        )


AnswersAt = Callable[[Case, Sequence[int], bool], Sequence[Answer] | None]
"""Measure these outputs at a case; ``None`` if the engine or the original does not answer there, or, if that is asked
for, the original not in finite numbers.
"""
SensitivityAt = Callable[[Case, Sequence[int], Sequence[float]], Sequence[float]]
"""Relative change of these outputs of the original when a case's floats change by one rounding; the last operand: how
much of it is enough.
"""


def check_errors(answers: Sequence[Answer], answers_at: AnswersAt, moves_at: SensitivityAt) -> None:
    """Compare each error with the allowed one; raises ``Refused``."""
    doubts: dict[str, list[_Suspect]] = {}
    for one in answers:
        if one.is_near:
            continue
        peers = [
            a.errors.original_fp64
            for a in answers
            if a.output == one.output or (one.is_small and a.case is one.case)
        ]
        usual, size = usual_error(peers), _usual_magnitude(one, answers)
        doubt = _Suspect(one, usual, _over(one, usual, size), size)
        if doubt.ratio <= 1:
            continue
        if not (doubt.may_be_chance() or doubt.may_be_ill_conditioned()):
            raise doubt.refusal()
        doubts.setdefault(one.case.name, []).append(doubt)
    for several in doubts.values():
        _check_suspects(several, answers_at, moves_at)


def _check_suspects(
    doubts: Sequence[_Suspect], answers_at: AnswersAt, moves_at: SensitivityAt
) -> None:
    """Check other draws of the one case of ``doubts``, then the sensitivity to one rounding."""
    case = doubts[0].answer.case
    left = [doubt for doubt in doubts if doubt.may_be_chance()]
    for which in changed_inputs(case):
        outputs = [doubt.answer.output for doubt in left]
        again = [
            _ratios(answers_at(drawn(), outputs, True) or answers_at(moved(), outputs, False), left)
            for drawn, moved in (resampled(case, which) if left else ())
        ]
        left = [
            doubt
            for k, doubt in enumerate(left)
            if not passes_on_other_inputs(doubt.ratio, [ratios[k] for ratios in again])
        ]
    wrong = [doubt for doubt in doubts if not doubt.may_be_chance()] + left
    if not wrong:
        return
    for doubt in wrong:
        if not doubt.may_be_ill_conditioned():
            raise doubt.refusal()
    enough = [doubt.excused_by() for doubt in wrong]
    moves = moves_at(case, [doubt.answer.output for doubt in wrong], enough)
    for doubt, moved, least in zip(wrong, moves, enough, strict=True):
        if not moved >= least:
            raise doubt.refusal()


def _ratios(answers: Sequence[Answer] | None, doubts: Sequence[_Suspect]) -> list[float | None]:
    """Errors over the allowed ones, where there are answers; unlike these, they do not hold a case's inputs."""
    if answers is None:
        return [None] * len(doubts)
    return [_over(a, one.usual, one.size) for a, one in zip(answers, doubts, strict=True)]


def _usual_magnitude(one: Answer, answers: Sequence[Answer]) -> float:
    """Return the median magnitude of a small output at contents like the sample's; 0 for others."""
    if not one.is_small or not _is_like_the_sample(one.case):
        return 0.0
    alike = (a for a in answers if a.output == one.output and _is_like_the_sample(a.case))
    return median(a.magnitude for a in alike)


def _is_like_the_sample(case: Case) -> bool:
    return case.kind in ("sample", "probe", "size") or case.name in _ALIKE


_ALIKE = ("random contents", "shuffled contents")


def _over(one: Answer, usual: float, size: float) -> float:
    """Return the error over the allowed one; infinite where none is allowed and there is one."""
    seen, limit, _ = _bound(one, usual, size)
    return seen / limit if limit else (float("inf") if seen else 0.0)


def _bound(one: Answer, usual: float, size: float) -> tuple[float, float, float | None]:
    """Return the error, the allowed one, and the original's own if known (``usual``: at other cases).

    ``size``: the output's usual magnitude, which errors are relative to if it is more than the one here.
    """
    own = one.errors.original_fp64
    part = min(1.0, one.magnitude / size) if size > 0 else 1.0
    if own is None:
        dtype = one.dtype if one.half is None or not one.dtype.is_floating_point else one.half
        return one.errors.error * part, allowed(dtype, None), None
    assert one.errors.error_fp64 is not None
    own = max(own * part, usual)
    return one.errors.error_fp64 * part, allowed(one.dtype, own), own


def _sentence(one: Answer, usual: float, size: float) -> str:
    seen, limit, own = _bound(one, usual, size)
    place = " elsewhere" if size > one.magnitude else ""
    reference = "a float32 run" if one.in_float32 else "an fp64 run"
    return (
        f"output {one.output} is {seen:.1e} from {'the original' if own is None else reference} (relative to its "
        f"largest magnitude{place}); {limit:.1e} is allowed, the original's own error being "
        f"{'unknown' if own is None else f'{own:.1e}'}."
    )


def describe_case(case: Case) -> str:
    """Describe ``case`` in a sentence."""
    return f"{case.name} ({shape_text(t.shape for t in case.inputs)})"
